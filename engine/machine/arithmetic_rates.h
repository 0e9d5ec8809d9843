#pragma once
#include <functional>
#include <span>

#include "core/threads.h"
#include "engine/plan/rates.h"
#include "kernels/attention.h"
#include "kernels/matrix.h"
#include "optim/optimizer.h"

// Measures how fast this machine does the arithmetic of a step, by running it on all threads, in memory that
// is given back. These functions throw only where the system does not give memory.
namespace sluice::engine {

// The memory of a measurement; and the most for measuring the bandwidth of memory.
inline constexpr std::size_t kMeasuringBytes = std::size_t{16} << 20,
                             kMostMeasuringBytes = std::size_t{64} << 20;

// A product whose operands are all of one type.
kernels::Product product_of(std::size_t m, std::size_t n, std::size_t k, Dtype type);
// Floating-point operations a second of kernels::multiply(), with operands that caches hold if they can. It
// measures a part of a large product: the largest size is halved until it takes at most kMeasuringBytes and
// some milliseconds. A product that accumulates gets another result at each call, of as many as
// `results_bytes` hold, so that the result comes from memory and goes there, as does a gradient to which
// several micro-batches add.
double measure_product(Threads& threads, kernels::MatrixLibrary& library, const kernels::Product& product,
                       std::size_t results_bytes = 0);
std::vector<ProductRate> measure_products(Threads& threads, kernels::MatrixLibrary& library,
                                          std::span<const kernels::Product> products,
                                          std::size_t results_bytes = 0);

// The same of a square product of f32 by another library.
double measure_square(Threads& threads, kernels::F32Products& products);

// Floating-point operations a second of attention, forward and backward, counted as the ops of models count
// them. It measures a part of a shape that takes more than kMeasuringBytes.
double measure_attention(Threads& threads, const kernels::AttentionShape& shape, Dtype dtype);

// Bytes a second that loops read and write in an array of so many bytes. An array that fits in the caches
// gives the caches' rate. beside: if not null, begins concurrent work before each run.
double measure_memory(Threads& threads, std::size_t bytes, const std::function<void()>& beside = {});

// Seconds to update an element that caches hold; nullopt for an optimizer with rounds, whose updates need
// whole parameters.
std::optional<double> measure_update(Threads& threads, const optim::Optimizer& optimizer, Dtype dtype);
// Bytes a second that updates read and write in an array of so many bytes: measure_update(), or for an
// optimizer with rounds measure_memory().
double measure_update_traffic(Threads& threads, const optim::Optimizer& optimizer, Dtype dtype,
                              std::size_t bytes, const std::function<void()>& beside = {});

}  // namespace sluice::engine
