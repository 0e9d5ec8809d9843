#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/threads.h"
#include "core/trace.h"
#include "offload/file.h"

namespace sluice::offload {

// Returns whether the folder is on tmpfs or ramfs, whose files are memory in no budget.
bool lies_in_memory(const std::string& folder);
// Throws Error(kInvalidArgument) for a folder that is on no disk: in memory, or in a virtual file system such
// as /proc.
void check_disk_folder(const std::string& folder);
// Returns the free bytes for unprivileged users on the folder's disk. Throws Error(kIo).
std::uint64_t free_disk_bytes(const std::string& folder);

// A folder in which a run may allocate disk space. See docs/formats/swap.md.
struct DiskFolder {
  std::string path;
  std::uint64_t limit;  // the most bytes allocated there
};

using RecordId = std::uint32_t;

// The disk tier: records of fixed size in preallocated, unnamed files, one in each folder. A record's blocks
// are striped over the files: block i is in file (first + i) mod files. For each block the store keeps in
// memory the checksum (XXH3) and the generation of the last write. A read compares them; differing bytes are
// an Error(kCorrupt) that names file, offset, record, expected and found, and says "stale" where an earlier
// generation wrote them. A transfer covers whole blocks, or ends at the record's end. Reading a block that
// was never written is Error(kState). Transfers of one block must not overlap in time: the caller waits in
// between. Thread rule: define() and allocate() from one thread while no transfer is in flight; the rest from
// any thread.
class RecordStore {
 public:
  static constexpr std::size_t kBlock = std::size_t{1} << 20;  // the default block size of define()

  // Throws, with the folder's name, where a folder is missing, not writable or without O_DIRECT.
  RecordStore(IoService& io, std::vector<DiskFolder> folders, allocator::Ledger& ledger,
              Trace* trace = nullptr);
  // Uses files that the caller has opened, for tests and measurements.
  RecordStore(std::vector<std::unique_ptr<File>> files, allocator::Ledger& ledger, Trace* trace = nullptr);
  ~RecordStore();

  // Adds a record of `bytes`, cut into blocks of block_bytes, which are multiples of kDiskBlock. Error
  // messages use the name.
  RecordId define(std::string name, std::uint64_t bytes, allocator::Purpose purpose,
                  std::size_t block_bytes = kBlock);
  // Returns the bytes of memory that define() charges to the ledger as kBase, mostly for the blocks'
  // checksums.
  static std::size_t metadata_bytes(std::uint64_t bytes, std::size_t block_bytes = kBlock);
  // Allocates disk space for all records that have none yet. Throws Error(kBudget), with what is missing,
  // where a limit or a disk is too small; those records are then removed.
  void allocate();

  // Move bytes between memory and a record, and call `done` as a File does. Reads, and writes of parameters,
  // are Urgency::kNow; other writes are kLater, since nobody waits to read them. Checksums of reads are
  // compared on the File's thread; those of writes are computed on the caller's. REQUIRES: offset is a
  // multiple of the record's block size.
  void read(RecordId record, std::uint64_t offset, std::span<std::byte> into, Done done);
  void write(RecordId record, std::uint64_t offset, std::span<const std::byte> from, Done done);

  // Variants for updates, whose threads would otherwise wait: they compute checksums on these threads,
  // several blocks at a time, and leave the File's thread to the transfers. Reads are Urgency::kLater. Bytes
  // from read_unchecked() must not be used before check() has compared them, which throws the
  // Error(kCorrupt). Writing these blocks before that is Error(kState).
  void read_unchecked(RecordId record, std::uint64_t offset, std::span<std::byte> into, Done done);
  void check(RecordId record, std::uint64_t offset, std::span<const std::byte> found, Threads& threads);
  void write(RecordId record, std::uint64_t offset, std::span<const std::byte> from, Threads& threads,
             Done done);

  struct Counters {
    std::uint64_t bytes_read = 0, bytes_written = 0;
  };
  Counters counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::offload
