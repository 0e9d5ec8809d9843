#pragma once
#include <optional>
#include <vector>

#include "models/families/builder.h"
#include "models/graph/recompute.h"
#include "models/model/model.h"

namespace sluice::models {

// A pass of all micro-batches of a group through one unit, and what is held meanwhile.
struct Pass {
  // kAdd: of a copied embedding, whose gradient is complete at the end of a step, when the first section gets
  // no more from this one. kWeights: where backward is split.
  enum class Kind : std::uint8_t { kForward, kHead, kBackward, kWeights, kAdd };
  Kind kind = Kind::kForward;
  engine::UnitId unit = 0;
  std::vector<engine::Access> accesses;
  std::size_t chunk = 0;  // of the unit
};

struct Model::Impl {
  // section: the units of its chunks; without them the units are all of the model.
  Impl(const Shape& model_shape, const std::string& recompute_names,
       const std::vector<engine::UnitRange>& section = {});

  Shape shape;
  std::string recompute;
  Architecture architecture;
  // The same of layers that are not cut: which choices of recomputation there are does not depend on the
  // rank.
  Architecture whole;
  std::vector<engine::UnitSpec> units;                          // embedding, blocks, head; or some of them
  std::vector<std::vector<engine::ParameterId>> parameter_ids;  // by unit and the slots of its graph

  const Graph& graph(engine::UnitId unit) const { return *graphs_[unit]; }
  // The index of the unit's first op among those of all units of the model, in their order.
  std::uint64_t first_op(engine::UnitId unit) const { return first_ops_[unit]; }
  engine::UnitId last() const { return static_cast<engine::UnitId>(units.size() - 1); }
  bool has_embedding() const { return has_embedding_; }  // and looks up in it; false: it has at most a copy
  bool has_head() const { return has_head_; }            // as its last unit
  // The first unit that is computed: all but a copied embedding are.
  engine::UnitId first() const { return !has_embedding_ && has_copy() ? 1 : 0; }
  // What is computed of the units, in chunks that other sections' chunks stand between; one for the whole.
  const std::vector<engine::UnitRange>& chunks() const { return chunks_; }
  std::size_t chunk_of(engine::UnitId unit) const;

  // The unit's choices, in the order of its ActivationChoices.
  std::vector<Choice> choices(engine::UnitId unit) const;
  // What ranks write of gradients: Profile::written.
  std::vector<std::vector<engine::WrittenElements>> written() const;
  // The passes of one group in the vertical order; the profile's schedule is their accesses. splits_backward:
  // those that can have the gradients of weights in passes of their own, behind all others.
  std::vector<Pass> passes(bool splits_backward) const;

 private:
  void add_unit(const std::string& name, const std::string& prefix, const Graph& graph, bool is_here);
  bool has_copy() const { return has_head_ && !has_embedding_ && shape.config.tied_head; }
  engine::ParameterId id_of(const std::string& name) const;  // of a parameter of the units so far
  // The graph of another architecture that stands where this one stands.
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
