#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "engine/layout/layout.h"
#include "kernels/matrix.h"

namespace sluice::engine {

// The floating-point operations a second that one product reached, with operands in the caches; the result of
// a product that accumulates was in memory. Of `product`, shape, types, transposes and `accumulate` count.
struct ProductRate {
  kernels::Product product;
  double flops = 0;
};

// A link that joins a rank, or a host, to the others.
struct Link {
  double bandwidth = 0;  // bytes a second, in each direction at once
  double latency = 0;    // seconds until the first byte of an answer
};

// The seconds of so many bytes over a link; 0 without bytes, and where nothing is known of the link.
double link_seconds(std::uint64_t bytes, const std::optional<Link>& link);

// Reads "100Gbit/s,5us": bandwidth in Mbit/s, Gbit/s, MB/s or GB/s, and latency in us or ms, which may be
// left out. Throws Error(kInvalidArgument).
Link parse_link(std::string_view text);

// From where it is known how fast something is.
enum class Source : std::uint8_t { kAssumed, kMeasured, kStated };
std::string_view name_of(Source source);  // as in "measured"

// How fast a GPU is, and the link that joins it to the host. Unless somebody knows better: PCIe 4.0 with 16
// lanes, and memory of 1.5 TB/s.
struct GpuRates {
  Source source = Source::kAssumed;
  // Bytes a second: copies to the GPU alone, from it alone, and both ways at once, where both count.
  double in = 25e9, out = 25e9, both = 50e9;
  double update_seconds = 2e-11;  // in which the GPU updates an element that is in its memory
  double between = 0;             // bytes a second that it reads of other GPUs, all of which do so; 0: none
  bool operator==(const GpuRates&) const = default;
};

// How fast a machine is. Rates are measured. They serve to predict times and to choose how updates are
// streamed, and never change a bit of a result.
struct MachineRates {
  bool are_limits = false;  // the most that the machine can do, rather than what a step finds
  std::vector<ProductRate> products;
  double flops = 50e9;              // of products of a type that `products` does not have
  std::optional<double> attention;  // floating-point operations a second; nothing: as `flops`
  double memory_bandwidth = 10e9;   // bytes a second, read and written by loops
  // The seconds that all cores take to update an element that caches hold; nothing: not known. An update
  // takes that, or the time of its memory traffic where that is more.
  std::optional<double> update_seconds;
  // Bytes a second: reads alone, writes alone, and both together in equal amounts. disk_together 0: not
  // known; reads and writes then count as taking turns.
  double disk_read = 1e9, disk_write = 1e9, disk_together = 0;
  double disk_processor_seconds = 0;  // that one core spends for each byte read or written
  // The same for each byte from another rank. Where a GPU computes, one thread does nothing but that.
  double rank_processor_seconds = 0;
  int cores = 1;
  // The link between ranks that share gradients and parameters, or, with several hosts, between the hosts;
  // nothing: sends take no time. And, with several hosts, the link between the ranks of one host.
  std::optional<Link> link, host_link;
  std::optional<Link> layer_link;  // between ranks that compute pieces of the same layers
  GpuRates gpu;
  // Bytes under way in one direction that reach these rates.
  std::size_t disk_in_flight = std::size_t{16} << 20;
};

// For programs; the names are those of the C ABI's sluice_device_facts.
Json to_json(const GpuRates& rates, double cpu_memory);

// The seconds of one floating-point operation of such products in a step: at the rate that was measured, and
// then at the memory's rate for what was in the caches then and comes from memory in a step: the weights (for
// their gradient, the smaller operand) and the result, which counts twice where it is added to what is there.
// REQUIRES: the rates are no limits.
double product_seconds(const kernels::Product& product, const MachineRates& rates);

// The rate of the measured product that is most like this one: of its type, with the nearest ratios of sizes,
// and of equal ones with the same transposes and accumulation.
double flops_of(const kernels::Product& product, const MachineRates& rates);

// Of elements in a chunk of a streamed update.
inline constexpr std::size_t kMostChunk = 16 * kChunkGrain;

// The smallest chunk of which an update takes long enough that moves so many bytes for each element, in
// memory of so many bytes a second.
std::size_t chunk_elements(double bytes_an_element, double memory_bandwidth);

// The seconds of so many bytes, where reads and writes run together as long as there are both.
double disk_seconds(std::uint64_t read, std::uint64_t written, const MachineRates& rates);
// The same of bytes that are copied to a GPU and from it.
double copy_seconds(std::uint64_t in, std::uint64_t out, const GpuRates& rates);

}  // namespace sluice::engine
