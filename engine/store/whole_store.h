#pragma once
#include <functional>
#include <span>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/layout.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// What an optimizer keeps of each parameter as a whole (optim::WholeArray): in memory, parameter after
// parameter. Frozen parameters have none. Of a parameter that spans units it is there once, and is loaded and
// saved with the unit of its first span. Thread rule: one thread at a time.
class WholeStore {
 public:
  WholeStore(const Layout& layout, const optim::Optimizer& optimizer);
  std::size_t bytes() const { return elements_ * sizeof(float); }
  void start(allocator::Ledger& ledger);  // takes the memory, which is zero
  void drop() { memory_ = {}; }           // gives it back, for good
  std::size_t resident_bytes() const { return memory_.size(); }

  float* data(ParameterId parameter) const;  // the same for all its spans. REQUIRES: start()
  // array: an index into Optimizer::whole_names(). Null: zeros.
  void load(UnitId unit, const std::function<void(ParameterId, std::size_t array, std::span<float>)>& source);
  void save(UnitId unit,
            const std::function<void(ParameterId, std::size_t array, std::span<const float>)>& sink) const;

 private:
  struct Part {
    std::size_t array, elements;
  };
  template <class Body>
  void for_each_part(UnitId unit, const Body& body) const;

  const Layout& layout_;
  std::vector<std::vector<Part>> parts_;  // by parameter
  std::vector<std::size_t> offsets_;      // likewise, in elements
  std::size_t elements_ = 0;
  allocator::Region memory_;
};

}  // namespace sluice::engine
