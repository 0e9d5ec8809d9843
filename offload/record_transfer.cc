#include <algorithm>

#include "core/bytes.h"
#include "core/checksum.h"
#include "core/error.h"
#include "offload/record_store.h"

namespace sluice::offload {
namespace {

bool only_zeros(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

std::string diagnosis(const BlockRecord& block, std::uint64_t found, std::span<const std::byte> bytes) {
  if (block.generation > 1 && found == block.previous_checksum)
    return fmt::format("stale: this is what generation {} wrote, a later write was lost",
                       block.generation - 1);
  if (only_zeros(bytes)) return "only zeros, as where nothing was ever written";
  return "the bytes were changed on the disk or on their way";
}

// Adds the record's name to an error of the file, which does not know records.
std::exception_ptr with_name(const std::exception_ptr& error, const std::string& name) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    const std::string text = e.what();
    if (text.find(name) != std::string::npos) return error;
    return std::make_exception_ptr(Error(e.code(), fmt::format("'{}': {}", name, text)));
  } catch (...) {
    return error;
  }
}

}  // namespace

RecordTransfer::RecordTransfer(StoreState& state, StoredRecord& record, Direction direction, Urgency urgency,
                               std::uint64_t offset, std::span<std::byte> data, Checks checks, Done done)
    : state_(state),
      record_(record),
      direction_(direction),
      urgency_(urgency),
      checks_(checks),
      first_block_(offset / record.extents.block_bytes),
      end_block_(first_block_ + divide_up(data.size(), record.extents.block_bytes)),
      data_(data),
      done_(std::move(done)),
      open_blocks_(end_block_ - first_block_) {
  claim(record_, first_block_, end_block_);
  try {
    check_state();
  } catch (...) {
    release(record_, first_block_, end_block_);
    throw;
  }
}

void claim(StoredRecord& record, std::size_t first, std::size_t end) {
  for (std::size_t i = first; i < end; ++i) {
    if (!record.blocks[i].busy.exchange(true, std::memory_order_acquire)) continue;
    release(record, first, i);
    fail(ErrorCode::kState,
         "block {} of record '{}' is in another transfer: wait for its end before the next", i, record.name);
  }
}

void release(StoredRecord& record, std::size_t first, std::size_t end) {
  for (std::size_t i = first; i < end; ++i) record.blocks[i].busy.store(false, std::memory_order_release);
}

void RecordTransfer::check_state() const {
  for (std::size_t i = first_block_; i < end_block_; ++i) {
    const BlockRecord& block = record_.blocks[i];
    if (direction_ == Direction::kRead && block.generation == 0)
      fail(ErrorCode::kState, "block {} of record '{}' was never written, and cannot be read", i,
           record_.name);
    if (direction_ == Direction::kWrite && block.unchecked)
      fail(ErrorCode::kState,
           "block {} of record '{}' was read without being checked, and is now to be written: call check() "
           "before",
           i, record_.name);
  }
}

void RecordTransfer::start(Threads* threads) {
  const std::size_t blocks = end_block_ - first_block_;
  if (blocks == 0) return finish();
  // The last Done may release the last other reference to this object.
  const auto self = shared_from_this();
  if (threads == nullptr) {
    for (std::size_t i = first_block_; i < end_block_; ++i) start_block(i);
  } else {
    threads->parallel_for(blocks, 1, [&](std::size_t i, std::size_t) { start_block(first_block_ + i); });
  }
}

std::span<std::byte> RecordTransfer::data_of(std::size_t index) const {
  return data_.subspan((index - first_block_) * record_.extents.block_bytes,
                       record_.extents.block(index).bytes);
}

// Each block is a transfer of its own, so that its checksum is computed while others are in flight.
void RecordTransfer::start_block(std::size_t index) {
  const RecordExtents::BlockExtent extent = record_.extents.block(index);
  const std::span<std::byte> data = data_of(index);
  File& file = *state_.files[extent.file].file;
  try {
    if (direction_ == Direction::kRead)
      return file.read(
          extent.offset, data,
          [self = shared_from_this(), index](std::exception_ptr error) {
            self->end_block(error != nullptr ? std::move(error) : self->end_read(index));
          },
          urgency_);
    BlockRecord& block = record_.blocks[index];
    block.previous_checksum = std::exchange(block.checksum, checksum(data));
    ++block.generation;
    file.write(
        extent.offset, data,
        [self = shared_from_this()](std::exception_ptr error) { self->end_block(std::move(error)); },
        urgency_);
  } catch (...) {
    end_block(std::current_exception());  // the file refused the call, so it will not call the Done
  }
}

std::exception_ptr RecordTransfer::end_read(std::size_t index) const {
  record_.blocks[index].unchecked = checks_ == Checks::kByCaller;
  if (checks_ == Checks::kByCaller) return nullptr;
  try {
    verify(state_, record_, index, data_of(index));
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void verify(const StoreState& state, const StoredRecord& record, std::size_t index,
            std::span<const std::byte> bytes) {
  const BlockRecord& block = record.blocks[index];
  const std::uint64_t found = checksum(bytes);
  if (found == block.checksum) return;
  const RecordExtents::BlockExtent extent = record.extents.block(index);
  fail(ErrorCode::kCorrupt,
       "{}: offset {}, block {} of record '{}': expected checksum {:016x} (generation {}), found {:016x}: {}",
       state.files[extent.file].file->name(), extent.offset, index, record.name, block.checksum,
       block.generation, found, diagnosis(block, found, bytes));
}

void RecordTransfer::end_block(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
    if (--open_blocks_ > 0) return;
  }
  finish();
}

void RecordTransfer::finish() {
  const bool reading = direction_ == Direction::kRead;
  if (error_ == nullptr) (reading ? state_.bytes_read : state_.bytes_written) += data_.size();
  if (state_.trace != nullptr)
    state_.trace->add(reading ? Trace::Lane::kRead : Trace::Lane::kWrite, record_.name, begin_,
                      Trace::Clock::now(), data_.size());
  release(record_, first_block_, end_block_);
  const Done done = std::move(done_);
  done(error_ == nullptr ? nullptr : with_name(error_, record_.name));
}

}  // namespace sluice::offload
