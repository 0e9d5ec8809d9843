#pragma once
#include <cstddef>
#include <functional>
#include <span>

#include "core/dtype.h"
#include "engine/checkpoint/safetensors.h"

namespace sluice::engine {

// Whether the tensor is F32, F16 or BF16.
bool is_float(const StoredTensor& tensor);

// Reads `out.size()` elements as f32, from element `first` on. `read` reads bytes of the tensor from an
// offset on. REQUIRES: is_float() of the tensor.
using ReadBytes = std::function<void(std::size_t first_byte, std::span<std::byte> out)>;
void read_as_f32(Dtype type, std::size_t first, std::span<float> out, const ReadBytes& read);
void read_as_f32(SafetensorsReader& reader, const StoredTensor& tensor, std::size_t first,
                 std::span<float> out);

bool has_shape(const StoredTensor& tensor, std::span<const std::size_t> shape);

}  // namespace sluice::engine
