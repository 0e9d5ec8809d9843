#pragma once
#include <string>
#include <vector>

#include "engine/layout.h"
#include "kernels/matrix.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// What a step needs of a unit, and for how long: the words of a schedule.
struct Access {
  UnitId unit = 0;
  bool parameters = false;
  int gradient_use =
      -1;  // -1: no gradient; else the use whose gradient is written (0, or 1 of a tied embedding)
  bool final =
      false;  // with this access the unit's gradient becomes final, when the last group of micro-batches runs
  bool operator==(const Access&) const = default;
};

// Arithmetic of one micro-batch.
struct Work {
  std::vector<double> products;  // floating-point operations, by index of Profile::products
  double attention = 0;          // the same, of attention
  double bytes = 0;              // memory traffic of everything else
  double flops() const;          // all of them
  Work& operator+=(const Work& other);
};

// One way to keep a unit's activations between forward and backward, for one micro-batch.
struct ActivationChoice {
  std::string name;                 // "none", "full", or the ops that are recomputed, joined by +
  std::size_t kept_bytes = 0;       // without the unit's input, which is always kept
  Work again;                       // what is recomputed in backward
  std::size_t workspace_bytes = 0;  // of its forward and backward passes
  std::size_t forward_steps = 1, backward_steps = 1;  // between which the client lets updates go on
};

struct UnitProfile {
  Work forward, backward;
  std::size_t input_bytes = 0;            // of one micro-batch: kept from forward to backward
  std::vector<ActivationChoice> choices;  // from all kept ("none") to nothing kept ("full"); never empty
};

// What a model is, as far as the plan must know. Sizes only: made without allocating anything.
struct Profile {
  std::vector<UnitSpec> units;
  std::vector<UnitProfile> unit_profiles;
  std::vector<kernels::Product> products;  // shapes and types, each once
  std::vector<Access> schedule;   // of one group of micro-batches; the step repeats it for each group
  bool any_order = false;         // the schedule is a guess until one was recorded; see AnyOrderEngine
  std::size_t held_units = 1;     // with any_order: the most that are held at once
  std::size_t micro_batches = 1;  // that one step accumulates
  std::size_t tokens = 0;         // of one micro-batch
  std::size_t border_gradient_bytes = 0;  // of one micro-batch: the gradient handed from unit to unit
  std::size_t workspace_bytes = 0;        // what is needed at any choice, beyond the choices' own
  std::size_t hidden_bytes = 0;           // what libraries take beyond operands
  bool native_products = true;            // false: operands are widened to f32 for each product
};

// Of a client that acquires its units in an order of its own, at most `held_units` at once: as if each were
// used once forward, and then backward from the last one on. A frozen unit is only read.
Profile any_order_profile(std::vector<UnitSpec> units, std::size_t held_units);

// Throws Error(kInvalidArgument) where the optimizer keeps no masters and the parameters need theirs, or have
// none.
void check_masters(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer);
// Whether an update has matrix products, which need a library for them.
bool has_products(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer);
// What the library takes for itself for these.
std::size_t hidden_bytes(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer,
                         const kernels::F32Products& products);

// How many gradient buffers each unit needs: one for each use of its parameters; none where the schedule
// never asks for its gradient (a model that is only read). Throws Error(kInvalidArgument) where it asks for
// that of a frozen unit.
std::vector<int> gradient_uses(const Profile& profile);
// The type of a unit's gradients once they are final: in any order they can be kept and added to, in f32.
Dtype final_gradient_type(const Profile& profile, UnitId unit);

}  // namespace sluice::engine
