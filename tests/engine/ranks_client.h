#pragma once
#include <ostream>

#include "comm/worlds.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"
#include "engine/steps/any_order_engine.h"
#include "engine/toy.h"
#include "offload/test_files.h"
#include "thrown.h"

// A model that several ranks train, each with an AnyOrderEngine of its own, and what a client does with it.
namespace sluice::engine::wrapped {

// Why a rank may not do that now.
inline std::string refusal_of(const std::function<void()>& action) {
  const Thrown thrown = thrown_by(action);
  EXPECT_EQ(thrown.code, ErrorCode::kState) << thrown.text;
  return thrown.text;
}

struct Case {
  int ranks = 2;
  std::size_t stage = 0;
  const char* place = "memory";  // null: where the plan puts each part
  std::uint64_t memory = kGiB;
  optim::OptimizerSettings optimizer = {};
  Dtype dtype = Dtype::kF32;
  std::size_t micro_batches = 0;  // of all ranks in a step, whose sums are reproducible; 0: they are not
  std::size_t counted = 0;        // of each rank in a step, whose sums are not; 0: they are not counted
  bool at_once = false;           // whether updates follow in backward
  bool each_backward = false;     // whether ranks sum gradients in each backward pass
  std::size_t blocks = 0;         // how many units there are besides
  unsigned disk_delay = 0;        // of each transfer, in microseconds
  std::chrono::milliseconds patience = comm::kUnhurried.patience;
};

// The settings on which the bits depend.
struct Kind {
  const char* optimizer;
  Dtype dtype, state;
};
inline void PrintTo(const Kind& kind, std::ostream* to) {
  *to << kind.optimizer << " " << name_of(kind.dtype) << " " << name_of(kind.state);
}
inline Case case_of(const Kind& kind) {
  Case setup;
  setup.optimizer.name = kind.optimizer;
  setup.optimizer.storage.state = kind.state;
  setup.dtype = kind.dtype;
  return setup;
}

// Units that are cut into shards, one of them a part of a parameter that spans units; one that is too small
// for it, and one that is frozen.
inline Profile profile_of(Dtype dtype, bool by_elements = false, std::size_t blocks = 0) {
  std::vector<UnitSpec> units = {{"first", {{"a", {5000, 140}, 0, 1}, {"b", {1000}, 1, 1}}}};
  const std::vector<std::size_t> table = {2050, 700};
  for (std::size_t first = 0; first < 2050 * 700; first += kSpanGrain) {
    units.push_back({"table" + std::to_string(first), {{"table", table, 0, 1}}});
    units.back().parameters[0].by_elements = by_elements;
    units.back().parameters[0].span_first = first;
    units.back().parameters[0].span_elements = std::min(kSpanGrain, 2050 * 700 - first);
  }
  units.push_back({"small", {{"gain", {1000}, 1, 1}}});
  units.push_back({"frozen", {{"fixed", {5000, 120}, 0, 1}}});
  units.back().trainable = false;
  units.push_back({"last", {{"c", {5000, 120}, 0, 1}, {"d", {}, 1, 1}}});
  for (std::size_t block = 0; block < blocks; ++block)
    units.push_back({"block" + std::to_string(block), {{"w" + std::to_string(block), {5000, 120}, 0, 1}}});
  for (UnitSpec& unit : units) unit.dtype = dtype;
  return any_order_profile(units, 2);
}
inline constexpr ParameterId kA = 0, kB = 1, kGain = 4, kC = 6, kD = 7;
inline constexpr UnitId kFirst = 0, kSmall = 3, kFrozen = 4, kLast = 5;

// One rank, or the one that trains alone.
class Rank {
 public:
  Rank(const Case& setup, comm::Communicator* communicator)
      : setup_(setup),
        communicator_(communicator),
        optimizer_(optim::make_optimizer(setup.optimizer)),
        profile_(profile_for(setup)),
        plan_(plan_in(setup.memory)),
        disk_(offload::alone(
                  offload::make_faulty_file(*memory_file_, {.delay_microseconds = setup.disk_delay})),
              ledger_),
        products_(kernels::load_matrix_library(1)),
        engine(profile_, plan_, *optimizer_,
               {threads_, ledger_, &disk_, nullptr, products_.get(), communicator}) {
    for (UnitId unit = 0; unit < layout().units().size(); ++unit) engine.load(unit, toy::start_values());
  }

