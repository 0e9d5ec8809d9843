#include "engine/checkpoint/safetensors_types.h"

#include "core/error.h"

namespace sluice::engine {
namespace {

struct Type {
  std::string_view name;
  unsigned bits;
  std::optional<Dtype> type = std::nullopt;
};

constexpr Type kTypes[] = {
    {"F32", 32, Dtype::kF32},
    {"BF16", 16, Dtype::kBf16},
    {"F16", 16, Dtype::kF16},
    {"I32", 32, Dtype::kI32},
    {"U16", 16, Dtype::kU16},
    {"U8", 8, Dtype::kU8},
    {"F64", 64},
    {"F8_E4M3", 8},
    {"F8_E5M2", 8},
    {"F8_E8M0", 8},
    {"F6_E2M3", 6},
    {"F6_E3M2", 6},
    {"F4", 4},
    {"C64", 64},
    {"I64", 64},
    {"I16", 16},
    {"I8", 8},
    {"U64", 64},
    {"U32", 32},
    {"BOOL", 8},
};

const Type* find(std::string_view name) {
  for (const Type& type : kTypes)
    if (type.name == name) return &type;
  return nullptr;
}

}  // namespace

std::string_view safetensors_name(Dtype dtype) {
  for (const Type& type : kTypes)
    if (type.type == dtype) return type.name;
  fail(ErrorCode::kInternal, "the type {} has no name in safetensors", name_of(dtype));
}

std::optional<Dtype> safetensors_dtype(std::string_view name) {
  const Type* type = find(name);
  return type == nullptr ? std::nullopt : type->type;
}

unsigned safetensors_bits(std::string_view name) {
  const Type* type = find(name);
  return type == nullptr ? 0 : type->bits;
}

}  // namespace sluice::engine
