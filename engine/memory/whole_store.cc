#include "engine/memory/whole_store.h"

#include <algorithm>

#include "core/error.h"

namespace sluice::engine {

WholeStore::WholeStore(const Layout& layout, const optim::Optimizer& optimizer)
    : layout_(layout), arrays_(layout.parameters()) {
  const std::vector<std::string> names = optimizer.whole_names();
  for (ParameterId p = 0; p < layout.parameters(); ++p) {
    offsets_.push_back(elements_);
    if (!layout.trainable(layout.location(p).unit) || layout.spec(p).continues()) continue;
    for (const optim::WholeArray& array : optimizer.whole_state(layout.spec(p).shape)) {
      const auto found = std::find(names.begin(), names.end(), array.name);
      ensure(found != names.end(), "{1} does not name its array '{0}'", array.name, optimizer.name());
      arrays_[p].push_back({static_cast<std::size_t>(found - names.begin()), array.elements()});
      elements_ += array.elements();
    }
  }
}

void WholeStore::start(allocator::Ledger& ledger) {
  memory_ = allocator::Region(ledger, allocator::Purpose::kOptimizerState, bytes());
}

float* WholeStore::data(ParameterId parameter) const {
  return reinterpret_cast<float*>(memory_.data()) + offsets_[layout_.first_span(parameter)];
}

std::span<float> WholeStore::values(ParameterId parameter) const {
  std::size_t elements = 0;
  for (const KeptArray& array : arrays_[layout_.first_span(parameter)]) elements += array.elements;
  return {data(parameter), elements};
}

template <class Body>
void WholeStore::for_each_array(UnitId unit, const Body& body) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    float* at = data(p);
    for (const KeptArray& array : arrays_[p]) {
      body(p, array.index, std::span<float>(at, array.elements));
      at += array.elements;
    }
  }
}

void WholeStore::load(UnitId unit,
                      const std::function<void(ParameterId, std::size_t array, std::span<float>)>& source) {
  for_each_array(unit, [&](ParameterId p, std::size_t array, std::span<float> values) {
    if (source)
      source(p, array, values);
    else
      std::fill(values.begin(), values.end(), 0.0f);
  });
}

void WholeStore::save(
    UnitId unit,
    const std::function<void(ParameterId, std::size_t array, std::span<const float>)>& sink) const {
  if (sink) for_each_array(unit, sink);
}

}  // namespace sluice::engine
