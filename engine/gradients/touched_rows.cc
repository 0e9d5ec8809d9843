#include "engine/gradients/touched_rows.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/plan/rows_of_tokens.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kBits = 8;

char bit_of(std::size_t row) { return static_cast<char>(1u << (row % kBits)); }

}  // namespace

TouchedRows::TouchedRows(const Layout& layout, const Profile& profile, const RankOf& ranks)
    : layout_(layout), rows_(layout.parameters()) {
  for (ParameterId p = 0; p < rows_.size(); ++p) {
    const ParameterSpec& spec = layout.spec(p);
    if (rows_of_tokens(spec, spec.uses - 1, ranks, profile))
      rows_[p].resize(divide_up(spec.shape.front(), kBits));
  }
}

bool TouchedRows::any_by_rows(UnitId unit, int use) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (by_rows(p, use)) return true;
  return false;
}

void TouchedRows::begin_step() {
  for (std::string& rows : rows_) std::ranges::fill(rows, '\0');
}

std::vector<std::int32_t> TouchedRows::touch(ParameterId parameter, std::span<const std::int32_t> rows) {
  std::vector<std::int32_t> first;
  for (const std::int32_t row : rows) {
    char& bits = rows_[parameter][static_cast<std::size_t>(row) / kBits];
    const char bit = bit_of(static_cast<std::size_t>(row));
    if ((bits & bit) == 0) first.push_back(row);
    bits |= bit;
  }
  return first;
}

std::string TouchedRows::own(UnitId unit) const {
  std::string rows;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) rows += rows_[p];
  return rows;
}

std::string TouchedRows::of_any(std::vector<std::string> of_ranks) {
  std::string& any = of_ranks.front();
  for (const std::string& rows : of_ranks) {
    ensure(rows.size() == any.size(), "a rank tells of {} bytes of rows, another one of {}", rows.size(),
           any.size());
    std::ranges::transform(any, rows, any.begin(), [](char a, char b) { return static_cast<char>(a | b); });
  }
  return std::move(any);
}

// The offset of the parameter's rows in its unit's report.
std::size_t TouchedRows::first_told(ParameterId parameter) const {
  std::size_t told = 0;
  for (ParameterId p = layout_.first_parameter(layout_.location(parameter).unit); p < parameter; ++p)
    told += rows_[p].size();
  return told;
}

void TouchedRows::clear_others(ParameterId parameter, const std::string& of_any, float* gradient) const {
  const ParameterSpec& spec = layout_.spec(parameter);
  const std::size_t rows = spec.shape.front(), width = spec.elements() / rows, told = first_told(parameter);
  for (std::size_t row = 0; row < rows; ++row) {
    const char own = rows_[parameter][row / kBits], any = of_any[told + row / kBits];
    if ((any & ~own & bit_of(row)) != 0) std::fill_n(gradient + row * width, width, 0.0f);
  }
}

Packing TouchedRows::packing(UnitId unit, int use, const std::string& of_any) const {
  std::vector<Packing::Piece> pieces;
  std::size_t begin = 0;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const ParameterSpec& spec = layout_.spec(p);
    if (spec.uses <= use) continue;
    const std::size_t elements = spec.elements(), rows = spec.shape.front(), width = elements / rows,
                      told = first_told(p);
    for (std::size_t row = 0; by_rows(p, use) && row < rows; ++row)
      if ((of_any[told + row / kBits] & bit_of(row)) != 0)
        pieces.push_back({begin + row * width, begin + (row + 1) * width});
    if (!by_rows(p, use)) pieces.push_back({begin, begin + elements});
    const std::size_t end = begin + elements;
    begin += round_up(elements, kParameterAlignment);
    pieces.push_back({end, begin});
  }
  pieces.push_back({begin, use_elements(layout_, unit, use)});
  return Packing(pieces);
}

}  // namespace sluice::engine
