#pragma once
#include <span>

#include "core/device.h"
#include "optim/optimizer.h"

namespace sluice::optim {

// Updates parameters in GPU memory on the GPU, with the same bits as Optimizer::apply(), except that a NaN
// may have other bits. Thread rule: one thread at a time.
class DeviceUpdate {
 public:
  struct Part {
    Hyperparameters hyperparameters;
    Span span;
  };

  // Throws Error(kInvalidArgument) for an optimizer with rounds (Adafactor, Muon), whose updates run on the
  // CPU, and Error(kNotFound), Error(kBudget) or Error(kIo) where its kernels are missing or cannot be
  // loaded. The device and the optimizer outlive the object.
  DeviceUpdate(Device& device, const Optimizer& optimizer);
  // Queues the update of some spans. All their pointers are GPU addresses, aligned to their elements. Up to
  // kMostTogether spans share one launch. If `refused` is not null, it is a GPU address, and the update
  // changes nothing unless a 0 is there when it runs. Throws as Optimizer::apply(), and Error(kIo) where the
  // kernel cannot be queued. REQUIRES: all spans have the same types, and all or none have masters.
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
