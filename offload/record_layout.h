#pragma once
#include <cstdint>
#include <vector>

// Where the blocks of a record lie: see docs/formats/swap.md.
namespace sluice::offload {

// The extents of one record, one in each file.
struct RecordPlace {
  std::uint64_t bytes = 0;
  std::size_t block_bytes = 0;
  std::size_t first_file = 0;
  std::vector<std::uint64_t> extent_offset;  // by file

  struct BlockPlace {
    std::size_t file;
    std::uint64_t offset;
    std::size_t bytes;  // the last block of a record may be shorter
  };
  std::size_t blocks() const;
  BlockPlace block(std::size_t index) const;
};

// Gives records their places, one after another.
class RecordLayout {
 public:
  explicit RecordLayout(std::size_t files) : taken_(files, 0) {}
  RecordPlace place(std::uint64_t bytes, std::size_t block_bytes);
  const std::vector<std::uint64_t>& taken() const { return taken_; }  // bytes, by file

 private:
  std::vector<std::uint64_t> taken_;
  std::size_t next_file_ = 0;
};

}  // namespace sluice::offload
