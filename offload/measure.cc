#include "offload/measure.h"

#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "offload/disk_file.h"
#include "offload/watch.h"

namespace sluice::offload {
namespace {

using Clock = std::chrono::steady_clock;

double rate_since(Clock::time_point begin, std::uint64_t bytes) {
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(bytes) / std::max(seconds, 1e-9);
}

void check_shape(std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory) {
  ensure(bytes > 0 && shape.block > 0 && shape.depth > 0 && memory.size() >= shape.bytes(),
         "{} bytes cannot be streamed, {} x {} at a time, through a buffer of {}", bytes, shape.depth,
         shape.block, memory.size());
}

using Part = std::span<std::byte>;
using OnPart = std::function<void(std::uint64_t offset, Part part)>;

// Tracks which parts of a buffer are in no transfer.
class FreeParts {
 public:
  explicit FreeParts(std::size_t count) : free_(count) { std::iota(free_.begin(), free_.end(), 0); }

  // Waits for a free part and takes it. Returns nothing once a transfer has failed.
  std::optional<std::size_t> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failed_ || !free_.empty(); });
    if (failed_) return std::nullopt;
    const std::size_t part = free_.front();
    free_.pop_front();
    return part;
  }
  Done until_done(std::size_t part, Done then) {
    return [this, part, then = std::move(then)](std::exception_ptr error) {
      {
        const std::lock_guard lock(mutex_);
        failed_ |= error != nullptr;
        free_.push_back(part);
        changed_.notify_one();
      }
      then(std::move(error));  // last, since this object may be destroyed by then
    };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::size_t> free_;
  bool failed_ = false;
};

// Keeps `depth` transfers in flight. The part of the memory that became free first is used next, like the
// slots of updates. `ended` is called for each transfer that has ended.
template <class Start>
double stream(std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory, const Start& start,
              const OnPart& ended = {}) {
  check_shape(bytes, shape, memory);
  const Clock::time_point begin = Clock::now();
  FreeParts parts(shape.depth);
  std::vector<std::optional<std::uint64_t>> offsets(shape.depth);  // of the transfers in flight
  std::size_t under_way = 0;
  TransferGroup all;  // destroyed first: waits for the transfers, which use `parts`
  const auto memory_of = [&](std::size_t part, std::uint64_t offset) {
    return memory.subspan(part * shape.block, std::min<std::uint64_t>(shape.block, bytes - offset));
  };
  for (std::uint64_t next = 0; next < bytes || under_way > 0;) {
    const std::optional<std::size_t> part = parts.take();
    if (!part) break;
    if (const auto offset = std::exchange(offsets[*part], std::nullopt)) {
      --under_way;
      if (ended) ended(*offset, memory_of(*part, *offset));
    }
    if (next >= bytes) continue;
    offsets[*part] = next;
    ++under_way;
    start(next, memory_of(*part, next), parts.until_done(*part, all.add()));
    next += shape.block;
  }
  all.wait();
  return rate_since(begin, bytes);
}

}  // namespace

double measure_writes(File& file, std::uint64_t bytes, const StreamShape& shape,
                      std::span<std::byte> memory) {
  return stream(bytes, shape, memory, [&](std::uint64_t offset, Part part, Done done) {
    file.write(offset, part, std::move(done));
  });
}

double measure_reads(File& file, std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory) {
  return stream(bytes, shape, memory, [&](std::uint64_t offset, Part part, Done done) {
    file.read(offset, part, std::move(done));
  });
}

DiskRates measure_file(File& file, std::uint64_t bytes, const StreamShape& shape,
                       std::span<std::byte> memory) {
  DiskRates rates;
  rates.write = measure_writes(file, bytes, shape, memory);
  rates.read = measure_reads(file, bytes, shape, memory);
  return rates;
}

double measure_together(File& file, std::uint64_t bytes, const StreamShape& shape,
                        std::span<std::byte> memory) {
  const std::uint64_t half = bytes / 2 / kDiskBlock * kDiskBlock;
  ensure(half > 0, "{} bytes are too few to read one half and write the other", bytes);
  return stream(2 * half, shape, memory, [&](std::uint64_t offset, Part part, Done done) {
    const std::uint64_t block = offset / shape.block;
    const Part moved = part.first(std::min<std::uint64_t>(part.size(), half));
    const std::uint64_t at = std::min(block / 2 * shape.block, half - moved.size());
    if (block % 2 == 0)
      file.read(at, moved, std::move(done));
    else
      file.write(half + at, moved, std::move(done));
  });
}

DiskRates measure_record(RecordStore& store, RecordId record, std::uint64_t bytes, const StreamShape& shape,
                         std::span<std::byte> memory, Threads& threads) {
  DiskRates rates;
  rates.write = stream(bytes, shape, memory, [&](std::uint64_t offset, Part part, Done done) {
    store.write(record, offset, part, threads, std::move(done));
  });
  rates.read = stream(
      bytes, shape, memory,
      [&](std::uint64_t offset, Part part, Done done) {
        store.read_unchecked(record, offset, part, std::move(done));
      },
      [&](std::uint64_t offset, Part part) { store.check(record, offset, part, threads); });
  return rates;
}

void fill_for_measuring(std::span<std::byte> memory) {
  const CounterRandom random(1, 0);
  for (std::size_t i = 0; i + 16 <= memory.size(); i += 16)
    std::memcpy(memory.data() + i, random.block(i / 16).data(), 16);
}

