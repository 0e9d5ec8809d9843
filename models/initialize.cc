#include "models/initialize.h"

#include <algorithm>
#include <cmath>

#include "core/checksum.h"
#include "kernels/elementwise.h"

namespace sluice::models {
namespace {

float deviation(const ModelConfig& config, const std::string& name) {
  const bool into_residual = config.family == Family::kGpt2 && name.ends_with(".c_proj.weight");
  if (!into_residual) return config.initializer_range;
  return static_cast<float>(config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.layers)));
}

bool is_norm(const engine::ParameterSpec& spec) {
  return spec.shape.size() == 1 && spec.name.ends_with(".weight");
}

}  // namespace

engine::UnitSource initial_values(const ModelConfig& config, const engine::Layout& layout, std::uint64_t seed,
                                  Threads& threads) {
  engine::UnitSource source;
  source.values = [config, &layout, seed, &threads](engine::ParameterId id, std::size_t first,
                                                    std::span<float> out) {
    const engine::ParameterSpec& spec = layout.spec(id);
    if (spec.name.ends_with(".bias")) return std::fill(out.begin(), out.end(), 0.0f);
    if (is_norm(spec)) return std::fill(out.begin(), out.end(), 1.0f);
    const std::uint64_t stream = checksum(std::as_bytes(std::span(spec.name)));
    kernels::fill_normal(threads, out.size(), seed, stream, first, 0.0f, deviation(config, spec.name),
                         Array{out.data(), Dtype::kF32});
  };
  return source;
}

}  // namespace sluice::models
