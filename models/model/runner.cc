#include <optional>
#include <utility>

#include "allocator/memory.h"
#include "core/error.h"
#include "models/model/executor.h"
#include "models/model/model.h"

namespace sluice::models {
namespace {

class EngineSource : public ParameterSource {
 public:
  explicit EngineSource(engine::ScheduledEngine& engine) : engine_(engine) {}
  void acquire(const engine::Access& access) override { engine_.acquire(access); }
  void release(const engine::Access& access) override { engine_.release(access); }
  void acquire_for_reading(engine::UnitId unit) override { engine_.acquire_for_reading(unit); }
  void release_from_reading(engine::UnitId unit) override { engine_.release_from_reading(unit); }
  ConstArray value(engine::ParameterId parameter) override { return engine_.parameter(parameter); }
  engine::GradientTarget gradient(engine::ParameterId parameter, int use, std::size_t micro_batch) override {
    return engine_.gradient(parameter, use, micro_batch);
  }
  engine::GradientTarget gradient_of_rows(engine::ParameterId parameter, int use, std::size_t micro_batch,
                                          std::span<const std::int32_t> rows) override {
    return engine_.gradient_of_rows(parameter, use, micro_batch, rows);
  }
  void progress() override { engine_.progress(); }
  void lend_activations(std::size_t from) override { engine_.lend(from); }
  void take_activations_back(std::size_t until) override { engine_.take_back(until); }

 private:
  engine::ScheduledEngine& engine_;
};

std::vector<Choice> planned_choices(const Model::Impl& model, const engine::Plan& plan) {
  ensure(plan.units.size() == model.units.size(), "a plan for {} units is given to a model of {}",
         plan.units.size(), model.units.size());
  std::vector<Choice> choices;
  for (engine::UnitId unit = 0; unit < model.units.size(); ++unit) {
    choices.push_back(model.choices(unit).at(plan.units[unit].choice));
  }
  return choices;
}

}  // namespace

struct Runner::State {
  State(const Model::Impl& the_model, const engine::Plan& plan, engine::ScheduledEngine& engine,
        Threads& threads, kernels::MatrixLibrary& library, allocator::Ledger& ledger, Trace* trace,
        const Place& place, const LayerRanks& layers)
      : model(the_model),
        source(engine),
        lender(engine),
        executor(model, planned_choices(model, plan), plan.group, {source, threads, library, trace, layers},
                 place) {
    ensure(executor.activation_bytes() == plan.activation_bytes &&
               executor.workspace_bytes() <= plan.workspace_bytes,
           "the plan is of another model: {} bytes of activations and {} of workspace against {} and {}",
           plan.activation_bytes, plan.workspace_bytes, executor.activation_bytes(),
           executor.workspace_bytes());
    activations = allocator::Region(ledger, allocator::Purpose::kActivation, plan.activation_bytes);
    workspace = allocator::Region(ledger, allocator::Purpose::kWorkspace, plan.workspace_bytes);
    executor.set_memory(activations.bytes(), workspace.bytes());
    engine.set_lendable(activations.bytes().first(executor.lendable_bytes()));
  }
  ~State() { lender.end_lending(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // The cache uses the part of the workspace that no program needs.
  void keep_text(std::size_t tokens) {
    const Shape& shape = model.shape;
    const std::size_t begin = round_up(executor.workspace_bytes(), kAlignment);
    const std::size_t bytes = TextCache::bytes(shape.config, shape.dtype, tokens);
    ensure(begin + bytes <= workspace.size(), "the plan gives {} bytes of workspace; {} are needed",
           workspace.size(), begin + bytes);
    executor.set_memory(activations.bytes(), workspace.bytes().first(begin));
    cache.emplace(shape.config, shape.dtype, tokens, workspace.bytes().subspan(begin, bytes));
  }

  const Model::Impl& model;
  EngineSource source;
  engine::ScheduledEngine& lender;
  Executor executor;
  allocator::Region activations, workspace;
  std::optional<TextCache> cache;
};

Runner::Runner(const Model& model, const engine::Plan& plan, engine::ScheduledEngine& engine,
               Threads& threads, kernels::MatrixLibrary& library, allocator::Ledger& ledger, Trace* trace,
               const Place& place, const LayerRanks& layers) {
  if (threads.count() > library.threads()) {
    fail(ErrorCode::kInvalidArgument,
         "{} threads are to run a model whose matrix library has {}: give both the same", threads.count(),
         library.threads());
  }
  state_ =
      std::make_unique<State>(model.impl(), plan, engine, threads, library, ledger, trace, place, layers);
}

Runner::~Runner() = default;

std::vector<double> Runner::train_step(std::span<const MicroBatch> micro_batches, const TrainStep& step,
                                       const std::function<void()>& between) {
  return state_->executor.train_step(micro_batches, step, between);
}

std::span<std::byte> Runner::idle_activations() { return state_->activations.bytes(); }

void Runner::keep_text(std::size_t tokens) { state_->keep_text(tokens); }

double Runner::evaluate(const MicroBatch& micro_batch) { return state_->executor.evaluate(micro_batch); }

void Runner::next_logits(std::span<const std::int32_t> tokens, std::span<float> logits) {
  state_->executor.next_logits(tokens, logits, state_->cache ? &*state_->cache : nullptr);
}

}  // namespace sluice::models
