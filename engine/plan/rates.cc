#include "engine/plan/rates.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "core/error.h"
#include "engine/layout/layout.h"

namespace sluice::engine {
namespace {

// Seconds for a chunk: waking the threads costs too much of a shorter one.
constexpr double kShortestUpdate = 0.0005;
// Bytes a second; chunks grow no further with faster memory, since staging takes memory.
constexpr double kMostBandwidth = 50e9;

double ratio_distance(std::size_t a, std::size_t b) {
  return std::abs(std::log(static_cast<double>(std::max<std::size_t>(a, 1)) /
                           static_cast<double>(std::max<std::size_t>(b, 1))));
}

// Each difference in transposes or accumulation counts less than sizes that differ by a tenth.
double distance(const kernels::Product& a, const kernels::Product& b) {
  constexpr double kOtherwise = 0.03;
  const int differences = (a.transpose_a != b.transpose_a ? 1 : 0) +
                          (a.transpose_b != b.transpose_b ? 1 : 0) + (a.accumulate != b.accumulate ? 1 : 0);
  return ratio_distance(a.m, b.m) + ratio_distance(a.n, b.n) + ratio_distance(a.k, b.k) +
         kOtherwise * differences;
}

// Null where no product of its type was measured.
const ProductRate* nearest_rate(const kernels::Product& product, const MachineRates& rates) {
  double least = std::numeric_limits<double>::infinity();
  const ProductRate* nearest = nullptr;
  for (const ProductRate& rate : rates.products) {
    if (rate.product.a.type != product.a.type) continue;
    const double found = distance(product, rate.product);
    if (found >= least) continue;
    least = found;
    nearest = &rate;
  }
  return nearest;
}

}  // namespace

double flops_of(const kernels::Product& product, const MachineRates& rates) {
  const ProductRate* const rate = nearest_rate(product, rates);
  return rate == nullptr ? rates.flops : rate->flops;
}

double product_seconds(const kernels::Product& product, const MachineRates& rates) {
  const ProductRate* const rate = nearest_rate(product, rates);
  const double measured = rate == nullptr ? rates.flops : rate->flops;
  const auto bytes = [](const ConstArray& array, std::size_t rows, std::size_t columns) {
    return static_cast<double>(rows) * static_cast<double>(columns) *
           static_cast<double>(size_of(array.type));
  };
  const double weights = bytes(product.b, product.k, product.n);
  const double from_memory =
      product.transpose_a ? std::min(weights, bytes(product.a, product.m, product.k)) : weights;
  const bool has_result = product.accumulate && rate != nullptr && rate->product.accumulate;
  const double result =
      has_result ? 0 : (product.accumulate ? 2 : 1) * bytes(product.c, product.m, product.n);
  const double each =
      2 * static_cast<double>(product.m) * static_cast<double>(product.n) * static_cast<double>(product.k);
  return 1 / measured + (from_memory + result) / each / rates.memory_bandwidth;
}

double disk_seconds(std::uint64_t read, std::uint64_t written, const MachineRates& rates) {
  const auto both = rates.disk_together > 0 ? static_cast<double>(std::min(read, written)) : 0.0;
  const double alone = (static_cast<double>(read) - both) / rates.disk_read +
                       (static_cast<double>(written) - both) / rates.disk_write;
  return both > 0 ? 2 * both / rates.disk_together + alone : alone;
}

double copy_seconds(std::uint64_t in, std::uint64_t out, const GpuRates& rates) {
  const auto both = static_cast<double>(std::min(in, out));
  return 2 * both / rates.both + (static_cast<double>(in) - both) / rates.in +
         (static_cast<double>(out) - both) / rates.out;
}

std::size_t chunk_elements(double bytes_an_element, double memory_bandwidth) {
  const double bandwidth = std::min(memory_bandwidth, kMostBandwidth);
  std::size_t elements = kChunkGrain;
  while (elements < kMostChunk &&
         static_cast<double>(elements) * bytes_an_element / bandwidth < kShortestUpdate)
    elements *= 2;
  return elements;
}

std::string_view name_of(Source source) {
  return source == Source::kStated ? "stated" : source == Source::kMeasured ? "measured" : "assumed";
}

Json to_json(const GpuRates& rates, double cpu_memory) {
  return {{"to_gpu", rates.in},
          {"from_gpu", rates.out},
          {"both_ways", rates.both},
          {"gpu_updates", 1 / rates.update_seconds},
          {"cpu_memory", cpu_memory},
          {"between_gpus", rates.between},
          {"known", name_of(rates.source)}};
}

double link_seconds(std::uint64_t bytes, const std::optional<Link>& link) {
  return bytes == 0 || !link ? 0 : static_cast<double>(bytes) / link->bandwidth + link->latency;
}

Link parse_link(std::string_view text) {
  struct Suffix {
    std::string_view name;
    double factor;
  };
  const auto parse = [&](std::string_view part, std::initializer_list<Suffix> suffixes) {
    double number = 0;
    const char* const end = part.data() + part.size();
    const auto [rest, error] = std::from_chars(part.data(), end, number, std::chars_format::fixed);
    const std::string_view name(rest, static_cast<std::size_t>(end - rest));
    for (const Suffix& suffix : suffixes)
      if (error == std::errc() && name == suffix.name && std::isfinite(number)) return number * suffix.factor;
    return -1.0;
  };
  const std::size_t comma = text.find(',');
  const Link link = {
      parse(text.substr(0, comma), {{"Mbit/s", 1e6 / 8}, {"Gbit/s", 1e9 / 8}, {"MB/s", 1e6}, {"GB/s", 1e9}}),
      comma == text.npos ? 0 : parse(text.substr(comma + 1), {{"us", 1e-6}, {"ms", 1e-3}})};
  if (!(link.bandwidth > 0) || !(link.latency >= 0))
    fail(ErrorCode::kInvalidArgument,
         "'{}' is no link; write its bandwidth and, after a comma, its latency, as in 100Gbit/s,5us", text);
  return link;
}

}  // namespace sluice::engine