namespace {

constexpr unsigned kRingEntries = 256;

class NoTransfers final : public TransferSink {
  Watch& watch() override { return watch_; }
  void submit(std::shared_ptr<Transfer> /*transfer*/) override {
    fail(ErrorCode::kInternal, "a file that was opened only to be allocated was read or written");
  }
  Watch watch_{IoOptions{}.patience};
};

// One pass over a file by a bare io_uring.
class BarePass {
 public:
  explicit BarePass(const OpenedFile& file) : file_(file) {
    std::string why;
    const bool usable = uring_available(&why);
    const int result = usable ? io_uring_queue_init(kRingEntries, &ring_, 0) : -EPERM;
    if (result < 0) fail(ErrorCode::kIo, "io_uring cannot be used: {}", usable ? errno_text(-result) : why);
  }
  ~BarePass() { io_uring_queue_exit(&ring_); }
  BarePass(const BarePass&) = delete;
  BarePass& operator=(const BarePass&) = delete;
  double run(Direction direction, std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory);

 private:
  void begin(Direction direction, std::uint64_t offset, std::span<std::byte> part);
  std::string end_one();

  const OpenedFile& file_;
  io_uring ring_{};
};

void BarePass::begin(Direction direction, std::uint64_t offset, std::span<std::byte> part) {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  ensure(entry != nullptr, "more than {} transfers are under way", kRingEntries);
  const auto operation = direction == Direction::kRead ? IORING_OP_READ : IORING_OP_WRITE;
  io_uring_prep_rw(operation, entry, file_.descriptor.get(), part.data(), static_cast<unsigned>(part.size()),
                   offset);
  io_uring_sqe_set_data64(entry, part.size());
}

// Waits for a transfer. Returns its error, or "". A short transfer is an error here, too: disks transfer
// whole blocks.
std::string BarePass::end_one() {
  io_uring_cqe* completion = nullptr;
  int result = 0;
  do result = io_uring_submit_and_wait(&ring_, 1);
  while (result == -EINTR);
  if (result >= 0) result = io_uring_wait_cqe(&ring_, &completion);
  // The kernel may still use the buffers, for an unknown time, so there is no way to go on.
  ensure(result >= 0, "{}: the ring has failed: {}", file_.name, errno_text(-result));
  const auto expected = static_cast<std::int64_t>(io_uring_cqe_get_data64(completion));
  const std::int64_t found = completion->res;
  io_uring_cqe_seen(&ring_, completion);
  if (found == expected) return {};
  return fmt::format("a transfer of {} bytes ended with {}", expected,
                     found < 0 ? errno_text(static_cast<int>(-found)) : fmt::format("{} of them", found));
}

// A part of the memory may be in two transfers at once, since its contents do not matter.
double BarePass::run(Direction direction, std::uint64_t bytes, const StreamShape& shape,
                     std::span<std::byte> memory) {
  check_shape(bytes, shape, memory);
  const Clock::time_point start = Clock::now();
  std::size_t under_way = 0;
  std::string error;
  const auto end = [&] {
    const std::string found = end_one();
    if (error.empty()) error = found;
    --under_way;
  };
  for (std::uint64_t offset = 0; offset < bytes && error.empty(); offset += shape.block, ++under_way) {
    if (under_way == shape.depth) end();
    const std::size_t slot = offset / shape.block % shape.depth;
    begin(direction, offset,
          memory.subspan(slot * shape.block, std::min<std::uint64_t>(shape.block, bytes - offset)));
    io_uring_submit(&ring_);
  }
  while (under_way > 0) end();
  if (!error.empty()) fail(ErrorCode::kIo, "{}: {}", file_.name, error);
  return rate_since(start, bytes);
}

}  // namespace

struct BareFile::State {
  OpenedFile opened;
  std::uint64_t bytes;
};

BareFile::BareFile(const std::string& folder, std::uint64_t bytes)
    : state_(std::make_unique<State>(State{open_direct(folder, OpenMode::kUnnamed), bytes})) {
  const OpenedFile& opened = state_->opened;
  const int copy = ::fcntl(opened.descriptor.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0)
    fail(ErrorCode::kIo, "{}: its descriptor cannot be duplicated: {}", opened.name, errno_text(errno));
  NoTransfers none;
  make_disk_file({Descriptor(copy), opened.name, opened.folder}, kDiskBlock, none)->allocate(bytes);
}
BareFile::~BareFile() = default;

DiskRates BareFile::measure(const StreamShape& shape, std::span<std::byte> memory) {
  ensure(shape.depth <= kRingEntries, "{} transfers at a time were asked for, but the ring has {} entries",
         shape.depth, kRingEntries);
  DiskRates rates;
  rates.write = BarePass(state_->opened).run(Direction::kWrite, state_->bytes, shape, memory);
  rates.read = BarePass(state_->opened).run(Direction::kRead, state_->bytes, shape, memory);
  return rates;
}

std::string BareFile::path() const {
  return fmt::format("/proc/{}/fd/{}", ::getpid(), state_->opened.descriptor.get());
}

std::unique_ptr<File> BareFile::open_in(IoService& service) const {
  return service.open(path(), OpenMode::kReadWrite);
}

}  // namespace sluice::offload
