#include "engine/checkpoint/stream.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kCopyGrain = kMiB;

std::vector<std::byte> read_tail(const Descriptor& file, std::uint64_t size, const std::string& path) {
  std::vector<std::byte> tail(size % kDiskBlock);
  for (std::size_t done = 0; done < tail.size();) {
    const auto offset = static_cast<off_t>(size - tail.size() + done);
    const ssize_t n = ::pread(file.get(), tail.data() + done, tail.size() - done, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system("read", path);
    if (n == 0) fail(ErrorCode::kIo, "'{}' became shorter than {} bytes while it was read", path, size);
    done += static_cast<std::size_t>(n);
  }
  return tail;
}

// Checks alignment before any transfer; a File would refuse it only later.
void check_buffer(std::span<std::byte> buffer, std::size_t least, std::string_view use) {
  if (buffer.size() < least)
    fail(ErrorCode::kInvalidArgument, "a buffer of {} was given for {}, and at least {} are needed",
         format_size(buffer.size()), use, format_size(least));
  if (reinterpret_cast<std::uintptr_t>(buffer.data()) % kDiskBlock != 0)
    fail(ErrorCode::kInvalidArgument, "the buffer given for {} is not aligned to {} bytes", use, kDiskBlock);
}

}  // namespace

BlockFile::BlockFile(offload::IoService& io, const std::string& path, std::optional<FileSum> expected)
    : path_(path), expected_(std::move(expected)) {
  const Descriptor file = open_file(path, O_RDONLY);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) fail_system("read", path);
  size_ = static_cast<std::uint64_t>(info.st_size);
  if (expected_ && expected_->bytes != size_)
    fail(ErrorCode::kCorrupt, "'{}' has {} bytes, and {} were written: it was cut or changed", path, size_,
         expected_->bytes);
  tail_ = read_tail(file, size_, path);
  file_ = io.open(path, offload::OpenMode::kRead);
}

std::size_t BlockFile::block_size(std::uint64_t block) const {
  return std::min<std::uint64_t>(kStreamBlock, size_ - block * kStreamBlock);
}

void BlockFile::start(std::uint64_t block, std::span<std::byte> into, Done done) {
  const std::size_t bytes = block_size(block);
  const std::size_t direct = bytes / kDiskBlock * kDiskBlock;
  if (direct < bytes) std::memcpy(into.data() + direct, tail_.data(), tail_.size());
  // Runs on the File's thread, while earlier blocks are used.
  auto arrived = [this, block, bytes = into.first(bytes), done = std::move(done)](std::exception_ptr error) {
    done(error ? error : damage(block, bytes));
  };
  if (direct > 0)
    file_->read(block * kStreamBlock, into.first(direct), std::move(arrived));
  else
    arrived(nullptr);
}

std::exception_ptr BlockFile::damage(std::uint64_t block, std::span<const std::byte> bytes) const {
  if (!expected_) return nullptr;
  const std::uint64_t found = checksum(bytes);
  const std::uint64_t written = expected_->blocks[block];
  if (found == written) return nullptr;
  return std::make_exception_ptr(
      Error(ErrorCode::kCorrupt,
            fmt::format("'{}' is damaged in the {} bytes at {}: the checksum is {}, and {} was written",
                        path_, bytes.size(), block * kStreamBlock, to_hex(found), to_hex(written))));
}

ReadAhead::ReadAhead(std::span<std::byte> buffer, Threads* threads)
    : threads_(threads), slots_(buffer.size() / kStreamBlock) {
  check_buffer(buffer, kStreamBuffer, "reading");
  for (std::size_t i = 0; i < slots_.size(); ++i)
    slots_[i].memory = buffer.subspan(i * kStreamBlock, kStreamBlock);
}

ReadAhead::~ReadAhead() = default;

ReadAhead::Slot* ReadAhead::find(const BlockFile& file, std::uint64_t block) {
  for (Slot& slot : slots_)
    if (slot.file == &file && slot.block == block) return &slot;
  return nullptr;
}

// Whether the slot's block is still needed if its file is read on to its end.
bool ReadAhead::wanted(const Slot& slot) const {
  if (slot.file == nullptr) return false;
  const auto position = positions_.find(slot.file);
  return position != positions_.end() && slot.block >= position->second;
}

// Uses the least recently used slot whose block is not needed, or else the least recently used one.
ReadAhead::Slot& ReadAhead::begin(BlockFile& file, std::uint64_t block) {
  Slot& slot = *std::min_element(slots_.begin(), slots_.end(), [this](const Slot& a, const Slot& b) {
    return std::pair(wanted(a), a.used) < std::pair(wanted(b), b.used);
  });
  slot.file = nullptr;
  slot.transfer.emplace();  // waits for the earlier transfer, whose result nobody needs
  file.start(block, slot.memory, slot.transfer->add());
  slot.file = &file;
  slot.block = block;
  slot.used = ++uses_;
  return slot;
}

