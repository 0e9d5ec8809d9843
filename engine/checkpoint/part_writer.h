#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/checksum.h"
#include "core/transfers.h"
#include "engine/checkpoint/file_parts.h"
#include "engine/checkpoint/stream.h"
#include "offload/file.h"

namespace sluice::engine {

struct BlockSum {
  std::uint64_t block = 0, sum = 0;  // its index in the file, and its XXH3
};

// Writes a file of a checkpoint, or one rank's blocks (FileParts) of it. Every rank hands over its
// bytes of the file in ascending order. The writer of a split block assembles it, from its own bytes and
// those that the other ranks send. A rank waits for another one only until that has passed an earlier byte of
// the file. So all ranks finish, also with several files side by side, as long as the parts have the same
// order in all of them. Thread rule: one thread at a time. After an error only destruction is allowed, which
// waits for the messages in flight.
class PartWriter {
 public:
  // Messages of this file to and from another rank, which arrive in the order in which they were sent. One
  // rank alone needs none.
  struct Mail {
    std::function<void(int to, std::span<const std::byte>, Done)> send;
    std::function<void(int from, std::span<std::byte>, Done)> receive;
  };
  // Opens the file, which exists with its length, and takes its buffers (kCheckpoint): `write_bytes` if this
  // rank writes a block, and kSplitBytes if any block is split. `io` and `ledger` outlive this. Throws
  // Error(kBudget | kIo | kNotFound | kInvalidArgument).
  PartWriter(offload::IoService& io, allocator::Ledger& ledger, const std::string& path, FileParts parts,
             int rank, Mail mail, std::size_t write_bytes);
  ~PartWriter();
  PartWriter(const PartWriter&) = delete;
  PartWriter& operator=(const PartWriter&) = delete;
  // The bytes that a file with split blocks takes beyond `write_bytes`.
  static constexpr std::size_t kSplitBytes = 2 * kStreamBlock;

  // Whether write() would do anything with these bytes.
  bool concerns(std::uint64_t begin, std::uint64_t end) const { return parts_.concerns(rank_, begin, end); }
  // Takes the bytes of the file from `offset` on. Bytes that this rank neither writes nor has to send are
  // left out. Throws Error(kIo) where a write or a message failed.
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  // Waits until all is written and sent, and gives the buffers back. Returns the sums of this rank's blocks,
  // in any order. Throws Error(kInternal) where bytes are missing.
  std::vector<BlockSum> finish();
  void sync();  // makes what was written durable. REQUIRES: finish() was called

 private:
  // A block that is assembled from several ranks' parts.
  struct Split {
    std::uint64_t block, position, missing;  // missing: own bytes still to come, from position on
    TransferGroup arriving;
  };
  void add_to_split(std::uint64_t block, std::uint64_t offset, std::span<const std::byte> bytes);
  void begin_split(std::uint64_t block);
  void end_split();
  void send(const FilePart& part, std::uint64_t offset, std::span<const std::byte> bytes);
  void append(std::uint64_t offset, std::span<const std::byte> bytes);
  std::span<std::byte> split_memory() const { return {split_data_, kStreamBlock}; }

  const FileParts parts_;
  const int rank_;
  const Mail mail_;
  std::unique_ptr<offload::File> file_;  // null: this rank writes no block of it
  allocator::Region buffer_;
  std::byte *split_data_ = nullptr, *sent_data_ = nullptr;
  std::optional<WriteBehind> behind_;
  std::uint64_t position_ = 0;  // the end of the last written block, or of the current block's bytes so far
  Checksum sum_;                // of the block at the position, up to it
  std::vector<BlockSum> sums_;
  std::optional<Split> split_;
  TransferGroup sending_;
};

}  // namespace sluice::engine
