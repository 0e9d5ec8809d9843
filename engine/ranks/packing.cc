#include "engine/ranks/packing.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace sluice::engine {
namespace {

void move(float* to, const float* from, std::size_t count) { std::memmove(to, from, count * sizeof(float)); }

}  // namespace

Packing::Packing(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    if (piece.begin == piece.end) continue;
    if (!moved_.empty() && moved_.back().from + moved_.back().size == piece.begin)
      moved_.back().size += piece.end - piece.begin;
    else
      moved_.push_back({piece.begin, size(), piece.end - piece.begin});
  }
}

std::size_t Packing::position(std::size_t element) const {
  const auto after = std::ranges::upper_bound(moved_, element, {}, &Moved::from);
  if (after == moved_.begin()) return 0;
  const Moved& piece = *(after - 1);
  return piece.to + std::min(piece.size, element - piece.from);
}

std::shared_ptr<const comm::Given> Packing::packed(const comm::Given& given) const {
  std::vector<comm::Given::OfRank> by_rank = given.by_rank();
  for (comm::Given::OfRank& of_rank : by_rank)
    for (comm::Runs& runs : of_rank) {
      ensure(runs.count == 1, "{} runs of a gradient are given that is packed", runs.count);
      const std::size_t begin = position(runs.first);
      runs = {begin, position(runs.first + runs.size) - begin};
    }
  return std::make_shared<const comm::Given>(std::move(by_rank));
}

// Pieces move to the front, so that the first one moves first.
void Packing::pack(float* array) const {
  for (const Moved& piece : moved_)
    if (piece.from != piece.to) move(array + piece.to, array + piece.from, piece.size);
}

// Pieces move back, the last one first. Behind the packed place of a piece are only places of pieces that
// have moved.
void Packing::unpack(float* array, std::size_t begin, std::size_t end) const {
  std::size_t unset = end;  // everything from here on is in place
  for (auto piece = moved_.rbegin(); piece != moved_.rend() && unset > begin; ++piece) {
    const std::size_t from = std::clamp(piece->from, begin, unset),
                      to = std::clamp(piece->from + piece->size, from, unset);
    if (from < to) move(array + from, array + piece->to + (from - piece->from), to - from);
    std::fill(array + to, array + unset, 0.0f);
    unset = from;
  }
  if (begin < unset) std::fill(array + begin, array + unset, 0.0f);
}

}  // namespace sluice::engine
