#pragma once
#include <functional>
#include <span>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/layout/layout.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// The arrays that an optimizer keeps per whole parameter (optim::WholeArray), always in memory. A frozen
// parameter has none. A parameter that spans units has them once; they are loaded and saved with the unit of
// its first span. Thread rule: one thread at a time.
class WholeStore {
 public:
  WholeStore(const Layout& layout, const optim::Optimizer& optimizer);
  std::size_t bytes() const { return elements_ * sizeof(float); }
  void start(allocator::Ledger& ledger);  // takes the memory, which is zero at first
  void drop() { memory_ = {}; }           // gives the memory back for good
  std::size_t resident_bytes() const { return memory_.size(); }

  // The same address for all spans of a parameter. REQUIRES: start() was called.
  float* data(ParameterId parameter) const;
  std::span<float> values(ParameterId parameter) const;  // of all its arrays
  // `array` is an index into Optimizer::whole_names(). Without a source all values become zero; without a
  // sink nothing happens.
  void load(UnitId unit, const std::function<void(ParameterId, std::size_t array, std::span<float>)>& source);
  void save(UnitId unit,
            const std::function<void(ParameterId, std::size_t array, std::span<const float>)>& sink) const;

 private:
  struct KeptArray {
    std::size_t index, elements;
  };
  template <class Body>
  void for_each_array(UnitId unit, const Body& body) const;

  const Layout& layout_;
  std::vector<std::vector<KeptArray>> arrays_;  // by parameter
  std::vector<std::size_t> offsets_;            // by parameter, in elements
  std::size_t elements_ = 0;
  allocator::Region memory_;
};

}  // namespace sluice::engine
