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
struct GpuUpdate {
  struct State {
    void* values = nullptr;
    float* scales = nullptr;  // of state in codes
    Dtype type = Dtype::kF32;
  };
  std::uint64_t count = 0;
  const std::uint32_t* refused = nullptr;  // where it is not null, and no 0 is there, nothing is changed
  const void* gradient = nullptr;
  float* master = nullptr;    // null where the parameter is rounded stochastically
  void* parameter = nullptr;  // null where the master alone is the parameter
  Dtype gradient_type = Dtype::kF32, parameter_type = Dtype::kF32;
  State state[2];
  RoundingWords words;
  AdamFactors adam = {};  // one of these is the optimizer's
  LionFactors lion = {};
  SgdFactors sgd = {};
  CodeLines lines[2] = {};  // of the arrays of state, where they are codes
};

// The threads of a block, and the elements that a block updates: a warp updates a block of a scale.
inline constexpr unsigned kGpuThreads = 256;
inline constexpr std::size_t kGpuElements = kGpuThreads / 32 * kScaleBlock;

}  // namespace sluice::optim