  const Layout& layout() const { return engine.layout(); }
  const optim::Optimizer& optimizer() const { return *optimizer_; }
  const Plan& plan() const { return plan_; }
  const allocator::Ledger& ledger() const { return ledger_; }
  Plan plan_in(std::uint64_t memory) const {
    return make_plan(profile_, *optimizer_, {memory, kGiB, 0}, request(), {});
  }
  // The least that any plan takes, to a MiB.
  std::uint64_t least_memory() const {
    std::uint64_t few = 0, enough = kGiB;
    while (enough - few > kMiB) {
      const std::uint64_t memory = few + (enough - few) / 2;
      try {
        (void)plan_in(memory);
        enough = memory;
      } catch (const Error&) {
        few = memory;
      }
    }
    return enough;
  }
  void limit_memory(std::uint64_t bytes) { ledger_.set_budget(allocator::Tier::kHost, bytes); }
  std::uint64_t received() const { return communicator_->counters().received; }  // bytes of payload
  comm::Communicator* communicator() const { return communicator_; }
  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  std::size_t elements(ParameterId p) const { return layout().location(p).elements; }
  static StepSettings settings(double clip = 0, bool keep = false) {
    StepSettings settings = toy::settings(0.01, 0.1, clip);
    settings.keep_gradients = keep;
    return settings;
  }

  // A gradient that depends on the values, so that wrong ones show.
  std::vector<float> gradient(ParameterId p, int step, int micro_batch) const {
    return gradient(p, step, micro_batch, setup_.micro_batches > 0 ? 0 : rank());
  }
  std::vector<float> gradient(ParameterId p, int step, int micro_batch, int rank) const {
    const auto of_rank = static_cast<std::size_t>(rank);
    const ConstArray values = engine.parameter(p);
    std::vector<float> all(elements(p));
    const std::size_t first = p * 7 + of_rank * 131 + static_cast<std::size_t>(step * 17 + micro_batch * 57);
    test::mix_with_noise(all.size(), values, {0.25f, 0.01f, -0.4f}, first, false, all.data());
    return all;
  }
  void add(ParameterId p, int step = 0, int micro_batch = 0) {
    const UnitId unit = layout().location(p).unit;
    engine.acquire(unit, Hold::kGradient);
    const std::vector<float> values = gradient(p, step, micro_batch);
    engine.add_gradient(p, {values.data(), Dtype::kF32});
    engine.release(unit);
  }
  void add_constant(ParameterId p, float value) {
    const UnitId unit = layout().location(p).unit;
    const std::vector<float> values(elements(p), value);
    engine.acquire(unit, Hold::kGradientOnly);
    engine.add_gradient(p, {values.data(), Dtype::kF32});
    engine.release(unit);
  }
  void add_all(int step, int micro_batch = 0) {
    for (UnitId unit = 0; unit < layout().units().size(); ++unit) {
      engine.acquire(unit, Hold::kRead);
      engine.release(unit);
    }
    for (ParameterId p = static_cast<ParameterId>(layout().parameters()); p-- > 0;)
      if (layout().trainable(layout().location(p).unit)) add(p, step, micro_batch);
  }
  std::vector<float> read(ParameterId p) {
    std::vector<float> values(elements(p));
    engine.read_gradient(p, {values.data(), Dtype::kF32});
    return values;
  }

