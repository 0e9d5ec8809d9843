#pragma once
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "offload/file.h"

// Code that all files share: checking a call, cutting it into blocks, continuing and ending it.
namespace sluice::offload {

class Transfer;

enum class Direction : std::uint8_t { kRead, kWrite };

// Throws Error(kInvalidArgument) for a transfer that O_DIRECT does not allow.
void check_aligned(const std::string& file, Direction direction, std::uint64_t offset, const void* data,
                   std::size_t bytes);

std::exception_ptr read_past_end(const std::string& file, std::uint64_t offset, std::size_t expected,
                                 std::size_t found);
std::exception_ptr transfer_error(const std::string& file, Direction direction, std::uint64_t offset,
                                  std::size_t expected, int error_number);

std::exception_ptr transfer_stuck(const Transfer& transfer, std::chrono::milliseconds patience);

// Counts a file's transfers in flight, so that its destructor can wait for them. Thread rule: any thread.
class OpenTransfers {
 public:
  void begin();
  void end();
  void wait();

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  std::size_t count_ = 0;
};

// The bytes that a call of read() or write() moves.
struct Extent {
  int descriptor;
  Direction direction;
  Urgency urgency;
  std::uint64_t offset;
  std::byte* data;  // not written where the direction is kWrite
  std::size_t bytes;
};

class Watch;

// One call of File::read() or File::write() in flight. Thread rule: any thread; but finish() is called once,
// by the thread whose end_block() returned true.
class Transfer {
 public:
  // `descriptor` keeps the extent's file descriptor open until the kernel works on no block any more, even
  // after the File was destroyed, so that no other file gets its number meanwhile. REQUIRES: `open` outlives
  // finish() or abandon(), and `watch` outlives the transfer.
  Transfer(const Extent& extent, std::shared_ptr<const void> descriptor, std::size_t block_bytes,
           std::string file, OpenTransfers& open, Watch& watch, Done done);

  const Extent& extent() const { return extent_; }
  std::size_t block_bytes() const { return block_bytes_; }
  std::size_t blocks() const { return blocks_; }
  const std::string& file() const { return file_; }
  const OpenTransfers& open() const { return open_; }  // may dangle after abandon()
  bool failed() const;

  // Reports that one block has ended. Returns true for the last one: then the caller calls finish().
  bool end_block(std::exception_ptr error);
  void finish() noexcept;
  // Ends the transfer at once, although the kernel still works on it. The buffer may be used again.
  void abandon(std::exception_ptr error) noexcept;

 private:
  std::optional<std::exception_ptr> claim_end(std::exception_ptr error);
  void end(std::exception_ptr error) noexcept;
  const Extent extent_;
  std::shared_ptr<const void> descriptor_;
  const std::size_t block_bytes_;
  const std::size_t blocks_;
  const std::string file_;
  OpenTransfers& open_;
  Watch& watch_;
  Done done_;
  mutable std::mutex mutex_;
  std::size_t open_blocks_;
  std::exception_ptr error_;
  bool ended_ = false;
};

// A part of a transfer that takes one system call, or several where the kernel moves less than requested.
struct Block {
  std::shared_ptr<Transfer> transfer;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t moved = 0;
  unsigned idle_attempts = 0;  // consecutive system calls that moved nothing

  // Returns false where there is nothing to move, or another block of the transfer has failed already.
  bool needs_io() const { return bytes > 0 && !transfer->failed(); }

  enum class Outcome { kEnded, kAgain };
  // Handles the result of a system call: a number of bytes, or a negative errno. kAgain asks for another call
  // for the rest.
  Outcome advance(std::int64_t result, std::exception_ptr* error);

 private:
  Outcome try_again(std::exception_ptr* error, int error_number);
};

// Queues blocks, for each urgency and direction in the order of the calls. Blocks of kNow come first. Of one
// urgency reads and writes alternate where both wait, so that no read waits behind all writes. Thread rule:
// its owner guards it.
class BlockQueue {
 public:
  void push(std::shared_ptr<Transfer> transfer);
  bool empty() const { return of_[0].empty() && of_[1].empty(); }
  std::optional<Block> take();

 private:
  struct Lane {
    std::deque<std::shared_ptr<Transfer>> transfers;
    std::size_t next_block = 0;  // index of the next block in the first transfer
  };
  struct OfUrgency {
    std::array<Lane, 2> lanes;  // by direction
    std::size_t last = 1;       // the lane from which the last block was taken
    bool empty() const { return lanes[0].transfers.empty() && lanes[1].transfers.empty(); }
  };
  std::array<OfUrgency, 2> of_;  // by urgency
};

// Runs the transfers that a DiskFile hands to it.
class TransferSink {
 public:
  virtual ~TransferSink() = default;
  virtual Watch& watch() = 0;
  virtual void submit(std::shared_ptr<Transfer> transfer) = 0;
};

// Throws Error(kInvalidArgument) for options that no service can work with.
void check_options(const IoOptions& options);

}  // namespace sluice::offload
