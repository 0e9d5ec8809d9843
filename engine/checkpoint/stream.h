#pragma once
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/threads.h"
#include "engine/checkpoint/file_sum.h"
#include "offload/file.h"

namespace sluice::engine {

// A buffer of this size has two transfers of 4 MiB in flight while a third block is used.
inline constexpr std::size_t kStreamBuffer = 3 * kStreamBlock;

// The size of a write; as many are in flight as the buffer holds.
inline constexpr std::size_t kWriteBlock = kMiB;

// A file of any length that is read in blocks of kStreamBlock. The bytes after its last whole disk block,
// which O_DIRECT cannot read, are kept in memory.
class BlockFile {
 public:
  // With `expected`, every block is verified as it arrives. Throws Error(kNotFound | kIo), and
  // Error(kCorrupt) where the length is not the expected one.
  BlockFile(offload::IoService& io, const std::string& path, std::optional<FileSum> expected);

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  std::uint64_t blocks() const { return divide_up(size_, kStreamBlock); }
  std::size_t block_size(std::uint64_t block) const;

  // Begins to read a block. `into` holds kStreamBlock bytes, aligned to kDiskBlock. `done` gets Error(kIo),
  // or Error(kCorrupt) that names file, offset, expected and found, where a block is not what was written.
  void start(std::uint64_t block, std::span<std::byte> into, Done done);

 private:
  std::exception_ptr damage(std::uint64_t block, std::span<const std::byte> bytes) const;

  std::string path_;
  std::uint64_t size_ = 0;
  std::vector<std::byte> tail_;
  std::optional<FileSum> expected_;
  std::unique_ptr<offload::File> file_;
};

// Reads byte ranges of any number of BlockFiles through one fixed buffer, with readahead: the next blocks of
// the range, and, where a file is read from range to range, those behind it. Files that are read in turn
// share the buffer, which is fast with room for two blocks of each. Thread rule: one thread at a time.
class ReadAhead {
 public:
  // `buffer` outlives this, and so does `threads`, which help with copying where it is not null. Throws
  // Error(kInvalidArgument) where the buffer holds fewer than kStreamBuffer bytes or is not aligned to
  // kDiskBlock.
  explicit ReadAhead(std::span<std::byte> buffer, Threads* threads = nullptr);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // REQUIRES: the range lies within the file. Throws Error(kIo | kCorrupt).
  void read(BlockFile& file, std::uint64_t offset, std::span<std::byte> out);
  // Must be called before the file is destroyed. Waits for its transfers.
  void forget(const BlockFile& file);

 private:
  struct Slot {
    std::span<std::byte> memory;
    BlockFile* file = nullptr;
    std::uint64_t block = 0;
    std::uint64_t used = 0;  // the number of its last use
    std::optional<TransferGroup> transfer;
  };
  Slot* find(const BlockFile& file, std::uint64_t block);
  bool wanted(const Slot& slot) const;
  Slot& begin(BlockFile& file, std::uint64_t block);
  std::span<const std::byte> block(BlockFile& file, std::uint64_t block, std::uint64_t last);
  void copy(std::span<const std::byte> from, std::span<std::byte> to);

  Threads* threads_;
  std::vector<Slot> slots_;
  std::uint64_t uses_ = 0;
  std::map<const BlockFile*, std::uint64_t> positions_;  // the block at which each file is being read
};

// Writes a file through one fixed buffer, in blocks of kWriteBlock (of a smaller buffer, a third of it), with
// earlier blocks in flight. Thread rule: one thread at a time. After an error it must not be used again.
class WriteBehind {
 public:
  // `buffer` and `file` outlive this. Throws Error(kInvalidArgument) where the buffer holds fewer than three
  // disk blocks or is not aligned to kDiskBlock.
  WriteBehind(offload::File& file, std::span<std::byte> buffer);
  void add(std::span<const std::byte> bytes);  // behind what was added before
  // Sets the file offset of the bytes that are added next. The bytes added before are padded with zeros to a
  // whole disk block. REQUIRES: the offset is a multiple of kDiskBlock.
  void go_to(std::uint64_t offset);
  // Writes the rest, with the same padding, and waits for everything.
  void finish();

 private:
  struct Slot {
    std::span<std::byte> memory;
    std::optional<TransferGroup> transfer;
  };
  void flush(std::size_t bytes);
  void flush_rest();

  offload::File& file_;
  std::vector<Slot> slots_;
  std::size_t current_ = 0;  // the slot that is being filled
  std::size_t filled_ = 0;   // bytes in it
  std::uint64_t offset_ = 0;
};

}  // namespace sluice::engine
