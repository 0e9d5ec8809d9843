#pragma once
#include <string>

namespace sluice::kernels {

// The loops of kernels and optim run on the widest vectors that the CPU has, or on none wider than the
// environment's SLUICE_MAX_TARGET names: avx512, avx2 or scalar (of an ARM: neon or scalar). Bits do not
// depend on it; tests and measurements use it. The matrix library has a variable of its own,
// ONEDNN_MAX_CPU_ISA. Every door calls this before it does anything; only the first call reads the
// environment. From any thread. Throws Error(kInvalidArgument) for another word.
void limit_targets();

// What the loops run on now: one of the words above.
std::string chosen_target();

}  // namespace sluice::kernels
