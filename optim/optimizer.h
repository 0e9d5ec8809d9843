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

// Where a part of such an array lies.
struct StatePart {
  Array values;             // in its type
  float* scales = nullptr;  // of codes: the first is that of the part's first element
};

// State of a parameter as a whole: f32, of a shape of its own; always in memory.
struct WholeArray {
  std::string name;  // as transformers names it: "exp_avg_sq_row"
  std::vector<std::size_t> shape;
  std::size_t elements() const;
};

// What an optimizer is told of a parameter.
struct Kind {
  std::span<const std::size_t> shape;
  bool by_elements = false;  // one of matrices (Muon) leaves it to AdamW: embeddings, heads
};

// What the rounds of an update are about: one parameter.
struct Whole {
  Kind kind;
  float* state = nullptr;          // its whole arrays, one after another
  double* scratch = nullptr;       // scratch(kind) values, zero before the first round, until it was applied
  std::byte* workspace = nullptr;  // workspace(kind) bytes, for a combine() alone
};

// The names under which users know the types of state: "f32", "bf16", "8bit".
std::string_view state_type_name(Dtype type);
std::optional<Dtype> state_type_from_name(std::string_view name);
std::vector<std::string> state_type_names();

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

// How an optimizer holds what it works on. The arithmetic is f32 whatever it is.
struct Storage {
  // f32; bf16, rounded to nearest, ties to even, each time it is written; or u8: encoded then
  // (optim/eight_bit.h).
  Dtype state = Dtype::kF32;
  // Of parameters narrower than f32. Without one a parameter is rounded stochastically when it is written, by
  // words that depend on seed, the parameter, its element and its step alone.
  bool master = true;
  std::uint64_t seed = 0;
};

// Values in the scratch of a parameter that add over its parts.
struct PartSums {
  std::span<double> f64;
  std::span<float> f32;
};

// What an optimizer has that looks at parameters as a whole before it updates them (Adafactor, Muon). It
// works in rounds: for each round r < rounds(), statistics(r, span) over all spans of a parameter in
// ascending order, then combine(r); then Optimizer::apply() to every span. What stands here is an elementwise
// optimizer's, which has none.
// A parameter may be in several parts, as ranks have them, each with a scratch of its own. statistics() of a
// part then goes over its spans alone, and combine() of each part is handed the scratch in which sums(r) have
// been added over all parts. A part leaves zero what is of another part: so each sum has one addend that is
// not zero, and the order of the parts changes no bit.
class Rounds {
 public:
  virtual ~Rounds() = default;
  virtual int rounds() const { return 0; }
  virtual bool has_rounds(const Kind&) const { return rounds() > 0; }  // else the parameter is only applied
  // Of a parameter of this shape; each has some of whole_names(), in their order.
  virtual std::vector<WholeArray> whole_state(std::span<const std::size_t>) const { return {}; }
  virtual std::vector<std::string> whole_names() const { return {}; }
  // Whether statistics(round) looks at state, and whether at values (masters, or where there are none the
  // parameter): what it does not look at need not be there for it.
  virtual bool reads_state(int /*round*/) const { return true; }
  virtual bool reads_values(int /*round*/) const { return true; }
  virtual std::size_t scratch(const Kind&) const { return 0; }    // f64 values, for the rounds
  virtual std::size_t workspace(const Kind&) const { return 0; }  // bytes, aligned to 64
  // Of the products that combine() asks for, the most in each of m, n and k; m 0: there are none.
  virtual kernels::Product largest_product(const Kind&) const { return {}; }
  virtual double product_flops(const Kind&) const { return 0; }  // of an update
  // Where a parameter may be cut into parts: the last such element at or before `element`, on its grid.
  virtual std::size_t last_cut(const Kind&, std::size_t element) const {
    return element / kernels::kGridBlock * kernels::kGridBlock;
  }
  // Of a round; they are zero before its first span. The whole needs no more than kind and scratch.
  virtual PartSums sums(int /*round*/, const Whole&) const { return {}; }
  virtual void statistics(Threads&, int, const Hyperparameters&, const Span&) const {}
  // products: may be null where there is no largest_product().
  virtual void combine(Threads&, kernels::F32Products*, int, const Hyperparameters&, const Whole&) const {}
};

// The arithmetic of a step. Knows no tier and no rank. Gives the same bits however a parameter is cut into
// spans (at multiples of kernels::kGridBlock elements), at any vector width and thread count; but for matrix
// products, whose shapes are those of the parameter, and whose bits are their library's. Thread rule:
// statistics(), combine() and apply() of one parameter from one thread at a time; the rest from any.
class Optimizer : public Rounds {
 public:
  explicit Optimizer(Settings settings, const Storage& storage = {});
  const std::string& name() const { return settings_.optimizer(); }  // "adamw"
  Json settings() const;                                             // what a checkpoint records
  // Those of a step that has others; see Settings::for_step().
  std::shared_ptr<const Settings> for_step(const Json& given) const { return settings_.for_step(given); }
  const Storage& storage() const { return storage_; }
  // Whether it keeps f32 masters of parameters in a narrower type. An f32 parameter is its own.
  bool keeps_master() const { return storage_.master; }
  virtual std::vector<StateArray> state() const = 0;
  // Whether a parameter has the array of state().
  virtual bool keeps(std::size_t, const Kind&) const { return true; }
  virtual void apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const = 0;

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
