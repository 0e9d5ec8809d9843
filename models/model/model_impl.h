#pragma once
#include <vector>

#include "models/families/builder.h"
#include "models/graph/recompute.h"
#include "models/model/model.h"

namespace sluice::models {

// A pass of all micro-batches of a group through one unit, and what is held meanwhile.
struct Pass {
  enum class Kind : std::uint8_t { kForward, kHead, kBackward };
  Kind kind = Kind::kForward;
  engine::UnitId unit = 0;
  std::vector<engine::Access> accesses;
};

struct Model::Impl {
  Impl(const Shape& model_shape, const std::string& recompute_names);

  Shape shape;
  std::string recompute;
  Architecture architecture;
  std::vector<engine::UnitSpec> units;                          // embedding, blocks, head
  std::vector<std::vector<engine::ParameterId>> parameter_ids;  // by unit and the slots of its graph

  const Graph& graph(engine::UnitId unit) const { return *graphs_[unit]; }
  // The index of the unit's first op among those of all units, in their order.
  std::uint64_t first_op(engine::UnitId unit) const { return first_ops_[unit]; }
  engine::UnitId head() const { return static_cast<engine::UnitId>(units.size() - 1); }
  // The unit's choices, in the order of its ActivationChoices.
  std::vector<Choice> choices(engine::UnitId unit) const;
  // The passes of one group in the vertical order; the profile's schedule is their accesses.
  std::vector<Pass> passes() const;

 private:
  void add_unit(const std::string& name, const std::string& prefix, const Graph& graph);
  engine::ParameterId id_of(const std::string& name) const;  // of a parameter of the units so far
  void check_recompute() const;
  void check_borders() const;

  std::vector<const Graph*> graphs_;  // by unit; of architecture
  std::vector<std::uint64_t> first_ops_;
  engine::ParameterId parameters_ = 0;  // of the units so far
};

}  // namespace sluice::models
