#pragma once
#include <span>

#include "core/device.h"
#include "optim/optimizer.h"

namespace sluice::optim {

// Updates what is in a GPU's memory, on the GPU, with the bits of Optimizer::apply(); only NaN has other bits
// on a GPU, and stays NaN. Thread rule: one thread at a time.
class DeviceUpdate {
 public:
  struct Part {
    Hyperparameters hyperparameters;
    Span span;
  };

  // Throws Error(kInvalidArgument) for an optimizer that looks at parameters as a whole (Adafactor, Muon),
  // whose updates are the CPU's, and Error(kNotFound), Error(kBudget) or Error(kIo) where its kernels are
  // missing or cannot be loaded. The device and the optimizer outlive the object.
  DeviceUpdate(Device& device, const Optimizer& optimizer);
  // Queues the update of some spans, all of whose pointers are addresses of the GPU's, and multiples of the
  // size of what is there. Up to kMostTogether of them are one launch. Where `refused` is not null, it is an
  // address of the GPU's, too, and nothing is changed unless 0 is there when the update's turn comes. Throws
  // as Optimizer::apply(), and Error(kIo) where the kernel cannot be queued. REQUIRES: all spans have the
  // same types, and all or none have masters.
  void apply(CUstream_st* stream, std::span<const Part> parts, const std::uint32_t* refused = nullptr);
  static const std::size_t kMostTogether;

 private:
  template <class Factors>
  void launch(CUstream_st* stream, std::span<const Part> parts, const std::uint32_t* refused);
  void check(const Part& part, const Span& first) const;

  Device& device_;
  const Optimizer& optimizer_;
  const bool is_coded_;
  CUfunc_st *with_master_ = nullptr, *rounded_ = nullptr;
};

}  // namespace sluice::optim
