#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "models/families/config.h"

namespace {

bool same_shape(const sluice::models::ModelConfig& a, const sluice::models::ModelConfig& b) {
  return a.family == b.family && a.vocabulary == b.vocabulary && a.context == b.context &&
         a.layers == b.layers && a.width == b.width && a.heads == b.heads && a.kv_heads == b.kv_heads &&
         a.head_width == b.head_width && a.hidden_width == b.hidden_width && a.tied_head == b.tied_head &&
         a.qkv_bias == b.qkv_bias && a.rope_scaling.has_value() == b.rope_scaling.has_value();
}

}  // namespace

// Any text must be the config.json of a model that is the same when it is written and read again, or give
// Error(kInvalidArgument).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sluice::models;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::optional<ModelConfig> config;
  try {
    config = config_from_hugging_face(sluice::parse_json(text, "fuzz"), "fuzz");
  } catch (const sluice::Error& error) {
    if (error.code() != sluice::ErrorCode::kInvalidArgument) std::abort();
    return 0;
  }
  for (const bool from_fields : {false, true}) {  // must not throw
    if (from_fields) config->hugging_face = nullptr;
    const std::string written = config_to_hugging_face(*config, sluice::Dtype::kF32).dump();
    const auto again = config_from_hugging_face(sluice::parse_json(written, "written"), "written");
    if (!same_shape(*config, again)) std::abort();
  }
  return 0;
}
