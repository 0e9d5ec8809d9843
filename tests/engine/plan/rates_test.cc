#include "engine/plan/rates.h"

#include <gtest/gtest.h>

#include "engine/plan/plan.h"
#include "engine/planner/placement.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"

namespace sluice::engine {
namespace rates_test {

MachineRates rates_of(double read, double write, double together) {
  MachineRates rates;
  rates.disk_read = read;
  rates.disk_write = write;
  rates.disk_together = together;
  return rates;
}

TEST(DiskSeconds, ReadsAndWritesRunTogetherAsFarAsThereAreBoth) {
  EXPECT_EQ(disk_seconds(300, 100, rates_of(100, 50, 0)), 3 + 2);
  EXPECT_EQ(disk_seconds(300, 100, rates_of(100, 50, 80)), 200.0 / 80 + 2);
  EXPECT_EQ(disk_seconds(100, 300, rates_of(100, 50, 80)), 200.0 / 80 + 4);
  EXPECT_EQ(disk_seconds(300, 0, rates_of(100, 50, 80)), 3);
  EXPECT_EQ(disk_seconds(0, 0, rates_of(100, 50, 80)), 0);
}

TEST(CopySeconds, BothWaysGoOnAtOnceAsFarAsThereAreBoth) {
  const GpuRates rates = {Source::kStated, 100, 50, 80, 1};
  EXPECT_EQ(copy_seconds(300, 100, rates), 200.0 / 80 + 2);
  EXPECT_EQ(copy_seconds(100, 300, rates), 200.0 / 80 + 4);
  EXPECT_EQ(copy_seconds(0, 0, rates), 0);
}

kernels::Product product_of(std::size_t m, Dtype type) {
  kernels::Product product;
  product.m = m;
  product.n = product.k = 768;
  product.a.type = product.b.type = type;
  return product;
}

TEST(ProductRates, AreThoseOfTheNearestOfTheType) {
  MachineRates rates;
  rates.products = {{product_of(100, Dtype::kF32), 1},
                    {product_of(1000, Dtype::kF32), 2},
                    {product_of(100, Dtype::kBf16), 3}};
  EXPECT_EQ(flops_of(product_of(100, Dtype::kF32), rates), 1);
  EXPECT_EQ(flops_of(product_of(300, Dtype::kF32), rates), 1);
  EXPECT_EQ(flops_of(product_of(400, Dtype::kF32), rates), 2);
  EXPECT_EQ(flops_of(product_of(400, Dtype::kBf16), rates), 3);
  EXPECT_EQ(flops_of(product_of(100, Dtype::kF16), rates), rates.flops);
}

// 100 x 768 x 768 in f32: 768 x 768 weights and 100 x 768 results of 4 bytes come from memory and go there.
TEST(ProductSeconds, CountWhatComesFromMemory) {
  MachineRates rates;
  rates.products = {{product_of(100, Dtype::kF32), 2e9}};
  rates.memory_bandwidth = 1e9;
  kernels::Product product = product_of(100, Dtype::kF32);
  const double flops = 2.0 * 100 * 768 * 768, weights = 4.0 * 768 * 768, results = 4.0 * 100 * 768;
  EXPECT_DOUBLE_EQ(product_seconds(product, flops, rates), flops / 2e9 + (weights + results) / 1e9);
  EXPECT_DOUBLE_EQ(product_seconds(product, 3 * flops, rates), 3 * product_seconds(product, flops, rates));
  product.accumulate = true;
  EXPECT_DOUBLE_EQ(product_seconds(product, flops, rates), flops / 2e9 + (weights + 2 * results) / 1e9);
  product.transpose_a = true;  // for a weight's gradient the smaller operand counts, of 100 x 768
  const double smaller = 4.0 * 100 * 768;
  EXPECT_DOUBLE_EQ(product_seconds(product, flops, rates), flops / 2e9 + (smaller + 2 * results) / 1e9);
  rates.products.front().product.accumulate = true;  // then the result was in memory when it was measured
  EXPECT_DOUBLE_EQ(product_seconds(product, flops, rates), flops / 2e9 + smaller / 1e9);
  rates.are_limits = true;
  EXPECT_DOUBLE_EQ(product_seconds(product, flops, rates), flops / rates.flops);
}

// AdamW in f32 moves 28 bytes of each element: value and two arrays of state out and in, and the gradient.
TEST(Visits, AnUpdateTakesItsArithmeticOrTheBandwidthOfMemory) {
  const auto optimizer = optim::make_optimizer({});
  const Profile profile = toy::profile(1);
  const Placement placement(profile, *optimizer, {});
  const std::vector<UnitPlan> units(profile.units.size());
  double elements = 0;
  for (const UnitSpec& unit : profile.units)
    for (const ParameterSpec& parameter : unit.parameters)
      elements += static_cast<double>(parameter.elements());
  const auto seconds = [&](double arithmetic) {
    MachineRates rates;
    rates.memory_bandwidth = 28e9;
    rates.update_seconds = arithmetic;
    double sum = 0;
    for (const Visit& visit : placement.visits(units, 1, placement.times(rates))) sum += visit.before.seconds;
    return sum / elements;
  };
  EXPECT_NEAR(seconds(0.5e-9), 1e-9, 1e-15);
  EXPECT_NEAR(seconds(3e-9), 3e-9, 1e-15);
}

// Returns the chunk of a unit of a hundred million elements, with everything on disk.
TEST(Chunks, AreAsLongAsWakingTheThreadsAsksForAndNoLonger) {
  const auto optimizer = optim::make_optimizer({});
  const Profile profile = any_order_profile({{"unit", {{"weight", {100, 1 << 20}}}}}, 1);
  PlanRequest request;
  request.places = toy::places("disk");
  const auto chunk = [&](double bandwidth) {
    MachineRates rates;
    rates.memory_bandwidth = bandwidth;
    return make_plan(profile, *optimizer, {std::uint64_t{16} << 30, std::uint64_t{16} << 30, 0}, request,
                     rates)
        .chunk_elements;
  };
  EXPECT_EQ(chunk(10e9), kChunkGrain);      // 28 bytes of each of 512 Ki take 1.5 ms
  EXPECT_EQ(chunk(50e9), 2 * kChunkGrain);  // 0.3 ms
  EXPECT_EQ(chunk(500e9), chunk(50e9)) << "staging takes memory";
}

// The visits move in all what the units' traffic adds up to.
TEST(Visits, MoveAllTrafficOfAStep) {
  const auto optimizer = optim::make_optimizer({});
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16})
    for (const std::size_t group : {1, 2, 3})
      for (const bool clip : {true, false}) {
        const Profile profile = toy::profile(3, {type});
        PlanRequest request;
        request.clip = clip;
        const Placement placement(profile, *optimizer, request);
        constexpr auto kDisk = allocator::Tier::kDisk;
        std::vector<UnitPlan> units(profile.units.size(), UnitPlan{{kDisk, kDisk, kDisk}, true, 1});
        const std::size_t groups = divide_up(profile.micro_batches, group);
        Placement::Traffic expected;
        for (UnitId unit = 0; unit < units.size(); ++unit) {
          units[unit].gradient_stored = placement.stores_gradient(unit, groups);
          for (const Placement::Traffic& traffic :
               {placement.parameter_traffic(unit, groups), placement.state_traffic(unit),
                units[unit].gradient_stored ? placement.gradient_traffic(unit, groups)
                                            : Placement::Traffic()}) {
            expected.read += traffic.read;
            expected.written += traffic.written;
          }
        }
        Placement::Traffic found;
        for (const Visit& visit : placement.visits(units, group, placement.times({}))) {
          found.read += visit.read_bytes();
          found.written += visit.written_bytes();
        }
        EXPECT_EQ(found.read, expected.read) << name_of(type) << group << clip;
        EXPECT_EQ(found.written, expected.written) << name_of(type) << group << clip;
      }
}

TEST(Links, AreReadAsTheyAreWritten) {
  EXPECT_DOUBLE_EQ(parse_link("100Gbit/s,5us").bandwidth, 12.5e9);
  EXPECT_DOUBLE_EQ(parse_link("100Gbit/s,5us").latency, 5e-6);
  EXPECT_DOUBLE_EQ(parse_link("1.5GB/s").bandwidth, 1.5e9);
  EXPECT_EQ(parse_link("1.5GB/s").latency, 0);
  for (const char* wrong : {"", "fast", "1", "1Gbit", "0Gbit/s", "-1GB/s", "1GB/s,", "1GB/s,5", "1GB/s,-5us",
                            "nanGB/s", "1GB/s,5us,", "1e400GB/s"})
    EXPECT_THROW(parse_link(wrong), Error) << wrong;
}

}  // namespace rates_test
}  // namespace sluice::engine
