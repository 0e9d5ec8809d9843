#include "engine/saving/section_values.h"

#include <utility>

namespace sluice::engine {
namespace {

// Calls the same function with the model's number of the parameter.
template <class... Arguments>
void translate(std::function<void(ParameterId, Arguments...)>& function, const Section& section) {
  if (!function) return;
  function = [inner = std::move(function), &section](ParameterId own, Arguments... arguments) {
    inner(section.of_model(own), arguments...);
  };
}

}  // namespace

UnitSource of_section(UnitSource of_model, const Section& section) {
  translate(of_model.values, section);
  translate(of_model.state, section);
  translate(of_model.whole, section);
  return of_model;
}

UnitSink of_section(UnitSink of_model, const Section& section) {
  translate(of_model.parameter, section);
  translate(of_model.master, section);
  translate(of_model.state, section);
  translate(of_model.whole, section);
  translate(of_model.values, section);
  return of_model;
}

}  // namespace sluice::engine
