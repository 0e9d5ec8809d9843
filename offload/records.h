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

// Whether the folder is on tmpfs or ramfs: its files are memory that no budget counts.
bool lies_in_memory(const std::string& folder);
// Throws Error(kInvalidArgument) for a folder that is on no disk: in memory, or made up by the system as
// /proc is.
void check_disk_folder(const std::string& folder);
// Bytes that a user without privileges may still take on the folder's disk. Throws Error(kIo).
std::uint64_t free_disk_bytes(const std::string& folder);

// One or more folders that lend disk space to a run. See docs/formats/swap.md.
struct DiskFolder {
  std::string path;
  std::uint64_t limit;  // bytes that may be taken there
};

using RecordId = std::uint32_t;

// The disk tier: records of fixed size in preallocated, unnamed files, one file a folder, striped by the
// record's blocks (a record's block i lies in folder (first + i) mod folders). For each block of a record the
// store keeps, in memory, the checksum (XXH3) and the write generation of what was written last; a read
// compares, and bytes that differ are Error(kCorrupt) that names file, offset, record, expected and found,
// and says "stale" where they are what an earlier generation wrote.
// A transfer covers whole blocks, or ends at the record's end. What was never written cannot be read
// (Error(kState)). Transfers of one block must not overlap in time; the caller waits in between. Thread rule:
// define() and allocate() from one thread while there is no transfer; the rest from any thread.
class RecordStore {
 public:
  static constexpr std::size_t kBlock = std::size_t{1} << 20;  // of a record that asks for no other

  // The folders are checked here: missing, not writable, without O_DIRECT are errors that name the folder.
  RecordStore(IoService& io, std::vector<DiskFolder> folders, allocator::Ledger& ledger,
              Trace* trace = nullptr);
  // Files that were opened by the caller: for tests and measurements.
  RecordStore(std::vector<std::unique_ptr<File>> files, allocator::Ledger& ledger, Trace* trace = nullptr);
  ~RecordStore();

  // A record of `bytes`, cut into blocks of block_bytes (both multiples of kDiskBlock), named for messages.
  RecordId define(std::string name, std::uint64_t bytes, allocator::Purpose purpose,
                  std::size_t block_bytes = kBlock);
  // What define() charges to the ledger's base in memory, for the checksums of its blocks above all.
  static std::size_t metadata_bytes(std::uint64_t bytes, std::size_t block_bytes = kBlock);
  // Takes the space for all records that have none yet: Error(kBudget) where a limit or a disk is too small,
  // with what is missing; those are no records then.
  void allocate();

  // offset: a multiple of the record's block. Done as in File. Checksums are compared or computed on the
  // File's thread (reads) and on the caller's (writes).
  void read(RecordId record, std::uint64_t offset, std::span<std::byte> into, Done done);
  void write(RecordId record, std::uint64_t offset, std::span<const std::byte> from, Done done);

  // For a caller whose threads would wait meanwhile: checksums are computed on those, several blocks at a
  // time, and the File's thread is left to the transfers. What was read so is nobody's to use before check()
  // has compared it, which throws the Error(kCorrupt); to write its blocks before that is Error(kState).
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
