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

// One array of state that an optimizer keeps for each element of a parameter.
struct StateArray {
  std::string name;                // as torch.optim names it: "exp_avg"
  Dtype type = Dtype::kF32;        // f32, bf16; u8: codes with scales
  CodeMap map = CodeMap::kSigned;  // of the codes
};

// Where some consecutive elements of such an array lie.
struct StatePart {
  Array values;             // in the array's type
  float* scales = nullptr;  // the scales of codes, from the first element's on; null for other types
};

// An array of f32 that an optimizer keeps for a parameter as a whole, in a shape of its own. It is always in
// memory.
struct WholeArray {
  std::string name;  // as transformers names it: "exp_avg_sq_row"
  std::vector<std::size_t> shape;
  std::size_t elements() const;
};

// What an optimizer is told of a parameter.
struct Kind {
  std::span<const std::size_t> shape;
  bool by_elements = false;  // an optimizer of matrices (Muon) leaves it to AdamW, as embeddings and heads
};

// A parameter as the rounds of an update have it.
struct Whole {
  Kind kind;
  float* state = nullptr;          // the parameter's whole arrays, one after another
  double* scratch = nullptr;       // scratch(kind) values: zero before the first round, kept until apply()
  std::byte* workspace = nullptr;  // workspace(kind) bytes that each combine() may overwrite
};

// The names under which users know the types of state: "f32", "bf16", "8bit".
std::string_view state_type_name(Dtype type);
std::optional<Dtype> state_type_from_name(std::string_view name);
std::vector<std::string> state_type_names();

struct ElementwiseUpdate;  // optim/elementwise.h

// What one step applies to a group of parameters; a copy is taken at step().
struct Hyperparameters {
  double learning_rate = 0;
  double weight_decay = 0;
  double gradient_factor = 1;  // clipping and unscaling: gradients are multiplied by it first
  std::uint64_t step = 1;      // 1 for the first step that is not skipped
  double clip_value = 0;  // each element of a gradient is then brought between -clip_value and it; 0: none
  std::shared_ptr<const Settings> settings = {};  // null: the optimizer's own
};

// A run of consecutive elements of one parameter.
struct Span {
  std::size_t count = 0;
  std::uint64_t first_index = 0;      // of its first element in the logical parameter
  std::uint64_t parameter_index = 0;  // in its model; with the element it names a random word
  // f32 values that are updated (an f32 parameter is its own master); null: none are kept.
  float* master = nullptr;
  Array parameter;      // the compute type's copy, written in the same pass; null data: the master is all
  ConstArray gradient;  // f32, bf16 or f16
  std::vector<StatePart> state;  // one for each StateArray, count elements of its type; null: it has none
  Whole whole = {};              // of the parameter; for optimizers that have rounds
};

// In which types an optimizer holds its state and its parameters. It computes in f32 in any case.
struct Storage {
  // f32; bf16, which is rounded to nearest, ties to even, each time it is written; or u8, which is encoded
  // then (optim/eight_bit.h).
  Dtype state = Dtype::kF32;
  // Whether parameters that are narrower than f32 have an f32 master. Without one a parameter is rounded
  // stochastically when it is written, by words that depend on seed, parameter, element and step alone.
  bool master = true;
  std::uint64_t seed = 0;
};

// Values in the scratch of a parameter that add over its parts.
struct PartSums {
  std::span<double> f64;
  std::span<float> f32;
};

