#include "engine/machine/machine.h"

#include <algorithm>

#include "allocator/memory.h"
#include "core/system.h"
#include "engine/machine/arithmetic_rates.h"
#include "engine/machine/process.h"
#include "engine/machine/tools.h"

namespace sluice::engine {
namespace {

// The tokens of a micro-batch, and the widths of two layers.
constexpr std::size_t kTokens[] = {128, 1024};
constexpr std::pair<std::size_t, std::size_t> kLayers[] = {{768, 3072}, {4096, 4096}};

// The products of a linear layer: forward, for the gradient of the input, and for that of the weights.
std::vector<kernels::Product> typical_products(Dtype type) {
  std::vector<kernels::Product> all;
  for (const std::size_t tokens : kTokens)
    for (const auto& [in, out] : kLayers) {
      const kernels::Product forward = product_of(tokens, out, in, type);
      kernels::Product to_input = product_of(tokens, in, out, type),
                       to_weight = product_of(in, out, tokens, type);
      to_input.transpose_b = to_weight.transpose_a = true;
      to_weight.c.type = Dtype::kF32;
      all.insert(all.end(), {forward, to_input, to_weight});
    }
  return all;
}

kernels::AttentionShape typical_attention() {
  kernels::AttentionShape shape;
  shape.batch = 4;
  shape.length = 256;
  shape.heads = shape.kv_heads = 12;
  shape.head_width = 64;
  shape.scale = 0.125f;
  return shape;
}

void measure_updates(Threads& threads, Machine& machine) {
  struct Kind {
    Dtype type, state;
    bool master;
  };
  for (const Kind& kind : {Kind{Dtype::kF32, Dtype::kF32, true}, Kind{Dtype::kF32, Dtype::kU8, true},
                           Kind{Dtype::kBf16, Dtype::kF32, true}, Kind{Dtype::kBf16, Dtype::kU8, true},
                           Kind{Dtype::kBf16, Dtype::kF32, false}, Kind{Dtype::kBf16, Dtype::kU8, false}})
    for (const char* name : {"adamw", "lion"}) {
      optim::OptimizerSettings settings;
      settings.name = name;
      settings.storage = {kind.state, kind.master, 0};
      const auto seconds = measure_update(
          threads, *optim::make_optimizer(settings, optim::Settings::Defaults::kTraining), kind.type);
      machine.updates.push_back({name, kind.type, kind.state, kind.master, 1 / *seconds});
    }
}

}  // namespace

Machine measure_machine() {
  Machine machine;
  machine.cores = usable_cpus();
  machine.cpu = cpu_model();
  machine.instructions = simd_features();
  const MemoryState memory = memory_state();
  machine.memory.total = memory.total == SIZE_MAX ? 0 : memory.total;
  machine.memory.usable = default_memory();
  Tools tools(machine.cores, {});
  Threads& threads = tools.threads;
  machine.bf16_products = tools.library->has_bf16();
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16}) {
    const auto rates = measure_products(threads, *tools.library, typical_products(type));
    machine.products.insert(machine.products.end(), rates.begin(), rates.end());
    machine.attention.push_back({type, measure_attention(threads, typical_attention(), type)});
  }
  machine.memory_bandwidth = measure_memory(threads, kMostMeasuringBytes);
  measure_updates(threads, machine);
  machine.memory.process = tools.base();
  return machine;
}

}  // namespace sluice::engine
