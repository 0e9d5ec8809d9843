#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "offload/disk_file.h"
#include "offload/watch.h"

namespace sluice::offload {
namespace {

constexpr std::uint64_t kWake = UINT64_MAX;  // user data of the eventfd's read; a block's is its slot's index
constexpr unsigned kSubmitAttempts = 1000;

std::string why_no_ring(int error_number) {
  std::ifstream file("/proc/sys/kernel/io_uring_disabled");
  int disabled = 0;
  if (error_number == EPERM && file >> disabled && disabled != 0)
    return fmt::format("kernel.io_uring_disabled is {}", disabled);
  switch (error_number) {
    case EPERM:
    case EACCES:
      return "io_uring is forbidden here (by seccomp, as in Docker by default)";
    case ENOSYS:
      return "this kernel has no io_uring";
    case ENOMEM:
      return "there is no memory for a ring: see 'ulimit -l'";
    default:
      return "a ring cannot be set up: " + errno_text(error_number);
  }
}

class Ring {
 public:
  explicit Ring(unsigned entries) {
    const int result = io_uring_queue_init(entries, &ring_, 0);
    if (result < 0) fail(ErrorCode::kIo, "io_uring cannot be used: {}", why_no_ring(-result));
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
};

bool ring_has_operations(Ring& ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(ring.get());
  if (probe == nullptr) return false;
  const bool result = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return result;
}

int make_eventfd() {
  const int number = ::eventfd(0, EFD_CLOEXEC);
  if (number < 0) fail(ErrorCode::kIo, "an eventfd cannot be made: {}", errno_text(errno));
  return number;
}

// A service whose single thread owns the ring. The thread sleeps in the kernel until a block has ended or a
// call has come, which wakes it by the eventfd.
class UringService final : public IoService, public TransferSink {
 public:
  explicit UringService(const IoOptions& options);
  ~UringService() override;

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    return make_disk_file(open_direct(path, mode), block_bytes_, *this);
  }
  std::string name() const override { return "io_uring"; }
  Watch& watch() override { return watch_; }

 private:
  void submit(std::shared_ptr<Transfer> transfer) override;
  void signal() const;

  // Called on the service's thread.
  void work();
  void watch_eventfd();
  void fill();
  std::optional<Block> take();
  void prepare(std::size_t slot);
  void enter(bool wait);
  void reap();
  void end_call(std::size_t slot, int result);
  void end_block(Block& block, std::exception_ptr error);

  const std::size_t block_bytes_;
  Watch watch_;
  Ring ring_;
  Descriptor eventfd_;
  std::uint64_t eventfd_count_ = 0;  // the kernel writes the eventfd's count here
  bool watching_ = false;
  std::vector<Block> slots_;  // the blocks that the kernel is working on
  std::vector<std::size_t> free_slots_;
  std::deque<std::shared_ptr<Transfer>> ended_;  // transfers whose Done is yet to be called

