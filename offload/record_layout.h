#pragma once
#include <cstdint>
#include <vector>

// The layout of records on disk: see docs/formats/swap.md.
namespace sluice::offload {

// The extents of one record, one in each file.
struct RecordExtents {
  std::uint64_t bytes = 0;
  std::size_t block_bytes = 0;
  std::size_t first_file = 0;
  std::vector<std::uint64_t> offsets;  // of the record's extent in each file

  struct BlockExtent {
    std::size_t file;
    std::uint64_t offset;
    std::size_t bytes;  // the last block of a record may be shorter
  };
  std::size_t blocks() const;
  BlockExtent block(std::size_t index) const;
};

// Assigns extents to records, one record after another.
class RecordLayout {
 public:
  explicit RecordLayout(std::size_t files) : taken_(files, 0) {}
  RecordExtents add(std::uint64_t bytes, std::size_t block_bytes);
  const std::vector<std::uint64_t>& taken() const { return taken_; }  // bytes used in each file

 private:
  std::vector<std::uint64_t> taken_;
  std::size_t next_file_ = 0;
};

}  // namespace sluice::offload