// An optimizer that looks at parameters as a whole before it updates them (Adafactor, Muon) works in rounds:
// for each round r < rounds(), statistics(r, span) over all spans of a parameter in ascending order, then
// combine(r); then Optimizer::apply() to every span. The functions here are those of an elementwise
// optimizer, which has no rounds. A parameter may be in several parts, as ranks have them, each with a
// scratch of its own. statistics() of a part then goes over its spans alone, and combine() of each part is
// handed the scratch in which sums(r) have been added over all parts. A part leaves zero what is of another
// part: so each sum has one addend that is not zero, and the order of the parts changes no bit but the sign
// of a zero.
class Rounds {
 public:
  virtual ~Rounds() = default;
  virtual int rounds() const { return 0; }
  virtual bool has_rounds(const Kind&) const { return rounds() > 0; }  // else apply() is all of its update
  // The whole arrays of a parameter of this shape: some of whole_names(), in their order.
  virtual std::vector<WholeArray> whole_state(std::span<const std::size_t>) const { return {}; }
  virtual std::vector<std::string> whole_names() const { return {}; }
  // Whether statistics(round) reads the state, and the values (masters, or the parameter where there are
  // none). What it does not read need not be in memory.
  virtual bool reads_state(int /*round*/) const { return true; }
  virtual bool reads_values(int /*round*/) const { return true; }
  virtual std::size_t scratch(const Kind&) const { return 0; }    // f64 values that rounds hand on
  virtual std::size_t workspace(const Kind&) const { return 0; }  // bytes, aligned to 64
  // The largest m, n and k of the products that combine() asks for; m is 0 where it asks for none.
  virtual kernels::Product largest_product(const Kind&) const { return {}; }
  virtual double product_flops(const Kind&) const { return 0; }  // operations of an update's products
  // Where a parameter may be cut into parts: the last such element at or before `element`, on its grid.
  virtual std::size_t last_cut(const Kind&, std::size_t element) const {
    return element / kernels::kGridBlock * kernels::kGridBlock;
  }
  // What statistics(round) adds up; it is zero before the round's first span. Only kind and scratch of the
  // whole are read.
  virtual PartSums sums(int /*round*/, const Whole&) const { return {}; }
  virtual void statistics(Threads&, int, const Hyperparameters&, const Span&) const {}
  // products: may be null where there is no largest_product().
  virtual void combine(Threads&, kernels::F32Products*, int, const Hyperparameters&, const Whole&) const {}
};

// The arithmetic of a step. It knows no tier and no rank, and gives the same bits however a parameter is cut
// into spans (at multiples of kernels::kGridBlock elements), at any vector width and thread count. Only the
// bits of matrix products, whose shapes are the parameter's, depend on their library. Thread rule:
// statistics(), combine() and apply() of one parameter are called from one thread at a time, the other
// functions from any.
class Optimizer : public Rounds {
 public:
  explicit Optimizer(Settings settings, const Storage& storage = {});
  const std::string& name() const { return settings_.optimizer(); }  // "adamw"
  Json settings() const;                                             // what a checkpoint records
  // The settings of a step where they are not the optimizer's own; see Settings::for_step().
  std::shared_ptr<const Settings> for_step(const Json& given) const { return settings_.for_step(given); }
  const Storage& storage() const { return storage_; }
  // Whether it keeps f32 masters of parameters in a narrower type. An f32 parameter is its own master.
  bool keeps_master() const { return storage_.master; }
  virtual std::vector<StateArray> state() const = 0;
  // Whether a parameter has the array of state().
  virtual bool keeps(std::size_t, const Kind&) const { return true; }
  virtual void apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const = 0;
  // What apply() is, where each element's update needs that element alone: optim/device_update.h does it on a
  // GPU.
  virtual std::optional<ElementwiseUpdate> elementwise(const Hyperparameters&) const;

 protected:
  const Settings& own() const { return settings_; }
  const Settings& of(const Hyperparameters& h) const { return h.settings ? *h.settings : settings_; }

 private:
  Settings settings_;
  Storage storage_;
};

// What a user asks for. docs/optimizers.md says what each optimizer computes, and names its state.
struct OptimizerSettings {
  std::string name = "adamw";
  Json settings = Json::object();  // as Settings are given
  Storage storage = {};
};
// Throws Error(kInvalidArgument) for a name that is not known (it lists those that are), settings that are
// not valid, or not together, and a type that the state cannot have.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings,
                                          Settings::Defaults defaults = Settings::Defaults::kOwn);
std::vector<std::string> optimizer_names();

}  // namespace sluice::optim
