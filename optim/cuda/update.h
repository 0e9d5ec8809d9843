#pragma once
#include "core/dtype.h"
#include "optim/code_table.h"
#include "optim/factors.h"

// What host and GPU agree on for the kernels of elementwise updates. Private to this room.
namespace sluice::optim {

// CodeTable's lines.
struct CodeLines {
  float slopes[8], offsets[8];
  float inverse_slopes[CodeTable::kLines], inverse_offsets[CodeTable::kLines];
};

// Of `count` consecutive elements. Pointers are addresses of the GPU's.
template <class Factors>
struct GpuSpan {
  struct State {
    void* values = nullptr;
    float* scales = nullptr;  // of state in codes
  };
  std::uint64_t count = 0;
  const void* gradient = nullptr;
  float* master = nullptr;    // null where the parameter is rounded stochastically
  void* parameter = nullptr;  // null where the master alone is the parameter
  State state[2];
  std::uint64_t stream = 0, first_index = 0;  // as RoundingWords
  Factors factors = {};
  bool is_aligned = false;  // four elements of any array may be accessed at once
};

// The spans of a launch, which all have these types.
inline constexpr std::uint32_t kSpansOfLaunch = 28;
template <class Factors>
struct GpuUpdates {
  const std::uint32_t* refused = nullptr;  // where it is not null, and no 0 is there, nothing is changed
  std::uint64_t seed = 0;                  // of RoundingWords
  Dtype gradient_type = Dtype::kF32, parameter_type = Dtype::kF32, state_type = Dtype::kF32;
  CodeLines lines[2] = {};  // of the arrays of state, where they are codes
  std::uint32_t count = 0;
  std::uint32_t ends[kSpansOfLaunch] = {};  // of each span's blocks of threads in the grid
  GpuSpan<Factors> spans[kSpansOfLaunch];
};
static_assert(sizeof(GpuUpdates<AdamFactors>) <= 4096);  // what a kernel's arguments may have on every GPU

// The threads of a block, and the elements that a block updates: a warp updates a block of a scale.
inline constexpr unsigned kGpuThreads = 256;
inline constexpr std::size_t kGpuElements = kGpuThreads / 32 * kScaleBlock;

}  // namespace sluice::optim
