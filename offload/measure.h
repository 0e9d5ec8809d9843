#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "offload/file.h"
#include "offload/records.h"

// How fast a disk is, and how fast the disk tier is on it: sequential streams over files that have no name,
// so that nothing is left of them, however the process ends.
namespace sluice::offload {

// Bytes per second. together: of reads and writes, as many of each at once; 0: not measured.
struct DiskRates {
  double read = 0, write = 0, together = 0;
};

// Transfers of `block` bytes, `depth` of them under way.
struct StreamShape {
  std::size_t block = 0;
  std::size_t depth = 0;
  std::size_t bytes() const { return block * depth; }
};

// Writes and reads back the first `bytes` of the file. memory: shape.bytes(), a multiple of kDiskBlock each;
// what it holds is written. Throws the errors of transfers. REQUIRES: the file has room; bytes > 0, a
// multiple of kDiskBlock.
DiskRates measure_file(File& file, std::uint64_t bytes, const StreamShape& shape,
                       std::span<std::byte> memory);
// One way of it.
double measure_writes(File& file, std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory);
double measure_reads(File& file, std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory);
// Reads the first half of those bytes and writes the second one, block by block in turn, as many under way in
// all; bytes per second of both. As measure_file else.
double measure_together(File& file, std::uint64_t bytes, const StreamShape& shape,
                        std::span<std::byte> memory);
// The same through a record, with its checksums, which are computed on the threads as an update's are: calls
// of `shape.block` (a multiple of RecordStore::kBlock).
DiskRates measure_record(RecordStore& store, RecordId record, std::uint64_t bytes, const StreamShape& shape,
                         std::span<std::byte> memory, Threads& threads);

// Fills memory with what no disk compresses.
void fill_for_measuring(std::span<std::byte> memory);

// A file without a name for measurements of all kinds, and what an io_uring with nothing around it makes of
// it: the limit that the disk tier is held against. Thread rule: one thread at a time.
class BareFile {
 public:
  // Throws as IoService::open and File::allocate.
  BareFile(const std::string& folder, std::uint64_t bytes);
  ~BareFile();
  // As measure_file, over all of it. Throws Error(kIo) where io_uring is forbidden.
  DiskRates measure(const StreamShape& shape, std::span<std::byte> memory);
  // Under which this process and others find it while this lives.
  std::string path() const;
  // It as a file of that service. Outlives what this returns.
  std::unique_ptr<File> open_in(IoService& service) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::offload
