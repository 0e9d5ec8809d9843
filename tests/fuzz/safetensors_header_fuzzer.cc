#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

#include "core/error.h"
#include "engine/checkpoint/safetensors.h"

// Any bytes must be a file whose header agrees with itself, or give Error(kCorrupt).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using sluice::engine::SafetensorsHeader;
  try {
    const auto bytes = std::as_bytes(std::span(data, size));
    const std::uint64_t length = SafetensorsHeader::text_bytes(bytes, size, "fuzz");
    const std::string_view text(reinterpret_cast<const char*>(data) + SafetensorsHeader::kPrefix, length);
    const auto header = SafetensorsHeader::parse(text, size, "fuzz");
    if (header.file_bytes() != size) std::abort();
    std::uint64_t end = 0;
    for (const auto& tensor : header.tensors()) {
      if (tensor.begin != end || header.find(tensor.name) != &tensor) std::abort();
      end = tensor.end;
    }
  } catch (const sluice::Error& error) {
    if (error.code() != sluice::ErrorCode::kCorrupt) std::abort();
  }
  return 0;
}
