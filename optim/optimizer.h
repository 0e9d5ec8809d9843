#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/json.h"
#include "core/threads.h"
#include "kernels/matrix.h"
#include "kernels/reduce.h"
#include "optim/eight_bit.h"
#include "optim/settings.h"

namespace sluice::optim {

// A state array of an optimizer, with one entry for each element of a parameter.
struct StateArray {
  std::string name;                // torch.optim's name: "exp_avg"
  Dtype type = Dtype::kF32;        // f32, bf16, or u8: codes with scales
  CodeMap map = CodeMap::kSigned;  // for codes
};

// Consecutive elements of such an array in memory.
struct StatePart {
  Array values;             // in the array's type
  float* scales = nullptr;  // scales of codes, beginning with the first element's; null for other types
};

// An f32 state array of a parameter as a whole, with a shape of its own. It is always in memory.
struct WholeArray {
  std::string name;  // transformers' name: "exp_avg_sq_row"
  std::vector<std::size_t> shape;
  std::size_t elements() const;
};

// Properties of a parameter on which an optimizer's choices depend.
struct Kind {
  std::span<const std::size_t> shape;
  bool by_elements = false;  // an optimizer of matrices (Muon) uses AdamW for it, as for embeddings and heads
};

// A whole parameter, as the rounds of an update use it.
struct Whole {
  Kind kind;
  float* state = nullptr;          // the parameter's WholeArrays, one after another
  double* scratch = nullptr;       // scratch(kind) values: zero before the first round, kept until apply()
  std::byte* workspace = nullptr;  // workspace(kind) bytes that each combine() may overwrite
};

// The users' names of state types: "f32", "bf16", "8bit".
std::string_view state_type_name(Dtype type);
std::optional<Dtype> state_type_from_name(std::string_view name);
std::vector<std::string> state_type_names();

struct ElementwiseUpdate;  // optim/elementwise.h

// The settings of one step for a group of parameters, copied at step().
struct Hyperparameters {
  double learning_rate = 0;
  double weight_decay = 0;
  double gradient_factor = 1;  // gradients are first multiplied by it, for unscaling and clipping by norm
  std::uint64_t step = 1;      // counts from 1, without skipped steps
  double clip_value = 0;       // then each gradient element is clamped to [-clip_value, clip_value]; 0: not
  std::shared_ptr<const Settings> settings = {};  // null: the optimizer's own
};

// Consecutive elements of one parameter.
struct Span {
  std::size_t count = 0;
  std::uint64_t first_index = 0;      // index of its first element in the whole parameter
  std::uint64_t parameter_index = 0;  // in its model; selects random words together with the element
  // The f32 values that are updated (an f32 parameter is its own master); null: there are none.
  float* master = nullptr;
  Array parameter;  // the compute type's copy, written in the same pass; null data: there is only the master
  ConstArray gradient;           // f32, bf16 or f16
  std::vector<StatePart> state;  // by StateArray, `count` elements of its type; null: there is no array
  Whole whole = {};              // the whole parameter; for optimizers with rounds
};

// The types in which an optimizer stores state and parameters. It computes in f32 in any case.
struct Storage {
  // f32; bf16, rounded to nearest, ties to even, at each write; or u8, encoded at each write
  // (optim/eight_bit.h).
  Dtype state = Dtype::kF32;
  // Whether parameters narrower than f32 have an f32 master. Without one, writes round stochastically, by
  // random words that depend on seed, parameter, element and step alone.
  bool master = true;
  std::uint64_t seed = 0;
};

// Values in a parameter's scratch that are summed over its parts.
struct PartSums {
  std::span<double> f64;
  std::span<float> f32;
};

// An optimizer that needs statistics of a whole parameter before it updates it (Adafactor, Muon) works in
// rounds. For each round r < rounds(): statistics(r, span) for all spans of the parameter in ascending order,
// then combine(r). After the last round: Optimizer::apply() for every span. The defaults here are those of an
// elementwise optimizer, without rounds.
//
// A parameter may be in several parts, for example on several ranks, each with a scratch of its own.
// statistics() then covers the spans of one part, and combine() gets the scratch in which sums(r) have been
// added over all parts. A part leaves the entries of other parts zero: so each sum has at most one addend
// that is not zero, and the order of the parts changes no bit but the sign of a zero.
class Rounds {
 public:
  virtual ~Rounds() = default;
  virtual int rounds() const { return 0; }
  virtual bool has_rounds(const Kind&) const { return rounds() > 0; }  // false: apply() is the whole update
  // Returns the whole arrays of a parameter of this shape: some of whole_names(), in their order.
  virtual std::vector<WholeArray> whole_state(std::span<const std::size_t>) const { return {}; }
  virtual std::vector<std::string> whole_names() const { return {}; }
  // Whether statistics(round) reads the state, or the values (masters, or the parameter without one). Arrays
  // that it does not read need not be in memory.
  virtual bool reads_state(int /*round*/) const { return true; }
  virtual bool reads_values(int /*round*/) const { return true; }
  virtual std::size_t scratch(const Kind&) const { return 0; }  // the number of f64 values that rounds share
  virtual std::size_t workspace(const Kind&) const { return 0; }  // bytes, aligned to 64
  // Returns the largest m, n and k of combine()'s matrix products; m is 0 where it has none.
  virtual kernels::Product largest_product(const Kind&) const { return {}; }
  virtual double product_flops(const Kind&) const { return 0; }  // operations of matrix products
  // Returns where a parameter may be cut into parts: the last such element at or before `element`, on its
  // grid.
  virtual std::size_t last_cut(const Kind&, std::size_t element) const {
    return element / kernels::kGridBlock * kernels::kGridBlock;
  }
  // Returns the sums that statistics(round) accumulates, which are zero before the round's first span. Reads
  // only kind and scratch of the whole.
  virtual PartSums sums(int /*round*/, const Whole&) const { return {}; }
  virtual void statistics(Threads&, int, const Hyperparameters&, const Span&) const {}
  // products may be null where largest_product() has m = 0.
  virtual void combine(Threads&, kernels::F32Products*, int, const Hyperparameters&, const Whole&) const {}
};

// The arithmetic of a step. It knows no tier and no rank. Its results have the same bits however a parameter
// is cut into spans (at multiples of kernels::kGridBlock elements), at any vector width and thread count.
// Only matrix products, whose shapes are the parameter's, have bits that depend on their library. Thread
// rule: statistics(), combine() and apply() of one parameter from one thread at a time, the other functions
// from any.
class Optimizer : public Rounds {
 public:
  explicit Optimizer(Settings settings, const Storage& storage = {});
  const std::string& name() const { return settings_.optimizer(); }  // "adamw"
  Json settings() const;                                             // as a checkpoint records them
  // Returns settings for one step that differ from the optimizer's own; see Settings::for_step().
  std::shared_ptr<const Settings> for_step(const Json& given) const { return settings_.for_step(given); }
  const Storage& storage() const { return storage_; }
  // Whether it keeps f32 masters of parameters in a narrower type. An f32 parameter is its own master.
  bool keeps_master() const { return storage_.master; }
  virtual std::vector<StateArray> state() const = 0;
  // Whether a parameter has the state array with this index in state().
  virtual bool keeps(std::size_t, const Kind&) const { return true; }
  virtual void apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const = 0;
  // Returns the update of apply() where each element's update depends on that element alone:
  // optim/device_update.h runs it on a GPU.
  virtual std::optional<ElementwiseUpdate> elementwise(const Hyperparameters&) const;

 protected:
  const Settings& own() const { return settings_; }
  const Settings& of(const Hyperparameters& h) const { return h.settings ? *h.settings : settings_; }

 private:
  Settings settings_;
  Storage storage_;
};

// A user's choice of an optimizer. docs/optimizers.md says what each one computes, and names its state.
struct OptimizerSettings {
  std::string name = "adamw";
  Json settings = Json::object();  // in the form that Settings accepts
  Storage storage = {};
};
// Throws Error(kInvalidArgument) for an unknown name (its text lists the known ones), for settings that are
// invalid, alone or together, and for a type that the state cannot have.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings,
                                          Settings::Defaults defaults = Settings::Defaults::kOwn);
std::vector<std::string> optimizer_names();

}  // namespace sluice::optim
