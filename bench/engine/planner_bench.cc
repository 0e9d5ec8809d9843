// Measures how long planning takes, by the number of units: for GPT-like blocks with three levels of
// recomputation and four micro-batches, and for the same units in any order with half of their memory.
#include <benchmark/benchmark.h>

#include <string>

#include "core/bytes.h"
#include "engine/plan/plan.h"
#include "engine/planner/planner.h"

namespace {

using namespace sluice;
using namespace sluice::engine;

constexpr std::size_t kTokens = 512, kWidth = 512;

std::vector<UnitSpec> blocks(std::size_t count) {
  std::vector<UnitSpec> units;
  for (std::size_t i = 0; i < count; ++i) {
    UnitSpec unit;
    unit.name = "block." + std::to_string(i);
    // Units differ in size.
    unit.parameters = {{unit.name + ".attention", {kWidth, 4 * kWidth + 64 * (i % 7)}},
                       {unit.name + ".up", {kWidth, 4 * kWidth}},
                       {unit.name + ".down", {4 * kWidth, kWidth}}};
    units.push_back(std::move(unit));
  }
  return units;
}

Profile in_order(std::size_t count) {
  Profile profile = any_order_profile(blocks(count), 1);
  profile.any_order = false;
  profile.micro_batches = 4;
  kernels::Product product;
  product.m = kTokens;
  product.n = product.k = kWidth;
  profile.products = {product};
  const double flops = 24.0 * kTokens * kWidth * kWidth;
  for (UnitProfile& unit : profile.unit_profiles) {
    unit.forward.products = {flops};
    unit.backward.products = {2 * flops};
    unit.input_bytes = kTokens * kWidth * sizeof(float);
    unit.choices = {{"none", 16 * unit.input_bytes, {}, kMiB, 6, 12},
                    {"activation", 8 * unit.input_bytes, {{}, 0, 1e7}, kMiB, 6, 13},
                    {"full", 0, unit.forward, kMiB, 6, 18}};
  }
  return profile;
}

void plan(benchmark::State& state, const Profile& profile) {
  const auto optimizer = optim::make_optimizer({});
  Budget budget{std::uint64_t{1} << 60, std::uint64_t{1} << 60, 100 * kMiB};
  budget.memory = make_plan(profile, *optimizer, budget, {}, {}).peak_memory / 2;
  for (auto _ : state) benchmark::DoNotOptimize(make_plan(profile, *optimizer, budget, {}, {}).peak_memory);
}

void plan_in_order(benchmark::State& state) {
  plan(state, in_order(static_cast<std::size_t>(state.range(0))));
}
void plan_in_any_order(benchmark::State& state) {
  plan(state, any_order_profile(blocks(static_cast<std::size_t>(state.range(0))), 2));
}

BENCHMARK(plan_in_order)->Arg(100)->Arg(800)->Arg(4000)->Arg(20000)->Unit(benchmark::kMillisecond);
BENCHMARK(plan_in_any_order)->Arg(100)->Arg(800)->Arg(4000)->Arg(20000)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
