#include "offload/transfer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "offload/watch.h"

namespace sluice::offload {
namespace {

// More attempts in a row without progress are an error, so that a transfer cannot hang.
constexpr unsigned kIdleAttempts = 200;

const char* verb(Direction direction) { return direction == Direction::kRead ? "read" : "write"; }

std::exception_ptr io_error(const std::string& text) {
  return std::make_exception_ptr(Error(ErrorCode::kIo, text));
}

}  // namespace

void check_aligned(const std::string& file, Direction direction, std::uint64_t offset, const void* data,
                   std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if ((offset | bytes | address) % kDiskBlock == 0) return;
  fail(ErrorCode::kInvalidArgument,
       "{}: {} of {} bytes at offset {} with a buffer at {:#x}: offset, size and address must be multiples "
       "of {}",
       file, verb(direction), bytes, offset, address, kDiskBlock);
}

std::exception_ptr read_past_end(const std::string& file, std::uint64_t offset, std::size_t expected,
                                 std::size_t found) {
  const std::string end = found > 0 ? fmt::format("at {}", offset + found) : "there or before";
  return io_error(fmt::format("{}: read at offset {}: expected {} bytes, found {}: the file ends {}", file,
                              offset, expected, found, end));
}

std::exception_ptr transfer_error(const std::string& file, Direction direction, std::uint64_t offset,
                                  std::size_t expected, int error_number) {
  return io_error(fmt::format("{}: {} at offset {}: expected {} bytes, found: {}{}", file, verb(direction),
                              offset, expected, errno_text(error_number), errno_advice(error_number)));
}

std::exception_ptr transfer_stuck(const Transfer& transfer, std::chrono::milliseconds patience) {
  const Extent& extent = transfer.extent();
  return io_error(fmt::format(
      "{}: {} at offset {}: expected {} bytes, found: no answer, and nothing of the file has moved for "
      "{:.3g} s; the device hangs: see the kernel's log",
      transfer.file(), verb(extent.direction), extent.offset, extent.bytes,
      std::chrono::duration<double>(patience).count()));
}

void OpenTransfers::begin() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void OpenTransfers::end() {
  const std::lock_guard lock(mutex_);
  if (--count_ == 0) none_.notify_all();  // under the lock, since this object may be destroyed right after
}

void OpenTransfers::wait() {
  std::unique_lock lock(mutex_);
  none_.wait(lock, [&] { return count_ == 0; });
}

Transfer::Transfer(const Extent& extent, std::shared_ptr<const void> descriptor, std::size_t block_bytes,
                   std::string file, OpenTransfers& open, Watch& watch, Done done)
    : extent_(extent),
      descriptor_(std::move(descriptor)),
      block_bytes_(block_bytes),
      blocks_(std::max<std::size_t>(1, divide_up(extent.bytes, block_bytes))),
      file_(std::move(file)),
      open_(open),
      watch_(watch),
      done_(std::move(done)),
      open_blocks_(blocks_) {
  open_.begin();
}

bool Transfer::failed() const {
  const std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

bool Transfer::end_block(std::exception_ptr error) {
  watch_.moved(*this);
  const std::lock_guard lock(mutex_);
  if (error_ == nullptr) error_ = std::move(error);
  return --open_blocks_ == 0;
}

// Returns the transfer's error to the first caller, and nothing to later ones.
std::optional<std::exception_ptr> Transfer::claim_end(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(ended_, true)) return std::nullopt;
  if (error_ == nullptr) error_ = std::move(error);
  return error_;
}

void Transfer::finish() noexcept {
  descriptor_.reset();
  watch_.ended(*this);
  if (auto error = claim_end(nullptr)) end(std::move(*error));
}

void Transfer::abandon(std::exception_ptr error) noexcept {
  if (auto claimed = claim_end(std::move(error))) end(std::move(*claimed));
}

void Transfer::end(std::exception_ptr error) noexcept {
  {
    // The Done's captures are destroyed before the file's destructor may continue.
    const Done done = std::move(done_);
    done(std::move(error));
  }
  open_.end();
}

Block::Outcome Block::try_again(std::exception_ptr* error, int error_number) {
  if (++idle_attempts < kIdleAttempts) {
    if (error_number != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Outcome::kAgain;
  }
  *error = transfer_error(transfer->file(), transfer->extent().direction, offset, bytes, error_number);
  return Outcome::kEnded;
}

Block::Outcome Block::advance(std::int64_t result, std::exception_ptr* error) {
  if (transfer->failed()) return Outcome::kEnded;
  const bool reading = transfer->extent().direction == Direction::kRead;
  if (result == -EINTR || result == -EAGAIN) return try_again(error, static_cast<int>(-result));
  if (result < 0) {
    *error = transfer_error(transfer->file(), transfer->extent().direction, offset + moved, bytes - moved,
                            static_cast<int>(-result));
    return Outcome::kEnded;
  }
  const auto count = static_cast<std::size_t>(result);
  if (moved + count >= bytes) return Outcome::kEnded;
  // A read that stops inside a disk block has reached the end of the file.
  if (reading && (count == 0 || count % kDiskBlock != 0)) {
    *error = read_past_end(transfer->file(), offset, bytes, moved + count);
    return Outcome::kEnded;
  }
  const std::size_t whole = count / kDiskBlock * kDiskBlock;
  if (whole == 0) return try_again(error, EIO);
  moved += whole;
  idle_attempts = 0;
  return Outcome::kAgain;
}

void BlockQueue::push(std::shared_ptr<Transfer> transfer) {
  const auto [urgency, direction] = std::pair(transfer->extent().urgency, transfer->extent().direction);
  Lane& lane = of_[static_cast<std::size_t>(urgency)].lanes[static_cast<std::size_t>(direction)];
  lane.transfers.push_back(std::move(transfer));
}

std::optional<Block> BlockQueue::take() {
  if (empty()) return std::nullopt;
  auto& [lanes, last] = of_[of_[0].empty() ? 1 : 0];
  if (!lanes[1 - last].transfers.empty()) last = 1 - last;
  auto& [transfers, next_block] = lanes[last];
  const std::shared_ptr<Transfer>& first = transfers.front();
  const Extent& extent = first->extent();
  const std::size_t begin = next_block * first->block_bytes();
  Block block;
  block.transfer = first;
  block.offset = extent.offset + begin;
  block.data = extent.data + begin;
  block.bytes = std::min(first->block_bytes(), extent.bytes - begin);
  if (++next_block == first->blocks()) {
    transfers.pop_front();
    next_block = 0;
  }
  return block;
}

void check_options(const IoOptions& options) {
  if (options.queue_depth < 1 || options.queue_depth > 4096)
    fail(ErrorCode::kInvalidArgument, "an I/O queue depth of {} was given; it must be from 1 to 4096",
         options.queue_depth);
  if (options.threads < 1 || options.threads > 1024)
    fail(ErrorCode::kInvalidArgument, "{} I/O threads were given; it must be from 1 to 1024",
         options.threads);
  if (options.block_bytes == 0 || options.block_bytes % kDiskBlock != 0 || options.block_bytes > kGiB)
    fail(ErrorCode::kInvalidArgument,
         "an I/O block size of {1} was given; it must be a multiple of {0} and at most 1 GiB", kDiskBlock,
         options.block_bytes);
}

}  // namespace sluice::offload
