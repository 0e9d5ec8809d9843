#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>

#include "core/error.h"
#include "engine/checkpoint/checkpoint.h"

// Any text, followed by its checksum, must be a manifest that is the same when it is written and read again,
// or give Error(kCorrupt | kInvalidArgument).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using sluice::engine::Manifest;
  std::string text(reinterpret_cast<const char*>(data), size);
  const std::uint64_t sum = sluice::checksum(std::as_bytes(std::span(text)));
  text += ",\n  \"checksum\": \"" + sluice::engine::to_hex(sum) + "\"\n}\n";
  std::optional<Manifest> manifest;
  try {
    manifest = Manifest::parse(text, "fuzz");
  } catch (const sluice::Error& error) {
    const bool expected =
        error.code() == sluice::ErrorCode::kCorrupt || error.code() == sluice::ErrorCode::kInvalidArgument;
    if (!expected) std::abort();
    return 0;
  }
  const Manifest again = Manifest::parse(manifest->to_text(), "written");  // must not throw
  if (again.step != manifest->step || again.run != manifest->run ||
      again.files.size() != manifest->files.size())
    std::abort();
  return 0;
}
