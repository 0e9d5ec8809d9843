#include "engine/checkpoint/file_parts.h"

#include <algorithm>

#include "core/error.h"
#include "engine/checkpoint/file_sum.h"

namespace sluice::engine {

FileParts::FileParts(const std::vector<FilePart>& parts, int ranks)
    : ranks_(static_cast<std::uint64_t>(ranks)) {
  std::uint64_t end = 0;
  for (const FilePart& part : parts) {
    if (part.begin == part.end) continue;
    ensure(part.begin == end && part.begin < part.end && part.rank < ranks,
           "bytes {} to {} of rank {} follow byte {} of a file of {} ranks", part.begin, part.end, part.rank,
           end, ranks);
    end = part.end;
    if (!parts_.empty() && parts_.back().rank == part.rank)
      parts_.back().end = end;
    else
      parts_.push_back(part);
  }
  for (std::uint64_t block = 0; block < blocks() && !any_split_; ++block) any_split_ = is_split(block);
}

std::uint64_t FileParts::blocks() const { return divide_up(bytes(), kStreamBlock); }

int FileParts::writer(std::uint64_t block) const {
  const int rank = at(block * kStreamBlock).rank;
  return rank == FilePart::kEvery ? static_cast<int>(block * ranks_ / blocks()) : rank;
}

const FilePart& FileParts::at(std::uint64_t offset) const {
  ensure(offset < bytes(), "byte {} is asked for of a file of {} bytes", offset, bytes());
  return *std::ranges::upper_bound(parts_, offset, {}, &FilePart::end);
}

std::vector<FilePart> FileParts::of_block(std::uint64_t block) const {
  const std::uint64_t begin = block * kStreamBlock, end = std::min(begin + kStreamBlock, bytes());
  std::vector<FilePart> found;
  for (std::uint64_t at = begin; at < end; at = found.back().end) {
    const FilePart& part = this->at(at);
    found.push_back({at, std::min(part.end, end), part.rank});
  }
  return found;
}

bool FileParts::is_split(std::uint64_t block) const {
  const int writer = this->writer(block);
  return std::ranges::any_of(of_block(block), [writer](const FilePart& part) {
    return part.rank != FilePart::kEvery && part.rank != writer;
  });
}

bool FileParts::writes(int rank) const {
  for (std::uint64_t block = 0; block < blocks(); ++block)
    if (writer(block) == rank) return true;
  return false;
}

bool FileParts::concerns(int rank, std::uint64_t begin, std::uint64_t end) const {
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t block = at / kStreamBlock;
    const FilePart& part = this->at(at);
    if (part.rank == rank || (part.rank == FilePart::kEvery && writer(block) == rank)) return true;
    at = std::min(part.end, (block + 1) * kStreamBlock);
  }
  return false;
}

}  // namespace sluice::engine
