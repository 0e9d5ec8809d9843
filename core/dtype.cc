#include "core/dtype.h"

#include <array>
#include <utility>

namespace sluice {
namespace {
struct TypeRow {
  Dtype type;
  std::string_view name;
  std::size_t size;
};
constexpr std::array kTypeRows = {TypeRow{Dtype::kF32, "f32", 4}, TypeRow{Dtype::kBf16, "bf16", 2},
                                  TypeRow{Dtype::kF16, "f16", 2}, TypeRow{Dtype::kI32, "i32", 4},
                                  TypeRow{Dtype::kU16, "u16", 2}, TypeRow{Dtype::kU8, "u8", 1}};
}  // namespace

std::size_t size_of(Dtype type) { return kTypeRows[static_cast<std::size_t>(type)].size; }
std::string_view name_of(Dtype type) { return kTypeRows[static_cast<std::size_t>(type)].name; }

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const TypeRow& row : kTypeRows)
    if (row.name == name) return row.type;
  return std::nullopt;
}

}  // namespace sluice
