#pragma once
#include <string>

namespace sluice::kernels {

// Limits the vectors of the loops in kernels and optim. They run on the widest that the CPU has, or on none
// wider than the environment's SLUICE_MAX_TARGET names: avx512, avx2 or scalar (on ARM: neon or scalar). The
// bits do not depend on it; tests and measurements use it. The matrix library has a variable of its own,
// ONEDNN_MAX_CPU_ISA. Every door calls this before anything else; only the first call reads the environment.
// Throws Error(kInvalidArgument) for another word. Thread rule: any thread.
void limit_targets();

// Returns the word for the vectors on which the loops run now.
std::string chosen_target();

}  // namespace sluice::kernels
