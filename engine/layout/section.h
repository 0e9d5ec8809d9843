#pragma once
#include <optional>
#include <vector>

#include "engine/layout/layout.h"

namespace sluice::engine {

// The units of a model that one engine has, where the model is cut into sections, and their numbers there, in
// the model's order. Immutable; any thread.
class Section {
 public:
  // cut: ranges of consecutive units, in the model's order: the first section's, the second one's and so on,
  // and, where sections have several, the first one's again. has_copy: the engine's first unit is a copy of
  // the model's first one, in addition to its section's units. The model's layout outlives it.
  Section(const Layout& model, std::vector<UnitRange> cut, int sections, int section, bool has_copy);

  int owner(UnitId of_model) const;                  // the section that has the unit, other than as a copy
  std::optional<UnitId> own(UnitId of_model) const;  // nullopt: it is another section's
  ParameterId of_model(ParameterId own) const;       // also of a copy

 private:
  std::size_t range_of(UnitId of_model) const;

  const Layout& model_;
  const std::vector<UnitRange> cut_;
  const int sections_, section_;
  const bool has_copy_;
};

}  // namespace sluice::engine