std::span<const std::byte> ReadAhead::block(BlockFile& file, std::uint64_t block, std::uint64_t last) {
  positions_[&file] = block;
  Slot* slot = find(file, block);
  if (slot == nullptr) slot = &begin(file, block);
  slot->used = ++uses_;
  const std::size_t share =
      std::max<std::size_t>(1, slots_.size() / std::max<std::size_t>(1, positions_.size()));
  const std::uint64_t ahead = std::min<std::uint64_t>(last, block + share - 1);
  for (std::uint64_t next = block + 1; next <= ahead; ++next) {
    if (Slot* present = find(file, next))
      present->used = ++uses_;
    else
      begin(file, next);
  }
  const auto bytes = slot->memory.first(file.block_size(block));
  if (!slot->transfer) return bytes;
  BlockFile* const owner = std::exchange(slot->file, nullptr);  // an error leaves the slot empty
  slot->transfer->wait();
  slot->transfer.reset();
  slot->file = owner;
  return bytes;
}

// All threads copy: the system clears fresh memory at the first access, which takes longer than the copying.
void ReadAhead::copy(std::span<const std::byte> from, std::span<std::byte> to) {
  const auto copy_range = [&](std::size_t begin, std::size_t end) {
    std::memcpy(to.data() + begin, from.data() + begin, end - begin);
  };
  if (threads_ != nullptr)
    threads_->parallel_for(from.size(), kCopyGrain, copy_range);
  else
    copy_range(0, from.size());
}

void ReadAhead::read(BlockFile& file, std::uint64_t offset, std::span<std::byte> out) {
  if (out.empty()) return;
  ensure(offset + out.size() <= file.size(), "a read of {} bytes at {} passes the end of '{}'", out.size(),
         offset, file.path());
  const std::uint64_t first = offset / kStreamBlock;
  const auto before = positions_.find(&file);
  const bool sequential = before != positions_.end() && first - before->second <= 1;
  const std::uint64_t last = sequential ? file.blocks() - 1 : (offset + out.size() - 1) / kStreamBlock;
  while (!out.empty()) {
    const std::uint64_t index = offset / kStreamBlock;
    const auto bytes = block(file, index, last).subspan(offset % kStreamBlock);
    const std::size_t piece = std::min(bytes.size(), out.size());
    copy(bytes.first(piece), out);
    out = out.subspan(piece);
    offset += piece;
  }
}

void ReadAhead::forget(const BlockFile& file) {
  for (Slot& slot : slots_)
    if (slot.file == &file) {
      slot.transfer.reset();
      slot.file = nullptr;
      slot.used = 0;
    }
  positions_.erase(&file);
}

WriteBehind::WriteBehind(offload::File& file, std::span<std::byte> buffer) : file_(file) {
  constexpr std::size_t kLeastSlots = 3;
  check_buffer(buffer, kLeastSlots * kDiskBlock, "writing");
  const std::size_t block = std::min(kWriteBlock, buffer.size() / kLeastSlots / kDiskBlock * kDiskBlock);
  slots_.resize(buffer.size() / block);
  for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].memory = buffer.subspan(i * block, block);
}

void WriteBehind::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto room = slots_[current_].memory.subspan(filled_);
    const std::size_t piece = std::min(room.size(), bytes.size());
    std::memcpy(room.data(), bytes.data(), piece);
    filled_ += piece;
    bytes = bytes.subspan(piece);
    if (piece == room.size()) flush(filled_);
  }
}

void WriteBehind::go_to(std::uint64_t offset) {
  flush_rest();
  offset_ = offset;
}

void WriteBehind::flush(std::size_t bytes) {
  Slot& slot = slots_[current_];
  slot.transfer.emplace();
  file_.write(offset_, slot.memory.first(bytes), slot.transfer->add());
  offset_ += bytes;
  filled_ = 0;
  current_ = (current_ + 1) % slots_.size();
  if (slots_[current_].transfer) slots_[current_].transfer->wait();
}

void WriteBehind::flush_rest() {
  const std::size_t whole = round_up(filled_, kDiskBlock);
  std::memset(slots_[current_].memory.data() + filled_, 0, whole - filled_);
  if (whole > 0) flush(whole);
}

void WriteBehind::finish() {
  flush_rest();
  for (Slot& slot : slots_)
    if (slot.transfer) slot.transfer->wait();
}

}  // namespace sluice::engine
