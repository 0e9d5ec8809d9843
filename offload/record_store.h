#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/record_layout.h"
#include "offload/records.h"
#include "offload/transfer.h"

// The implementation of RecordStore. Private to this room.
namespace sluice::offload {

// The state of a block. Only the transfer that has set `busy` may access the other members.
struct BlockRecord {
  std::uint64_t checksum = 0;
  std::uint64_t previous_checksum = 0;  // of the generation before, to tell a stale block from a damaged one
  std::uint32_t generation = 0;         // counts the writes of the block; 0: never written
  bool unchecked = false;               // it was read, and its checksum is yet to be compared
  std::atomic<bool> busy = false;
};

struct StoredRecord {
  std::string name;
  allocator::Purpose purpose;
  RecordExtents extents;
  std::unique_ptr<BlockRecord[]> blocks;
  allocator::Charge metadata;
};

struct StoreFile {
  std::unique_ptr<File> file;
  std::string folder;
  std::uint64_t limit;
};

struct StoreState {
  StoreState(allocator::Ledger& the_ledger, Trace* the_trace, std::vector<StoreFile> the_files)
      : ledger(the_ledger),
        trace(the_trace),
        layout(the_files.size()),
        allocated_layout(layout),
        files(std::move(the_files)) {}

  allocator::Ledger& ledger;
  Trace* const trace;
  RecordLayout layout, allocated_layout;
  std::deque<StoredRecord> records;      // a deque, so that references of transfers stay valid
  std::vector<allocator::Charge> space;  // one for each record whose disk space is allocated
  std::atomic<std::uint64_t> bytes_read{0}, bytes_written{0};
  std::vector<StoreFile> files;  // last: their destructors wait for transfers, which use the other members
};

struct RecordStore::State : StoreState {
  using StoreState::StoreState;
};

// Throws Error(kCorrupt) where the bytes differ from those last written to the block. REQUIRES: the caller
// has claimed the block.
void verify(const StoreState& state, const StoredRecord& record, std::size_t index,
            std::span<const std::byte> bytes);
// Marks blocks as busy. Throws Error(kState) where one of them is in another transfer.
void claim(StoredRecord& record, std::size_t first, std::size_t end);
void release(StoredRecord& record, std::size_t first, std::size_t end);

enum class Checks : std::uint8_t { kHere, kByCaller };  // where the checksums of a read are compared

// One call of RecordStore::read() or write(), over some blocks of one record. Thread rule: as Transfer.
class RecordTransfer : public std::enable_shared_from_this<RecordTransfer> {
 public:
  // Claims the blocks. Throws Error(kState) where one of them is in another transfer.
  RecordTransfer(StoreState& state, StoredRecord& record, Direction direction, Urgency urgency,
                 std::uint64_t offset, std::span<std::byte> data, Checks checks, Done done);
  // Starts the transfer, whose Done is then called once. Checksums of a write are computed on `threads`;
  // null: on the calling thread.
  void start(Threads* threads);

 private:
  void check_state() const;
  void start_block(std::size_t index);
  std::exception_ptr end_read(std::size_t index) const;
  std::span<std::byte> data_of(std::size_t index) const;
  void end_block(std::exception_ptr error);
  void finish();

  StoreState& state_;
  StoredRecord& record_;
  const Direction direction_;
  const Urgency urgency_;
  const Checks checks_;
  const std::size_t first_block_;
  const std::size_t end_block_;
  const std::span<std::byte> data_;
  const Trace::Clock::time_point begin_ = Trace::Clock::now();
  Done done_;
  std::mutex mutex_;
  std::size_t open_blocks_;
  std::exception_ptr error_;
};

}  // namespace sluice::offload
