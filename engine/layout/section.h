#pragma once
#include <optional>
#include <vector>

#include "engine/layout/layout.h"

namespace sluice::engine {

// Which units of a model one engine has, where the model is cut into sections, and what numbers they have
// there: they follow each other in the model's order. Immutable; any thread.
class Section {
 public:
  // cut: consecutive units, in the model's order, of the first section, the second one, and so on, and where
  // sections have several, of the first one again. has_copy: the engine's first unit is a copy of the model's
  // first one, beside those of its section. The model's layout outlives it.
  Section(const Layout& model, std::vector<UnitRange> cut, int sections, int section, bool has_copy);

  int owner(UnitId of_model) const;                  // the section that has the unit, and no copy of it
  std::optional<UnitId> own(UnitId of_model) const;  // nothing: the unit is another section's
  ParameterId of_model(ParameterId own) const;       // of a copy, too

 private:
  std::size_t range_of(UnitId of_model) const;

  const Layout& model_;
  const std::vector<UnitRange> cut_;
  const int sections_, section_;
  const bool has_copy_;
};

}  // namespace sluice::engine
