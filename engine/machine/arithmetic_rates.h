#pragma once
#include <span>

#include "core/threads.h"
#include "engine/plan/rates.h"
#include "kernels/attention.h"
#include "kernels/matrix.h"
#include "optim/optimizer.h"

// How fast the arithmetic of a step is here: each measured by what runs, on all threads, in memory that is
// given back. None throws but for memory that the system does not give.
namespace sluice::engine {

// What measuring takes of memory at a time, and gives back; and at most for the bandwidth of memory.
inline constexpr std::size_t kMeasuringBytes = std::size_t{16} << 20,
                             kMostMeasuringBytes = std::size_t{64} << 20;

// All operands of one type.
kernels::Product product_of(std::size_t m, std::size_t n, std::size_t k, Dtype type);
// Floating-point operations a second of kernels::multiply(), with operands that caches hold where they can.
// Of a large one a part is measured: its largest size is halved until it takes at most kMeasuringBytes and
// some milliseconds. The result of one that accumulates is another at each call, of as many as
// `results_bytes` hold, so that it comes from memory and goes there, as a gradient does that several
// micro-batches add to.
double measure_product(Threads& threads, kernels::MatrixLibrary& library, const kernels::Product& product,
                       std::size_t results_bytes = 0);
// The same of each.
std::vector<ProductRate> measure_products(Threads& threads, kernels::MatrixLibrary& library,
                                          std::span<const kernels::Product> products,
                                          std::size_t results_bytes = 0);

// Floating-point operations a second of attention, forward and backward, counted as models' ops count them.
// Of the shape sizes count; what takes more than kMeasuringBytes is measured in part.
double measure_attention(Threads& threads, const kernels::AttentionShape& shape, Dtype dtype);

// Bytes a second that loops read and write, in so many bytes: where caches hold them, it is the caches' rate.
double measure_memory(Threads& threads, std::size_t bytes);

// Of an element that caches hold; nothing for an optimizer with rounds, whose updates need whole parameters.
std::optional<double> measure_update(Threads& threads, const optim::Optimizer& optimizer, Dtype dtype);

}  // namespace sluice::engine
