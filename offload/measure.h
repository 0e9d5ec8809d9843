#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "offload/file.h"
#include "offload/records.h"

// Measures the speed of a disk, and of the disk tier on it, by sequential streams over unnamed files, of
// which nothing is left however the process ends.
namespace sluice::offload {

// Bytes per second. `together` is the sum of both directions when as much is read as written; 0 means not
// measured.
struct DiskRates {
  double read = 0, write = 0, together = 0;
};

// Transfers of `block` bytes, `depth` of them in flight.
struct StreamShape {
  std::size_t block = 0;
  std::size_t depth = 0;
  std::size_t bytes() const { return block * depth; }
};

// Writes the first `bytes` of the file from `memory`, and reads them back. Throws the errors of transfers.
// REQUIRES: the file is large enough; bytes > 0; memory has shape.bytes(); all sizes are multiples of
// kDiskBlock.
DiskRates measure_file(File& file, std::uint64_t bytes, const StreamShape& shape,
                       std::span<std::byte> memory);
// Measures one direction alone, as measure_file() does.
double measure_writes(File& file, std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory);
double measure_reads(File& file, std::uint64_t bytes, const StreamShape& shape, std::span<std::byte> memory);
// Reads the first half of those bytes and writes the second half, alternating blocks, with shape.depth
// transfers in flight in all. Returns the bytes per second of both together. REQUIRES and throws as
// measure_file().
double measure_together(File& file, std::uint64_t bytes, const StreamShape& shape,
                        std::span<std::byte> memory);
// Measures a record of a store. Its checksums are computed on `threads`, as in an update. REQUIRES:
// shape.block is a multiple of RecordStore::kBlock.
DiskRates measure_record(RecordStore& store, RecordId record, std::uint64_t bytes, const StreamShape& shape,
                         std::span<std::byte> memory, Threads& threads);

// Fills memory with incompressible bytes.
void fill_for_measuring(std::span<std::byte> memory);

// An unnamed file for measurements of all kinds. measure() gives the rates of a bare io_uring on it, the
// upper bound for the disk tier. Thread rule: one thread at a time.
class BareFile {
 public:
  // Throws as IoService::open() and File::allocate().
  BareFile(const std::string& folder, std::uint64_t bytes);
  ~BareFile();
  // Measures the whole file. REQUIRES as measure_file(). Throws Error(kIo) where io_uring is forbidden.
  DiskRates measure(const StreamShape& shape, std::span<std::byte> memory);
  // A path under which this process and others can open the file while this object lives.
  std::string path() const;
  // Opens the file in that service. This object outlives the result.
  std::unique_ptr<File> open_in(IoService& service) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::offload