  // This rank's parameters alone.
  std::vector<std::vector<float>> values() {
    std::vector<std::vector<float>> all(layout().parameters());
    UnitSink sink;
    sink.values = [&](ParameterId p, std::size_t first, std::span<const float> part) {
      ASSERT_EQ(all[p].size(), first);
      all[p].insert(all[p].end(), part.begin(), part.end());
    };
    for (UnitId unit = 0; unit < layout().units().size(); ++unit) engine.save(unit, sink);
    return all;
  }
  // Everything; of rank 0 alone. Collective where state is partitioned.
  toy::Outcome save() {
    toy::Outcome outcome;
    for (UnitId unit = 0; unit < layout().units().size(); ++unit)
      engine.save(unit, rank() == 0 ? toy::collect(outcome, optimizer_->state()) : UnitSink{});
    return outcome;
  }

  // Adds the gradients of the micro-batches in which a parameter has one; numbers are of all ranks.
  void add_reproducibly(int step, const std::function<bool(ParameterId p, int number)>& has) {
    const auto count = static_cast<int>(profile_.micro_batches);
    for (int number = rank() * count; number < (rank() + 1) * count; ++number) {
      for (ParameterId p = static_cast<ParameterId>(layout().parameters()); p-- > 0;)
        if (layout().trainable(layout().location(p).unit) && has(p, number)) add(p, step, number);
      engine.end_micro_batch();
    }
  }

 private:
  static Profile profile_for(const Case& setup) {
    Profile profile = profile_of(setup.dtype, setup.optimizer.name == "muon", setup.blocks);
    if (setup.micro_batches > 0)
      profile.micro_batches = setup.micro_batches / static_cast<std::size_t>(setup.ranks);
    if (setup.counted > 0) profile.micro_batches = setup.counted;
    profile.ends_micro_batches = setup.micro_batches + setup.counted > 0 || setup.at_once;
    return profile;
  }
  PlanRequest request() const {
    PlanRequest request;
    if (communicator_ != nullptr) request.ranks = rank_of(*communicator_);
    request.stage = setup_.stage;
    request.chunk_elements = kChunkGrain;
    request.reproducible = setup_.micro_batches > 0;
    if (request.reproducible || setup_.counted > 0) request.group = 1;
    request.clip = !setup_.at_once;
    request.sums_each_backward = setup_.each_backward;
    if (setup_.place != nullptr) request.places = toy::places(setup_.place);
    return request;
  }
  const Case setup_;
  comm::Communicator* const communicator_;
  const std::unique_ptr<optim::Optimizer> optimizer_;
  const Profile profile_;
  const Plan plan_;
  Threads threads_{1};
  allocator::Ledger ledger_;
  const std::unique_ptr<offload::File> memory_file_ = offload::make_memory_file("disk");
  offload::RecordStore disk_;
  const std::unique_ptr<kernels::F32Products> products_;

 public:
  AnyOrderEngine engine;
};

// Calls body for every rank at once; what one throws is a failure.
inline void run(const Case& setup, const std::function<void(Rank& rank)>& body) {
  comm::run_communicators(comm::World::kThreads, setup.ranks,
                          [&](comm::Communicator& communicator) {
                            try {
                              Rank rank(setup, &communicator);
                              body(rank);
                              communicator.barrier(
                                  1, "the end of a test");  // nobody needs another one's shards any more
                            } catch (const std::exception& error) {
                              communicator.fail(error.what());
                              throw;
                            }
                          },
                          {comm::kUnhurried.silence, setup.patience});
}

// The same, also of one rank that trains alone.
inline void run_any(const Case& setup, const std::function<void(Rank& rank)>& body) {
  if (setup.ranks > 1) return run(setup, body);
  Rank rank(setup, nullptr);
  body(rank);
}

// Returns rank 0's values and norms when each rank has trained; train() returns the norms.
inline toy::Outcome outcome_of(const Case& setup,
                               const std::function<std::vector<double>(Rank& rank)>& train) {
  toy::Outcome outcome;
  const auto body = [&](Rank& rank) {
    const std::vector<double> norms = train(rank);
    toy::Outcome saved = rank.save();
    saved.norms = norms;
    if (rank.rank() == 0) outcome = std::move(saved);
  };
  run_any(setup, body);
  return outcome;
}

}  // namespace sluice::engine::wrapped
