#include "engine/plan/rates.h"

#include "engine/plan/plan.h"
#include "testing.h"

namespace sluice::engine::rates_test {

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

// 100 x 768 x 768 in f32: 768 x 768 weights and 100 x 768 results of 4 bytes come from memory and go there.
TEST(ProductSeconds, CountWhatComesFromMemory) {
  MachineRates rates;
  rates.products = {{product_of(100, Dtype::kF32), 2e9}};
  rates.memory_bandwidth = 1e9;
  kernels::Product product = product_of(100, Dtype::kF32);
  const double flops = 2.0 * 100 * 768 * 768, weights = 4.0 * 768 * 768, results = 4.0 * 100 * 768;
  EXPECT_DOUBLE_EQ(flops * product_seconds(product, rates), flops / 2e9 + (weights + results) / 1e9);
  product.accumulate = true;
  EXPECT_DOUBLE_EQ(flops * product_seconds(product, rates), flops / 2e9 + (weights + 2 * results) / 1e9);
  product.transpose_a = true;  // for a weight's gradient the smaller operand counts, of 100 x 768
  const double smaller = 4.0 * 100 * 768;
  EXPECT_DOUBLE_EQ(flops * product_seconds(product, rates), flops / 2e9 + (smaller + 2 * results) / 1e9);
  rates.products.front().product.accumulate = true;  // then the result was in memory when it was measured
  EXPECT_DOUBLE_EQ(flops * product_seconds(product, rates), flops / 2e9 + smaller / 1e9);
}

TEST(Links, AreReadAsTheyAreWritten) {
  EXPECT_DOUBLE_EQ(parse_link("100Gbit/s,5us").bandwidth, 12.5e9);
  EXPECT_DOUBLE_EQ(parse_link("100Gbit/s,5us").latency, 5e-6);
  EXPECT_DOUBLE_EQ(parse_link("1.5GB/s").bandwidth, 1.5e9);
  EXPECT_EQ(parse_link("1.5GB/s").latency, 0);
  for (const char* wrong : {"", "fast", "5us", "1", "1Gbit", "0Gbit/s", "-1GB/s", "1GB/s,", "1GB/s,5",
                            "1GB/s,-5us", "nanGB/s", "infGB/s", "1e3GB/s", "1GB/s,5us,", "1e400GB/s"})
    EXPECT_THROW(parse_link(wrong), Error) << wrong;
}

}  // namespace sluice::engine::rates_test
