#include "engine/checkpoint/stored_floats.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace sluice::engine {
namespace {

// Widens values of 2 bytes in the upper half of `out` in place, a few at a time, so that none is overwritten.
void widen(Dtype type, std::span<float> out) {
  std::array<std::uint16_t, 256> bits = {};
  for (std::size_t at = 0; at < out.size(); at += bits.size()) {
    const std::size_t count = std::min(bits.size(), out.size() - at);
    const std::span<const std::byte> upper = std::as_bytes(out).subspan(2 * out.size() + 2 * at, 2 * count);
    std::memcpy(bits.data(), upper.data(), upper.size());
    for (std::size_t i = 0; i < count; ++i)
      out[at + i] = type == Dtype::kBf16 ? to_f32(Bf16{bits[i]}) : to_f32(F16{bits[i]});
  }
}

}  // namespace

bool is_float(const StoredTensor& tensor) {
  const std::optional<Dtype> type = tensor.dtype();
  return type && sluice::is_float(*type);
}

void read_as_f32(SafetensorsReader& reader, const StoredTensor& tensor, std::size_t first,
                 std::span<float> out) {
  const std::span<std::byte> bytes = std::as_writable_bytes(out);
  if (tensor.dtype() == Dtype::kF32) return reader.read(tensor, first * 4, bytes);
  reader.read(tensor, first * 2, bytes.subspan(out.size() * 2));
  widen(*tensor.dtype(), out);
}

void read_as_f32(SafetensorsFolder& folder, const std::string& name, std::size_t first,
                 std::span<float> out) {
  read_as_f32(folder.file_of(name), folder.tensor(name), first, out);
}

bool has_shape(const StoredTensor& tensor, std::span<const std::size_t> shape) {
  return std::ranges::equal(tensor.shape, shape);
}

}  // namespace sluice::engine
