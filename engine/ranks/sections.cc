#include "engine/ranks/sections.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

std::string to_bytes(const GradientSquares& squares) {
  const std::uint64_t terms = squares.terms.size();
  std::string bytes(reinterpret_cast<const char*>(&terms), sizeof terms);
  bytes.append(reinterpret_cast<const char*>(squares.terms.data()), terms * sizeof(GradientSquares::Term));
  if (!squares.not_finite) return bytes;
  bytes.append(reinterpret_cast<const char*>(&squares.not_finite->index), sizeof(std::size_t));
  return bytes + squares.not_finite->name;
}

GradientSquares from_bytes(std::string_view bytes) {
  const auto take = [&](void* to, std::size_t count) {
    ensure(bytes.size() >= count, "a section has sent {} bytes of squares too few", count - bytes.size());
    std::memcpy(to, bytes.data(), count);
    bytes.remove_prefix(count);
  };
  GradientSquares squares;
  std::uint64_t terms = 0;
  take(&terms, sizeof terms);
  ensure(terms <= bytes.size() / sizeof(GradientSquares::Term), "a section tells of {} squares in {} bytes",
         terms, bytes.size());
  squares.terms.resize(terms);
  take(squares.terms.data(), terms * sizeof(GradientSquares::Term));
  if (bytes.empty()) return squares;
  auto& parameter = squares.not_finite.emplace();
  take(&parameter.index, sizeof parameter.index);
  parameter.name = bytes;
  return squares;
}

}  // namespace

double GradientSquares::norm() const {
  double sum = 0;
  for (const Term& term : terms) sum += term.squares;
  return std::sqrt(sum);
}

GradientSquares Sections::gather(const GradientSquares& own, const std::function<void()>& meanwhile) {
  static const std::uint64_t kId = call_id("the norm of the gradients of all sections");
  GradientSquares all;
  for (const std::string& bytes :
       sections_.exchange(kId, "the norm of the gradients", to_bytes(own), meanwhile)) {
    GradientSquares of_section = from_bytes(bytes);
    std::ranges::move(of_section.terms, std::back_inserter(all.terms));
    if (of_section.not_finite && (!all.not_finite || of_section.not_finite->index < all.not_finite->index))
      all.not_finite = std::move(of_section.not_finite);
  }
  std::ranges::stable_sort(all.terms, {}, &GradientSquares::Term::index);
  return all;
}

void Sections::swap_uses(std::span<const float> own, std::span<float> others, TransferGroup& group) {
  static const std::uint64_t kId = call_id("the gradient of what two sections have");
  const int other = sections_.rank() == 0 ? sections_.size() - 1 : 0;
  const std::string name = "the gradient of the tied embedding";
  sections_.receive(other, kId, name, std::as_writable_bytes(others), group.add());
  sections_.send(other, kId, name, std::as_bytes(own), group.add());
}

}  // namespace sluice::engine
