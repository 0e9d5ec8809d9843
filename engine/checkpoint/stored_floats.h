#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "core/dtype.h"
#include "engine/checkpoint/safetensors.h"

namespace sluice::engine {

// Whether the tensor is F32, F16 or BF16.
bool is_float(const StoredTensor& tensor);

// Read `out.size()` elements of a tensor as f32, from element `first` on. REQUIRES: is_float() of the tensor.
void read_as_f32(SafetensorsReader& reader, const StoredTensor& tensor, std::size_t first,
                 std::span<float> out);
void read_as_f32(SafetensorsFolder& folder, const std::string& name, std::size_t first, std::span<float> out);

bool has_shape(const StoredTensor& tensor, std::span<const std::size_t> shape);

}  // namespace sluice::engine
