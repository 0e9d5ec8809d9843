#pragma once
#include <optional>
#include <vector>

#include "models/families/builder.h"
#include "models/graph/recompute.h"
#include "models/model/model.h"

namespace sluice::models {

// A pass of all micro-batches of a group through one unit, and the units that it accesses.
struct Pass {
  // kAdd: completes the gradient of a copied embedding at the end of a step, when this section sends nothing
  // more to the first one. kWeights: only where backward is split.
  enum class Kind : std::uint8_t { kForward, kHead, kBackward, kWeights, kAdd };
  Kind kind = Kind::kForward;
  engine::UnitId unit = 0;
  std::vector<engine::Access> accesses;
  std::size_t chunk = 0;  // of the unit
};

struct Model::Impl {
  // section: the units of its chunks; empty: all units of the model.
  Impl(const Shape& model_shape, const std::string& recompute_names,
       const std::vector<engine::UnitRange>& section = {});

  Shape shape;
  std::string recompute;
  Architecture architecture;
  // The same architecture with layers that are not cut: the choices of recomputation must not depend on the
  // rank.
  Architecture whole;
  std::vector<engine::UnitSpec> units;  // embedding, blocks, head; or a section's part of them
  std::vector<std::vector<engine::ParameterId>> parameter_ids;  // by unit and slot of its graph

  const Graph& graph(engine::UnitId unit) const { return *graphs_[unit]; }
  // Returns the index of the unit's first op among those of all units of the model, in their order.
  std::uint64_t first_op(engine::UnitId unit) const { return first_ops_[unit]; }
  engine::UnitId last() const { return static_cast<engine::UnitId>(units.size() - 1); }
  bool has_embedding() const { return has_embedding_; }  // false: at most a copy of the table
  bool has_head() const { return has_head_; }            // as its last unit
  // The first unit with computation; only a copied embedding has none.
  engine::UnitId first() const { return !has_embedding_ && has_copy() ? 1 : 0; }
  // The units with computation, by chunk of the section; one chunk for a whole model.
  const std::vector<engine::UnitRange>& chunks() const { return chunks_; }
  std::size_t chunk_of(engine::UnitId unit) const;

  // Returns the unit's choices, in the order of its ActivationChoices.
  std::vector<Choice> choices(engine::UnitId unit) const;
  // The elements of gradients that each rank writes: Profile::written.
  std::vector<std::vector<engine::WrittenElements>> written() const;
  // Returns the passes of one group, unit by unit; the profile's schedule is their accesses. splits_backward:
  // gradients of weights that can have passes of their own have them, behind all other passes.
  std::vector<Pass> passes(bool splits_backward) const;

 private:
  void add_unit(const std::string& name, const std::string& prefix, const Graph& graph, bool is_here);
  bool has_copy() const { return has_head_ && !has_embedding_ && shape.config.tied_head; }
  engine::ParameterId id_of(const std::string& name) const;  // of a parameter of the units so far
  // Returns the graph of another architecture at the place of this one.
  const Graph& same_in(const Architecture& other, const Graph& graph) const;
  void check_recompute() const;
  void check_borders() const;

  std::vector<engine::UnitRange> chunks_;
  std::vector<const Graph*> graphs_;  // by unit; of architecture

  std::vector<std::uint64_t> first_ops_;
  bool has_embedding_ = true, has_head_ = true;
  engine::ParameterId parameters_ = 0;  // of the units so far
  // Ops and parameters of all units of the model so far.
  std::uint64_t ops_of_model_ = 0;
  std::size_t parameters_of_model_ = 0;
};

}  // namespace sluice::models
