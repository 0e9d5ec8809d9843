#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice::engine {

// Consecutive bytes of a file that one rank has, or all ranks have.
struct FilePart {
  static constexpr int kEvery = -1;
  std::uint64_t begin = 0, end = 0;
  int rank = kEvery;
  bool operator==(const FilePart&) const = default;
};

// Which ranks have which bytes of a file, and which rank writes which checksum block: the rank that has its
// first byte. Where every rank has that, each writes an equal share of the file, of consecutive blocks.
// Thread rule: it never changes, and any thread may read it.
class FileParts {
 public:
  // Throws Error(kInternal) where the parts do not cover a file from byte 0 on, one after another. Empty ones
  // are left out.
  FileParts(const std::vector<FilePart>& parts, int ranks);

  std::uint64_t bytes() const { return parts_.empty() ? 0 : parts_.back().end; }
  std::uint64_t blocks() const;
  int writer(std::uint64_t block) const;
  const FilePart& at(std::uint64_t offset) const;  // REQUIRES: offset < bytes()
  // The parts of the block, cut at its ends.
  std::vector<FilePart> of_block(std::uint64_t block) const;
  // Whether the writer of the block gets some of its bytes from other ranks.
  bool is_split(std::uint64_t block) const;
  bool any_split() const { return any_split_; }
  bool writes(int rank) const;  // whether the rank writes any block
  // Whether the rank hands over any of these bytes: it writes their block, or owns them.
  bool concerns(int rank, std::uint64_t begin, std::uint64_t end) const;

 private:
  std::vector<FilePart> parts_;
  std::uint64_t ranks_;
  bool any_split_ = false;
};

}  // namespace sluice::engine
