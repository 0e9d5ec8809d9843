#pragma once
#include <string>

namespace sluice::kernels {

// Limits the vector width of the loops in kernels and optim. They use the widest vectors of the CPU, or at
// most those that the environment's SLUICE_MAX_TARGET names: avx512, avx2 or scalar (on ARM: neon or scalar).
// Results have the same bits; the limit is for tests and measurements. The matrix library has a variable of
// its own, ONEDNN_MAX_CPU_ISA. Every entry point (CLI, C ABI) calls this before anything else; only the first
// call reads the environment. Throws Error(kInvalidArgument) for another word. Thread rule: any thread.
void limit_targets();

// Returns the word for the vectors that the loops use now.
std::string chosen_target();

}  // namespace sluice::kernels
