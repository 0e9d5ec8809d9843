#pragma once
#include <optional>
#include <vector>

#include "engine/layout/layout.h"

namespace sluice::engine {

// Which units of a model one engine has, where the model is cut into sections of consecutive units, and what
// numbers they have there. Immutable; any thread.
class Section {
 public:
  // cut: the units of all sections. has_copy: the engine's first unit is a copy of the model's first one,
  // beside those of its section. The model's layout outlives it.
  Section(const Layout& model, std::vector<UnitRange> cut, int section, bool has_copy);

  int owner(UnitId of_model) const;                  // the section that has the unit, and no copy of it
  std::optional<UnitId> own(UnitId of_model) const;  // nothing: the unit is another section's
  ParameterId of_model(ParameterId own) const;       // of a copy, too

 private:
  const Layout& model_;
  const std::vector<UnitRange> cut_;
  const int section_;
  const bool has_copy_;
};

}  // namespace sluice::engine
