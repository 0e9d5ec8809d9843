#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/given.h"
#include "engine/layout/layout.h"
#include "engine/plan/pipeline.h"
#include "kernels/matrix.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// One access of a schedule: what a step needs of a unit until it releases it.
struct Access {
  UnitId unit = 0;
  bool parameters = false;
  int gradient_use = -1;  // the use whose gradient is written (1: that of a tied head); -1: none
  bool final = false;     // with this access of the last group the unit's gradient becomes final
  bool joined = false;    // it is held together with the access before
  std::size_t chunk = 0;  // of a section of a pipeline

  bool operator==(const Access&) const = default;
};

// The arithmetic of one micro-batch.
struct Work {
  std::vector<double> products;  // floating-point operations, by index of Profile::products
  double attention = 0;          // floating-point operations of attention
  double bytes = 0;              // bytes that everything else reads and writes
  // Where layers are cut over ranks: bytes that others send for it, those that come to the rank's host from
  // others, and how often it waits for them.
  std::uint64_t received = 0, from_hosts = 0, waits = 0;
  double flops() const;
  Work& operator+=(const Work& other);
};

// One way to keep a unit's activations between forward and backward, for one micro-batch.
struct ActivationChoice {
  std::string name;                 // "none", "full", or the ops that are recomputed, joined by +
  std::size_t kept_bytes = 0;       // without the unit's input, which is always kept
  Work again;                       // forward work that backward repeats
  std::size_t workspace_bytes = 0;  // for its forward and backward passes
  std::size_t forward_steps = 1, backward_steps = 1;  // how often the client lets updates go on
  // Where gradients of weights have a pass of their own: what is kept for it from forward, beside kept_bytes,
  // what backward leaves for it, and its steps.
  std::size_t kept_for_weights_bytes = 0, left_for_weights_bytes = 0, weights_steps = 0;
};

struct UnitProfile {
  Work forward, backward;
  Work weights;  // the part of backward that a pass of its own computes
  Work beside;   // of backward: what ranks add beside the gradients of weights, and the arithmetic of these
  std::size_t input_bytes = 0;            // of one micro-batch; kept from forward to backward
  std::vector<ActivationChoice> choices;  // from all kept ("none") to nothing kept ("full"); never empty
};

// Where a schedule is of a whole step, whose groups of micro-batches overlap: one that in_pipeline() made.
struct WholeStep {
  std::size_t group = 1;          // micro-batches that pass through a unit together: an item
  std::vector<std::size_t> held;  // by unit: the items whose inputs and activations are there at once
  std::size_t borders = 1;     // items of which something that goes from unit to unit is there, beside that
  std::uint64_t received = 0;  // bytes of a step that come from the sections before and after this one
  // Items of which there is what is kept, and left, for gradients of weights.
  std::size_t kept_for_weights = 0, left_for_weights = 0;
  struct Part {
    std::size_t item = 0;  // that the access is for
    // The unit's passes that are computed meanwhile. Gradients of weights with a pass of their own are not in
    // backward.
    bool forward = false, backward = false, weights = false;
  };
  std::vector<Part> parts;  // by access
};

// A unit with a table that embedding and head share, where a pipeline has them in two sections. Both have
// the unit, each writes one use of its gradient, and takes the other use from the other section.
struct Twin {
  UnitId unit = 0;
  int own_use = 0;       // of two
  bool is_copy = false;  // the model's unit is that of the first section; the last one has a copy
  int other_use() const { return 1 - own_use; }
};

// Which elements of a parameter's gradient one use of it writes, by the part of the layers that a rank
// computes (RankOf::parts).
using WrittenElements = std::vector<comm::Given::OfRank>;

