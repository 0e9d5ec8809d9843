#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/matrix.h"

namespace sluice::engine {

// Floating-point operations a second that a product reached, with operands that caches hold; the result of
// one that accumulates lies in memory. Of its operands only the types count.
struct ProductRate {
  kernels::Product product;
  double flops = 0;
};

// How fast the machine is; measured, for the predicted time and for how updates are streamed: it never
// decides what bits come out.
struct MachineRates {
  bool are_limits = false;  // what the machine can do at most, rather than what a step finds
  std::vector<ProductRate> products;
  double flops = 50e9;              // of products of a type of which `products` has none
  std::optional<double> attention;  // floating-point operations a second; nothing: as `flops`
  double memory_bandwidth = 10e9;   // bytes read and written by loops
  // Of all cores, for an element of the run's optimizer that their caches hold; nothing: not known. An update
  // takes that, or what memory_bandwidth allows where that is more.
  std::optional<double> update_seconds;
  // Bytes a second: of each direction alone, and of both together where as much is read as written.
  // disk_together 0: not known, as if they took turns.
  double disk_read = 1e9, disk_write = 1e9, disk_together = 0;
  double disk_processor_seconds = 0;  // of one core, for each byte read or written
  int cores = 1;
  std::size_t disk_in_flight = std::size_t{16} << 20;  // bytes under way that reach these, one way
};

// Of so many floating-point operations of products like this one, as steps have them: at the rate that was
// measured, and then what comes from memory and goes there that the rate does not have: the weights or, for
// their gradient, the smaller operand; and the result, twice where it is added to what is there. To a
// machine's limits nothing is added.
double product_seconds(const kernels::Product& product, double flops, const MachineRates& rates);
// Of one of them; where the rates are no limits.
double product_seconds_each(const kernels::Product& product, const MachineRates& rates);

// That of the product measured which is most like it: of its type, the nearest by the ratios of sizes, of the
// same transposes where there is a choice.
double flops_of(const kernels::Product& product, const MachineRates& rates);

// Of reads and writes that run together as far as there are both.
double disk_seconds(std::uint64_t read, std::uint64_t written, const MachineRates& rates);

}  // namespace sluice::engine
