#include "comm/mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "core/json.h"

namespace sluice::comm {
namespace {

const std::vector<std::string> kAxes{"data", "pipeline", "tensor", "sequence"};

int size_of_axis(std::string_view text, std::string_view given) {
  int size = 0;
  const auto [rest, error] = std::from_chars(given.data(), given.data() + given.size(), size);
  if (error != std::errc() || rest != given.data() + given.size() || size < 1)
    fail(ErrorCode::kInvalidArgument,
         "the mesh '{}' has an axis of size '{}': it is how many ranks the axis has, 1 or more", text, given);
  return size;
}

}  // namespace

Mesh Mesh::parse(std::string_view text) {
  Mesh mesh;
  std::string_view rest = text;
  for (bool is_last = false; !is_last;) {
    const std::string_view part = rest.substr(0, rest.find(','));
    is_last = part.size() == rest.size();
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const std::size_t sign = part.find('=');
    if (sign == std::string_view::npos)
      fail(ErrorCode::kInvalidArgument,
           "the mesh '{}' has '{}' where an axis and its size must be: give it as data=2,pipeline=4,tensor=2",
           text, part);
    const std::string name(part.substr(0, sign));
    if (std::ranges::count(kAxes, name) == 0) {
      const std::string nearest = nearest_word(name, kAxes);
      fail(ErrorCode::kInvalidArgument, "the mesh '{}' has an axis '{}'{}; there are {}", text, name,
           nearest.empty() ? "" : ": did you mean '" + nearest + "'?", fmt::join(kAxes, ", "));
    }
    if (std::ranges::count(mesh.axes_, name, &Axis::name) > 0)
      fail(ErrorCode::kInvalidArgument, "the mesh '{}' has the axis '{}' twice", text, name);
    const int size = size_of_axis(text, part.substr(sign + 1));
    if (size > kMostRanks / mesh.ranks_)
      fail(ErrorCode::kInvalidArgument, "the mesh '{}' has more than {} ranks", text, kMostRanks);
    mesh.axes_.push_back({name, size});
    mesh.ranks_ *= size;
  }
  return mesh;
}

std::string Mesh::text() const {
  std::string text;
  for (const Axis& axis : axes_)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  return text;
}

int Mesh::size(std::string_view axis) const {
  const auto found = std::ranges::find(axes_, axis, &Axis::name);
  return found == axes_.end() ? 1 : found->size;
}

int Mesh::step(std::string_view axis) const {
  int step = 1;
  for (auto at = axes_.rbegin(); at != axes_.rend() && at->name != axis; ++at) step *= at->size;
  return step;
}

int Mesh::coordinate(int rank, std::string_view axis) const { return rank / step(axis) % size(axis); }

std::vector<int> Mesh::along(int rank, std::string_view axis) const {
  const int first = rank - coordinate(rank, axis) * step(axis);
  std::vector<int> ranks;
  for (int i = 0; i < size(axis); ++i) ranks.push_back(first + i * step(axis));
  return ranks;
}

std::vector<int> Mesh::across(int rank, std::string_view axis) const {
  const int apart = step(axis), along = size(axis), own = coordinate(rank, axis);
  std::vector<int> ranks;
  for (int other = 0; other < ranks_; ++other)
    if (other / apart % along == own) ranks.push_back(other);
  return ranks;
}

std::string Mesh::place(int rank) const {
  std::vector<std::string> places;
  for (const Axis& axis : axes_)
    places.push_back(fmt::format("{} {} of {}", axis.name == "pipeline" ? "pipeline stage" : axis.name,
                                 coordinate(rank, axis.name) + 1, axis.size));
  return fmt::format("{}", fmt::join(places, ", "));
}

}  // namespace sluice::comm
