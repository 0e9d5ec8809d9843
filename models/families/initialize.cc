#include "models/families/initialize.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <vector>

#include "core/checksum.h"
#include "core/error.h"
#include "kernels/elementwise.h"
#include "models/families/family.h"

namespace sluice::models {
namespace {

// Judges a file by its name, so that a broken link or an incomplete download counts, too.
bool may_hold_weights(const std::string& file) {
  static constexpr std::array<std::string_view, 8> kMarks = {".safetensors", ".gguf", ".h5",   ".msgpack",
                                                             ".pth",         ".ckpt", ".onnx", "model.bin"};
  return file.ends_with(".pt") || (file.find("model-") != file.npos && file.find(".bin") != file.npos) ||
         std::ranges::any_of(kMarks, [&](std::string_view mark) { return file.find(mark) != file.npos; });
}

std::vector<std::string> weight_files(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error))
    if (const std::string name = entries->path().filename().string(); may_hold_weights(name))
      names.push_back(name);
  if (error) fail(ErrorCode::kIo, "cannot read the folder '{}': {}", folder, error.message());
  std::ranges::sort(names);
  return names;
}

}  // namespace

engine::UnitSource initial_values(const ModelConfig& config, const engine::Layout& layout, std::uint64_t seed,
                                  Threads& threads) {
  engine::UnitSource source;
  source.values = [config, &layout, seed, &threads](engine::ParameterId id, std::size_t first,
                                                    std::span<float> out) {
    const engine::ParameterSpec& spec = layout.spec(id);
    const FirstValues first_values = config.family->first_values(config, spec);
    if (first_values.deviation == 0) return std::fill(out.begin(), out.end(), first_values.mean);
    const std::uint64_t stream = checksum(std::as_bytes(std::span(spec.name)));
    kernels::fill_normal(threads, out.size(), seed, stream, spec.span_first + first, first_values.mean,
                         first_values.deviation, Array{out.data(), Dtype::kF32});
  };
  return source;
}

bool begins_with_first_values(const std::string& model) {
  if (is_preset(model)) return true;
  const std::filesystem::path folder(model);
  std::error_code ignored;  // a file that cannot be inspected is still judged by its name
  for (const char* readable : {"model.safetensors", "model.safetensors.index.json"})
    if (std::filesystem::exists(folder / readable, ignored)) return false;
  const std::vector<std::string> files = weight_files(model);
  if (files.empty()) return true;
  fail(ErrorCode::kInvalidArgument,
       "'{}' has weights that cannot be read: {}. Sluice reads model.safetensors, or its index and the files "
       "that it names (transformers writes them: from_pretrained, then save_pretrained); to train from first "
       "values, name a folder with config.json alone",
       model, fmt::join(files, ", "));
}

}  // namespace sluice::models
