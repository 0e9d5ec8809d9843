#include "core/dtype.h"

#include <array>
#include <utility>

namespace sluice {
namespace {
struct Row {
  Dtype type;
  std::string_view name;
  std::size_t size;
};
constexpr std::array kRows = {Row{Dtype::kF32, "f32", 4}, Row{Dtype::kBf16, "bf16", 2},
                              Row{Dtype::kF16, "f16", 2}, Row{Dtype::kI32, "i32", 4},
                              Row{Dtype::kU16, "u16", 2}, Row{Dtype::kU8, "u8", 1}};
}  // namespace

std::size_t size_of(Dtype type) { return kRows[static_cast<std::size_t>(type)].size; }
std::string_view name_of(Dtype type) { return kRows[static_cast<std::size_t>(type)].name; }

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const Row& row : kRows)
    if (row.name == name) return row.type;
  return std::nullopt;
}

}  // namespace sluice