// A model as the planner needs it: sizes only, found without allocating anything.
struct Profile {
  std::vector<UnitSpec> units;
  std::vector<UnitProfile> unit_profiles;
  std::vector<kernels::Product> products;  // shapes and types, each once
  std::vector<Access> schedule;            // of one group of micro-batches; a step repeats it
  std::optional<WholeStep> whole_step;     // there: the schedule is not repeated
  std::optional<Twin> twin;                // there: another section has this unit, too
  // By parameter and use; empty: each rank writes whole gradients.
  std::vector<std::vector<WrittenElements>> written;
  bool any_order = false;                 // the schedule is a guess until one is recorded; see AnyOrderEngine
  std::size_t held_units = 1;             // with any_order: the most units that are held at once
  std::size_t micro_batches = 1;          // in one step, of each rank
  std::size_t pieces = 1;                 // of a micro-batch, each of which has gradients of its own
  bool ends_micro_batches = false;        // with any_order: the client says where each of them ends
  std::size_t tokens = 0;                 // of one micro-batch
  std::size_t border_gradient_bytes = 0;  // of one micro-batch: the gradient that one unit hands to the next
  std::size_t workspace_bytes = 0;        // needed with any choice, beside the choice's own
  std::size_t hidden_bytes = 0;           // memory that libraries allocate beyond operands
  bool native_products = true;            // false: operands are widened to f32 for each product

  // How often a step repeats the schedule, where so many micro-batches pass through a unit together.
  std::size_t repeats(std::size_t group) const;
};

// The profile of a section of a pipeline, of whose units `of_section` is the profile: its schedule is that of
// one group of micro-batches, first all forward passes, then all that write gradients, then those that write
// the same gradients once more, for weights alone, and what does neither, but makes a gradient final, which
// is at the end of a step alone, and belongs to the first chunk. Throws Error(kInvalidArgument) for a step of
// more than kMostItems items. REQUIRES: the pipeline's items are as many as groups of so many micro-batches.
inline constexpr std::size_t kMostItems = 4096;
Profile in_pipeline(const Profile& of_section, const Pipeline& pipeline, int section, std::size_t group);

// Returns the bytes of activations, and of arrays that units hand on, with these choices by unit, where so
// many micro-batches pass through a unit together.
std::size_t activation_bytes(const Profile& profile, std::span<const std::size_t> choices, std::size_t group);
// The part of a unit, of one micro-batch of each of so many items, by what is there of them.
struct ItemsHeld {
  std::size_t activations = 1, kept_for_weights = 0, left_for_weights = 0;
};
std::size_t activation_bytes(const UnitProfile& unit, std::size_t choice, const ItemsHeld& items);

// The profile for a client that acquires units in an order of its own, at most `held_units` at once. The plan
// counts as if each unit were used once forward, in order, and once backward, in the opposite order. A frozen
// unit is only read.
Profile any_order_profile(std::vector<UnitSpec> units, std::size_t held_units);

// Throws Error(kInvalidArgument) where the optimizer keeps no masters, and a unit has parameters of f16 or no
// trainable unit has parameters narrower than f32.
void check_masters(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer);
// Whether any update has matrix products, which need a library.
bool has_products(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer);
// The memory that the library allocates for these products.
std::size_t hidden_bytes(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer,
                         const kernels::F32Products& products);

// How many gradient buffers each unit needs: one for each use of its parameters, and none where the schedule
// never asks for its gradient (a model that is only read). Throws Error(kInvalidArgument) where the schedule
// asks for the gradient of a frozen unit.
std::vector<int> gradient_uses(const Profile& profile);
// The levels of recomputation that are allowed: indices into UnitProfile::choices. Throws
// Error(kInvalidArgument) for a way that the model does not have.
std::vector<std::size_t> recompute_levels(const Profile& profile, const std::optional<std::string>& asked);
// The type of a unit's final gradients: in any order f32, since they can be kept and added to.
Dtype final_gradient_type(const Profile& profile, UnitId unit);
// Returns the bytes of so many elements of a final gradient on disk, or of a part of them beside a GPU: whole
// blocks, at least one.
std::size_t final_gradient_bytes(std::size_t elements, Dtype type);

}  // namespace sluice::engine
