#pragma once
#include <optional>
#include <string_view>

#include "core/dtype.h"

namespace sluice::engine {

// The name that the format has for a type.
std::string_view safetensors_name(Dtype type);
// nullopt where Sluice does not compute with the type.
std::optional<Dtype> safetensors_dtype(std::string_view name);
// Bits of one element; 0 where the format does not know the name.
unsigned safetensors_bits(std::string_view name);

}  // namespace sluice::engine
