#pragma once
#include "core/dtype.h"
#include "optim/code_table.h"
#include "optim/factors.h"

// The interface between host and GPU for the kernels of elementwise updates. Private to this room.
namespace sluice::optim {

// CodeTable's lines.
struct CodeLines {
  float slopes[8], offsets[8];
  float inverse_slopes[CodeTable::kLines], inverse_offsets[CodeTable::kLines];
};

// `count` consecutive elements to update. Pointers are GPU addresses.
template <class Factors>
struct GpuSpan {
  struct State {
    void* values = nullptr;
    float* scales = nullptr;  // only for state in codes
  };
  std::uint64_t count = 0;
  const void* gradient = nullptr;
  float* master = nullptr;    // null where the parameter is rounded stochastically
  void* parameter = nullptr;  // null where the master alone is the parameter
  State state[2];
  std::uint64_t stream = 0, first_index = 0;  // as in RoundingWords
  Factors factors = {};
  bool is_aligned = false;  // groups of four elements of every array are aligned for one access
};

// The most spans of a launch; all of them have the same types.
inline constexpr std::uint32_t kSpansOfLaunch = 28;
template <class Factors>
struct GpuUpdates {
  const std::uint32_t* refused = nullptr;  // if not null, nothing is changed unless it points to a 0
  std::uint64_t seed = 0;                  // of RoundingWords
  Dtype gradient_type = Dtype::kF32, parameter_type = Dtype::kF32, state_type = Dtype::kF32;
  CodeLines lines[2] = {};  // for state arrays in codes
  std::uint32_t count = 0;
  std::uint32_t ends[kSpansOfLaunch] = {};  // by span: the end of its thread blocks in the grid
  GpuSpan<Factors> spans[kSpansOfLaunch];
};
static_assert(sizeof(GpuUpdates<AdamFactors>) <= 4096);  // the limit for kernel arguments on all GPUs

// The threads of a block, and the elements that it updates: each warp updates the elements of one scale.
inline constexpr unsigned kGpuThreads = 256;
inline constexpr std::size_t kGpuElements = kGpuThreads / 32 * kScaleBlock;

}  // namespace sluice::optim
