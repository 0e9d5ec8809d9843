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
#include "optim/eight_bit.h"

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

// What an optimizer averages by. Each reads those that it has.
struct Coefficients {
  double beta1 = 0, beta2 = 0, epsilon = 0, momentum = 0;
};

// What one step applies to a group of parameters; a copy is taken at step().
struct Hyperparameters {
  double learning_rate = 0;
  double weight_decay = 0;
  double gradient_factor = 1;  // clipping and unscaling: gradients are multiplied by it first
  std::uint64_t step = 1;      // 1 for the first step that is not skipped
  double clip_value = 0;  // each element of a gradient is then brought between -clip_value and it; 0: none
  std::optional<Coefficients> coefficients = {};  // nothing: the optimizer's own
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

// The arithmetic of a step. Works in rounds: for each round r < rounds(), statistics(r, span) over all spans
// of a parameter in ascending order, then combine(r); then apply() to every span. An elementwise optimizer
// has no rounds. Knows no tier and no rank. Gives the same bits however a parameter is cut into spans
// (at multiples of kSpanGrain elements), at any vector width and thread count; but for matrix products, whose
// shapes are those of the parameter, and whose bits are their library's.
// Thread rule: statistics(), combine() and apply() of one parameter from one thread at a time; the rest from
// any.
class Optimizer {
 public:
  static constexpr std::size_t kSpanGrain = 1024;
  virtual ~Optimizer() = default;
  virtual std::string name() const = 0;  // "adamw"
  virtual Json settings() const = 0;     // what a checkpoint records
  // Throws Error(kInvalidArgument) where one that it has is out of its range, or would need other state.
  virtual void check(const Coefficients&) const {}
  virtual std::vector<StateArray> state() const = 0;
  // Whether it keeps f32 masters of parameters in a narrower type. An f32 parameter is its own.
  virtual bool keeps_master() const { return true; }
  // Of a parameter of this shape; each has some of whole_names(), in their order.
  virtual std::vector<WholeArray> whole_state(std::span<const std::size_t>) const { return {}; }
  virtual std::vector<std::string> whole_names() const { return {}; }
  // Whether a parameter has the array of state().
  virtual bool keeps(std::size_t, const Kind&) const { return true; }
  virtual int rounds() const { return 0; }
  virtual bool has_rounds(const Kind&) const { return rounds() > 0; }  // else the parameter is only applied
  // Whether statistics(round) looks at state, and whether at values (masters, or where there are none the
  // parameter): what it does not look at need not be there for it.
  virtual bool reads_state(int /*round*/) const { return true; }
  virtual bool reads_values(int /*round*/) const { return true; }
  virtual std::size_t scratch(const Kind&) const { return 0; }    // f64 values, for the rounds
  virtual std::size_t workspace(const Kind&) const { return 0; }  // bytes, aligned to 64
  // Of the products that combine() asks for, the most in each of m, n and k; m 0: there are none.
  virtual kernels::Product largest_product(const Kind&) const { return {}; }
  virtual double product_flops(const Kind&) const { return 0; }  // of an update
  virtual void statistics(Threads&, int, const Hyperparameters&, const Span&) const {}
  // products: may be null where there is no largest_product().
  virtual void combine(Threads&, kernels::F32Products*, int, const Hyperparameters&, const Whole&) const {}
  virtual void apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const = 0;
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

struct AdamSettings {
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
  Storage storage = {};
};
// Loshchilov, Hutter 2019, algorithm 2, with torch.optim.AdamW's arithmetic: decay first (p *= 1 - lr * wd),
// then p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon). State "exp_avg", "exp_avg_sq".
std::unique_ptr<Optimizer> make_adamw(const AdamSettings& settings);
// Kingma, Ba 2015, algorithm 1, as torch.optim.Adam: the same, but that the decay goes into the gradient
// (g += wd * p).
std::unique_ptr<Optimizer> make_adam(const AdamSettings& settings);

struct LionSettings {
  double beta1 = 0.9, beta2 = 0.99;
  Storage storage = {};
};
// Chen et al. 2023, algorithm 2: p -= lr * (sign(beta1 m + (1 - beta1) g) + wd * p), then
// m = beta2 m + (1 - beta2) g. State "exp_avg".
std::unique_ptr<Optimizer> make_lion(const LionSettings& settings);

struct SgdSettings {
  double momentum = 0;
  bool nesterov = false;
  Storage storage = {};
};
// As torch.optim.SGD with dampening 0 (Sutskever et al. 2013): g += wd * p; b = momentum * b + g;
// p -= lr * (nesterov ? g + momentum * b : b). State "momentum_buffer"; none where momentum is 0, and then no
// type of it may be asked for.
std::unique_ptr<Optimizer> make_sgd(const SgdSettings& settings);

struct AdafactorSettings {
  double beta1 = 0;  // 0: no momentum, and no array of it
  double epsilon1 = 1e-30, epsilon2 = 1e-3;
  double clip_threshold = 1;    // d: of the update's root mean square
  bool relative_step = false;   // the learning rate is a factor of min(1e-2, 1 / sqrt(t))
  bool scale_parameter = true;  // and of max(epsilon2, the parameter's root mean square)
  Storage storage = {};
};
// Shazeer, Stern 2018, algorithms 4 and 5, with beta2 = 1 - t^-0.8, as transformers' Adafactor: of the last
// two dimensions of a parameter the second moment is kept by rows and columns, of a vector by elements. The
// weight decay goes into the parameter (p -= rate * wd * p, rate as scaled). State "exp_avg" with momentum;
// as a whole "exp_avg_sq_row", "exp_avg_sq_col", or "exp_avg_sq".
std::unique_ptr<Optimizer> make_adafactor(const AdafactorSettings& settings);

// How Muon's step depends on the shape of a matrix of R rows and C columns.
enum class MuonScale : std::uint8_t {
  kOriginal,       // sqrt(max(1, R / C))
  kMatchRmsAdamw,  // 0.2 sqrt(max(R, C)): elements change as by AdamW, whose learning rates do
};
std::string_view name_of(MuonScale scale);  // "original", "match_rms_adamw", as torch.optim.Muon has them
std::vector<std::string> muon_scale_names();

struct MuonSettings {
  double momentum = 0.95;
  bool nesterov = true;
  MuonScale scale = MuonScale::kOriginal;
  AdamSettings rest = {};  // its storage is that of all
};
// Jordan et al. 2024 as torch.optim.Muon, the iteration in f32, of parameters of two dimensions: m += (1 -
// momentum) (g - m); p *= 1 - lr * wd; p -= lr * scale * NewtonSchulz(nesterov ? m + (1 - momentum) (g - m) :
// m). All others, and those that are by elements, are AdamW's. State "momentum_buffer" of matrices, "exp_avg"
// and "exp_avg_sq" of the rest.
std::unique_ptr<Optimizer> make_muon(const MuonSettings& settings);

// What a user asks for.
struct OptimizerSettings {
  std::string name = "adamw";
  // Nothing: the optimizer's own.
  std::optional<double> beta1 = {}, beta2 = {}, epsilon = {}, momentum = {};
  std::optional<bool> nesterov = {};
  Storage storage = {};
  // Of adafactor.
  std::optional<double> epsilon2 = {}, clip_threshold = {};
  std::optional<bool> scale_parameter = {};
  bool relative_step = false;
  std::optional<std::string> muon_scale = {};  // a name of muon_scale_names()
  void set(const Coefficients& coefficients);  // those that the named optimizer has
};
// Throws Error(kInvalidArgument) for a name that is not known (it lists those that are), a setting that the
// optimizer does not have, and one out of its range.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings);
std::vector<std::string> optimizer_names();

}  // namespace sluice::optim