  std::mutex mutex_;
  BlockQueue queue_;       // guarded by mutex_
  bool woken_ = false;     // guarded by mutex_: the thread will look at the queue before it sleeps
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

UringService::UringService(const IoOptions& options)
    : block_bytes_((check_options(options), options.block_bytes)),
      watch_(options.patience),
      ring_(options.queue_depth + 1),  // one more entry, for the eventfd
      eventfd_(make_eventfd()),
      slots_(options.queue_depth) {
  if (!ring_has_operations(ring_))
    fail(ErrorCode::kIo, "io_uring cannot be used: this kernel's is too old (before Linux 5.6)");
  for (std::size_t i = slots_.size(); i > 0; --i) free_slots_.push_back(i - 1);
  thread_ = std::thread([this] { work(); });
}

UringService::~UringService() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  signal();
  thread_.join();
}

void UringService::submit(std::shared_ptr<Transfer> transfer) {
  bool asleep = false;
  {
    const std::lock_guard lock(mutex_);
    queue_.push(std::move(transfer));
    asleep = !std::exchange(woken_, true);
  }
  if (asleep && std::this_thread::get_id() != thread_.get_id()) signal();
}

void UringService::signal() const {
  const std::uint64_t one = 1;
  while (::write(eventfd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void UringService::work() {
  watch_eventfd();
  for (;;) {
    reap();
    fill();
    if (!ended_.empty()) {
      // New blocks are submitted first, so that they run while a Done verifies a checksum.
      enter(false);
      const std::shared_ptr<Transfer> transfer = std::move(ended_.front());
      ended_.pop_front();
      transfer->finish();
    } else if (watching_) {
      enter(true);
    } else {
      return;  // the service ends; its files, and so all transfers, have ended
    }
  }
}

void UringService::watch_eventfd() {
  io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
  io_uring_prep_read(entry, eventfd_.get(), &eventfd_count_, sizeof eventfd_count_, 0);
  io_uring_sqe_set_data64(entry, kWake);
  watching_ = true;
}

std::optional<Block> UringService::take() {
  const std::lock_guard lock(mutex_);
  std::optional<Block> block = queue_.take();
  if (!block) woken_ = false;
  return block;
}

void UringService::fill() {
  while (!free_slots_.empty()) {
    std::optional<Block> block = take();
    if (!block) return;
    if (!block->needs_io()) {
      end_block(*block, nullptr);
      continue;
    }
    const std::size_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = std::move(*block);
    prepare(slot);
    // Blocks are submitted one by one. From several at once Linux makes the largest requests that the device
    // takes, and a few large ones keep it less busy than blocks of the chosen size.
    enter(false);
  }
}

void UringService::prepare(std::size_t slot) {
  const Block& block = slots_[slot];
  const Extent& extent = block.transfer->extent();
  // There always is a free entry: the ring has one for every slot and one for the eventfd.
  io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
  const auto operation = extent.direction == Direction::kRead ? IORING_OP_READ : IORING_OP_WRITE;
  io_uring_prep_rw(operation, entry, extent.descriptor, block.data + block.moved,
                   static_cast<unsigned>(block.bytes - block.moved), block.offset + block.moved);
  io_uring_sqe_set_data64(entry, slot);
}

void UringService::enter(bool wait) {
  for (unsigned attempt = 0; attempt < kSubmitAttempts; ++attempt) {
    const int result = wait ? io_uring_submit_and_wait(ring_.get(), 1) : io_uring_submit(ring_.get());
    if (result >= 0 || result == -EINTR || result == -EBUSY) return;  // EBUSY: reap completions first
    if (result != -EAGAIN) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // The kernel may still write to buffers of callers, who cannot be told which ones, so there is no safe way
  // to go on.
  log().error("the io_uring of this process has stopped working, so the process ends; see the kernel's log");
  std::abort();
}

void UringService::reap() {
  io_uring_cqe* completion = nullptr;
  while (io_uring_peek_cqe(ring_.get(), &completion) == 0) {
    const std::uint64_t data = io_uring_cqe_get_data64(completion);
    const int result = completion->res;
    io_uring_cqe_seen(ring_.get(), completion);
    if (data != kWake) {
      end_call(static_cast<std::size_t>(data), result);
      continue;
    }
    watching_ = false;
    const std::lock_guard lock(mutex_);
    if (!stopping_) watch_eventfd();
  }
}

void UringService::end_call(std::size_t slot, int result) {
  std::exception_ptr error;
  if (slots_[slot].advance(result, &error) == Block::Outcome::kAgain) return prepare(slot);
  Block block = std::exchange(slots_[slot], {});
  free_slots_.push_back(slot);
  end_block(block, std::move(error));
}

void UringService::end_block(Block& block, std::exception_ptr error) {
  if (block.transfer->end_block(std::move(error))) ended_.push_back(std::move(block.transfer));
}

}  // namespace

std::unique_ptr<IoService> make_uring_service(const IoOptions& options) {
  return std::make_unique<Leavable<UringService>>(options);
}

bool uring_available(std::string* why) {
  try {
    Ring ring(2);
    if (ring_has_operations(ring)) return true;
    if (why != nullptr) *why = "this kernel's io_uring is too old (before Linux 5.6)";
  } catch (const Error& error) {
    if (why != nullptr) *why = error.what();
  }
  return false;
}

std::unique_ptr<IoService> make_io_service(const IoOptions& options) {
  if (options.way == IoWay::kThreads) return make_thread_service(options);
  std::string why;
  if (uring_available(&why)) return make_uring_service(options);
  log().warn("{}; files are read and written by {} threads instead, which is slower", why, options.threads);
  return make_thread_service(options);
}

}  // namespace sluice::offload
