#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "comm/communicator.h"
#include "engine/checkpoint/file_parts.h"
#include "engine/checkpoint/part_writer.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/steps/engine.h"

namespace sluice::engine {

// A file of a checkpoint, and what it stores of the parameters that its tensors name.
struct TensorFile {
  enum class Of : std::uint8_t { kParameters, kState, kScales, kWholes };
  std::string name;
  SafetensorsHeader header;
  Of of = Of::kParameters;
};

// A folder of rank 0, under this rank's path.
struct SharedFolder {
  std::string path;
  std::string why_not;  // which rank cannot write there, and why, the same on all ranks; empty: it is shared
};
// Finds the folder `partial`, which rank 0 has made in its `out`, in this rank's `out`. Collective. Throws
// Error(kIo) where rank 0 cannot write.
SharedFolder find_shared_folder(comm::Communicator& communicator, const std::string& out,
                                const std::string& partial);

// The tensor files of a checkpoint, which all ranks write at once, each its own blocks, or one rank alone.
// Every rank makes this object with the same files, and hands over its parts, unit after unit in the same
// order. Thread rule: put() from one thread at a time for each file; otherwise one thread. After an error the
// communicator is told, and only destruction is allowed.
class SharedFiles {
 public:
  // How a unit is partitioned.
  using PartitionOf = std::function<Partition(UnitId)>;
  // All arguments outlive this. layout: the model's. `order` is the order of the units in the files.
  // communicator: null where this rank alone writes, and hands over all bytes.
  SharedFiles(PartitionOf partition, const Layout& layout, const std::vector<TensorFile>& files,
              const std::vector<UnitId>& order, comm::Communicator* communicator);

  // The least bytes of buffers that a rank needs for so many files.
  static std::uint64_t buffer_bytes(std::size_t files);
  // Opens the files, which exist in that folder with their lengths. They share `buffer_bytes`. Throws as
  // PartWriter.
  void open(offload::IoService& io, allocator::Ledger& ledger, const std::string& folder,
            std::size_t buffer_bytes);
  // The elements of the unit that this rank writes or sends.
  WantedElements wanted(UnitId unit) const;
  // Takes bytes of a tensor of the file with that index.
  void put(std::size_t file, const StoredTensor& tensor, std::uint64_t first_byte,
           std::span<const std::byte> bytes);
  // Collective. Where several ranks write, makes this rank's blocks durable, and waits until all ranks have.
  // Returns the sums of the files. Throws Error(kCorrupt) where the ranks have not written each block once.
  std::vector<FileSum> finish();

 private:
  struct Bytes {
    std::uint64_t begin = 0, end = 0;
  };
  // The file's bytes for these elements of the unit; empty where it has none.
  Bytes bytes_of(const TensorFile& file, UnitId unit, ElementRange range) const;
  FileParts parts_of(const TensorFile& file) const;
  void add_wholes(const TensorFile& file, UnitId unit, std::vector<FilePart>& parts) const;
  bool concerns(std::size_t file, UnitId unit, ElementRange range) const;

  const PartitionOf partition_;
  const Layout& layout_;
  const std::vector<TensorFile>& files_;
  const std::vector<UnitId>& order_;
  comm::Communicator* communicator_;
  std::vector<std::unique_ptr<PartWriter>> writers_;  // by file
};

}  // namespace sluice::engine
