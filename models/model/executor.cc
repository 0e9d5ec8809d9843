#include "models/model/executor.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "core/error.h"
#include "kernels/loss.h"

namespace sluice::models {
namespace {

std::size_t counted(std::span<const std::int32_t> targets) {
  return static_cast<std::size_t>(
      std::ranges::count_if(targets, [](std::int32_t target) { return target != kernels::kIgnoredTarget; }));
}

std::string pass_name(Pass::Kind kind) {
  switch (kind) {
    case Pass::Kind::kForward:
      return "forward ";
    case Pass::Kind::kHead:
      return "loss ";
    case Pass::Kind::kWeights:
      return "weights ";
    default:
      return "backward ";
  }
}

// Returns the action that a pass belongs to; nothing for a pass at the end of a step.
std::optional<engine::Action::Kind> action_of(Pass::Kind kind) {
  switch (kind) {
    case Pass::Kind::kForward:
      return engine::Action::Kind::kForward;
    case Pass::Kind::kWeights:
      return engine::Action::Kind::kWeights;
    case Pass::Kind::kAdd:
      return std::nullopt;
    default:
      return engine::Action::Kind::kBackward;
  }
}

}  // namespace

Executor::Executor(const Model::Impl& model, std::vector<Choice> choices, std::size_t group,
                   const Resources& resources, const Place& place)
    : model_(model),
      splits_backward_(engine::splits_backward(place.pipeline.order)),
      choices_(std::move(choices)),
      passes_(model.passes(splits_backward_)),
      group_(group),
      resources_(resources),
      place_(place),
      buffers_(engine::buffers_of(place.pipeline, place.section)),
      held_(engine::items_held(place.pipeline, place.section)) {
  ensure(model.has_embedding() == place.is_first() && model.has_head() == place.is_last(),
         "section {} of {} is run with units that are not its own", place.section, place.pipeline.sections);
  ensure((model.shape.cut.ranks == 1 || resources_.layers.tensor != nullptr) &&
             (model.shape.sequence.ranks == 1 || resources_.layers.sequence != nullptr),
         "layers are cut over {} x {} ranks, and the others are not known", model.shape.cut.ranks,
         model.shape.sequence.ranks);
  ensure(model.chunks().size() == place.pipeline.chunks, "{} chunks of a section are run as {}",
         model.chunks().size(), place.pipeline.chunks);
  kernels::ProductSurvey products(resources_.library);
  std::map<std::pair<const Graph*, std::vector<bool>>, std::shared_ptr<const UnitProgram>> compiled;
  programs_.resize(model_.first());
  layout_.units.resize(model_.first());
  for (engine::UnitId unit = model_.first(); unit < model_.units.size(); ++unit) {
    const Graph& graph = model_.graph(unit);
    std::shared_ptr<const UnitProgram>& known = compiled[{&graph, choices_[unit].dropped}];
    if (!known)
      known = std::make_shared<UnitProgram>(compile(graph, choices_[unit], products, splits_backward_));
    programs_.push_back(known);
    const UnitProgram& program = *known;
    const std::size_t held = held_[model_.chunk_of(unit)];
    workspace_bytes_ = std::max(workspace_bytes_, program.workspace_bytes());
    ActivationLayout::Offsets own;
    own.input_bytes = graph.input() ? graph.values()[*graph.input()].bytes() : 0;
    own.kept_bytes = program.kept_bytes;
    own.kept_for_weights_bytes = program.kept_for_weights_bytes;
    own.left_for_weights_bytes = program.left_for_weights_bytes;
    const auto place_next = [&](std::size_t items, std::size_t each) {
      return std::exchange(layout_.bytes, layout_.bytes + items * group_ * each);
    };
    own.input = place_next(held, own.input_bytes);
    own.kept = place_next(held, own.kept_bytes);
    own.kept_for_weights = place_next(buffers_.kept_for_weights, own.kept_for_weights_bytes);
    own.left_for_weights = place_next(buffers_.left_for_weights, own.left_for_weights_bytes);
    layout_.units.push_back(own);
  }
  layout_.border = layout_.bytes;
  layout_.border_bytes = layout_.units.back().input_bytes;
  layout_.output = layout_.border + buffers_.borders * group_ * layout_.border_bytes;
  layout_.bytes = layout_.output + buffers_.outputs * group_ * layout_.border_bytes;
}

void Executor::set_memory(std::span<std::byte> activations, std::span<std::byte> workspace) {
  ensure(activations.size() >= layout_.bytes && workspace.size() >= workspace_bytes_,
         "the plan gives {} and {} bytes for activations and workspace; {} and {} are needed",
         activations.size(), workspace.size(), layout_.bytes, workspace_bytes_);
  activations_ = activations;
  workspace_ = workspace;
}

Execution Executor::execution(engine::UnitId unit, std::size_t item, std::size_t place,
                              const MicroBatch& micro_batch) {
  const std::size_t chunk = model_.chunk_of(unit), held = held_[chunk];
  const auto at = [&](std::size_t first, std::size_t slot, std::size_t bytes) {
    return activations_.data() + first + (slot * group_ + place) * bytes;
  };
  const auto input = [&](engine::UnitId of) {
    return at(layout_.units[of].input, item % held, layout_.units[of].input_bytes);
  };
  const auto border = [&](std::size_t first, std::size_t buffers, engine::Action::Kind pass) {
    return at(first, engine::number_of(place_.pipeline, {pass, item, chunk}) % buffers, layout_.border_bytes);
  };
  const ActivationLayout::Offsets& own = layout_.units[unit];
  Execution result{resources_.threads, resources_.library, resources_.source, model_.parameter_ids[unit]};
  const auto area = [&](Area which) -> std::byte*& { return result.areas[static_cast<std::size_t>(which)]; };
  area(Area::kInput) = input(unit);
  if (unit + 1 < model_.chunks()[chunk].end)
    area(Area::kOutput) = input(unit + 1);
  else if (!place_.ends(chunk))
    area(Area::kOutput) = border(layout_.output, buffers_.outputs, engine::Action::Kind::kForward);
  area(Area::kKept) = at(own.kept, item % held, own.kept_bytes);
  if (splits_backward_) {
    area(Area::kKeptForWeights) =
        at(own.kept_for_weights, item % buffers_.kept_for_weights, own.kept_for_weights_bytes);
    area(Area::kLeftForWeights) =
        at(own.left_for_weights, item % buffers_.left_for_weights, own.left_for_weights_bytes);
  }
  area(Area::kWorkspace) = workspace_.data();
  area(Area::kBorder) = border(layout_.border, buffers_.borders, engine::Action::Kind::kBackward);
  result.tokens = micro_batch.tokens;
  result.targets = micro_batch.targets;
  result.first_sample = micro_batch.first_sample;
  result.first_op = model_.first_op(unit);
  result.layers = resources_.layers;
  return result;
}

void Executor::run(engine::UnitId unit, const Program& program, Execution& execution,
                   const Between& between) {
  execute(model_.graph(unit), program, execution, [&](std::size_t step) {
    resources_.source.progress();
    if (between) between();
    if (observer_) observer_(program, step, workspace_);
  });
}

// Takes back the lent memory that the pass writes: in forward the kept values and the next unit's input, from
// the last unit on everything.
void Executor::claim_activations(const Pass& pass) const {
  if (pass.kind == Pass::Kind::kBackward || pass.kind == Pass::Kind::kWeights) return;
  const bool more = pass.kind == Pass::Kind::kForward && pass.unit < model_.last();
  resources_.source.take_activations_back(more ? layout_.units[pass.unit + 1].kept : layout_.border);
}

// After the last item's last pass through a unit, its activations and those of all later units are unused.
void Executor::lend_activations(const Pass& pass) const {
  const bool is_last =
      splits_backward_ ? pass.kind == Pass::Kind::kWeights : pass.kind != Pass::Kind::kForward;
  if (is_last) resources_.source.lend_activations(layout_.units[pass.unit].input);
}

void Executor::run_pass(const Pass& pass, std::size_t item, Step& step) {
  const std::size_t first = item * group_;
  const auto group = step.micro_batches.subspan(first, std::min(group_, step.micro_batches.size() - first));
  claim_activations(pass);
  for (const engine::Access& access : pass.accesses) resources_.source.acquire(access);
  {
    const TraceScope scope(resources_.trace, Trace::Lane::kCompute,
                           pass_name(pass.kind) + model_.units[pass.unit].name +
                               (place_.pipeline.sections > 1 ? fmt::format(", item {}", item) : ""));
    for (std::size_t place = 0; place < group.size(); ++place) {
      Execution one = execution(pass.unit, item, place, group[place]);
      one.micro_batch = first + place;
      one.seed = step.key.seed;
      one.step = step.key.step;
      one.gradient_scale = step.key.gradient_scale;
      const UnitProgram& programs = *programs_[pass.unit];
      const Program& program = pass.kind == Pass::Kind::kForward   ? programs.forward
                               : pass.kind == Pass::Kind::kWeights ? programs.weights
                                                                   : programs.backward;
      run(pass.unit, program, one, step.between);
      step.losses[one.micro_batch] += one.loss;
    }
  }
  for (const engine::Access& access : pass.accesses) resources_.source.release(access);
  if (item + 1 == step.items) lend_activations(pass);
}

std::span<std::byte> Executor::message(const engine::Action& action, std::size_t micro_batches) const {
  using Kind = engine::Action::Kind;
  const auto of = [&](std::size_t first, std::size_t number, std::size_t buffers) {
    return activations_.subspan(first + number % buffers * group_ * layout_.border_bytes,
                                micro_batches * layout_.border_bytes);
  };
  const auto number = [&](Kind pass) {
    return engine::number_of(place_.pipeline, {pass, action.item, action.chunk});
  };
  if (action.kind == Kind::kReceiveInput)
    return of(layout_.units[first_of(action.chunk)].input, action.item, held_[action.chunk]);
  if (action.kind == Kind::kSendOutput) return of(layout_.output, number(Kind::kForward), buffers_.outputs);
  return of(layout_.border, number(Kind::kBackward), buffers_.borders);
}

void Executor::begin(const engine::Action& action, std::size_t micro_batches,
                     std::vector<engine::Action>& under_way) {
  if (action.kind == engine::Action::Kind::kReceiveInput)
    resources_.source.take_activations_back(layout_.units[first_of(action.chunk)].kept);
  place_.neighbours->begin(action, message(action, micro_batches));
  under_way.push_back(action);
}

void Executor::await(const engine::Action& action, std::vector<engine::Action>& under_way) {
  place_.neighbours->await(action);
  std::erase(under_way, action);
}

void Executor::hold(const Pass& pass) {
  for (const engine::Access& access : pass.accesses) resources_.source.acquire(access);
  for (const engine::Access& access : pass.accesses) resources_.source.release(access);
}

void Executor::act(const engine::Action& action, const engine::Pipeline& pipeline, Step& step) {
  using Kind = engine::Action::Kind;
  for (const engine::Action& awaited : engine::awaited_by(pipeline, place_.section, action))
    await(awaited, step.under_way);
  const bool is_pass =
      action.kind == Kind::kForward || action.kind == Kind::kBackward || action.kind == Kind::kWeights;
  if (!is_pass) {
    const std::size_t first = action.item * group_;
    return begin(action, std::min(group_, step.micro_batches.size() - first), step.under_way);
  }
  for (const Pass& pass : passes_)
    if (pass.chunk == action.chunk && action_of(pass.kind) == action.kind) run_pass(pass, action.item, step);
}

std::uint64_t counted_targets(std::span<const MicroBatch> micro_batches) {
  std::uint64_t targets = 0;
  for (const MicroBatch& micro_batch : micro_batches) targets += counted(micro_batch.targets);
  return targets;
}

double loss_of_step(std::span<const double> losses, std::uint64_t targets) {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(targets);
}

std::vector<double> Executor::train_step(std::span<const MicroBatch> micro_batches, const TrainStep& step,
                                         const Between& between) {
  for (const MicroBatch& micro_batch : micro_batches) check(micro_batch);
  if (step.targets == 0)
    fail(ErrorCode::kInvalidArgument, "no target of this step counts: there is nothing to learn from");
  const auto targets = static_cast<double>(step.targets);
  engine::Pipeline pipeline = place_.pipeline;
  pipeline.items = divide_up(micro_batches.size(), group_);
  ensure(pipeline.sections == 1 || pipeline.items == place_.pipeline.items,
         "a step of {} items is run in a pipeline of {}", pipeline.items, place_.pipeline.items);
  Step own{micro_batches,
           {step.seed, step.number, static_cast<float>(step.loss_scale / targets)},
           between,
           std::vector<double>(micro_batches.size()),
           {},
           pipeline.items};
  for (const engine::Action& action : engine::actions_of(pipeline, place_.section))
    act(action, pipeline, own);
  for (const Pass& pass : passes_)
    if (pass.kind == Pass::Kind::kAdd) hold(pass);
  while (!own.under_way.empty()) await(engine::Action(own.under_way.front()), own.under_way);
  return std::move(own.losses);
}

double Executor::run_forward(const MicroBatch& micro_batch, std::span<float> logits, std::size_t logits_row,
                             const Text& text) {
  double loss = 0;
  resources_.source.take_activations_back(activations_.size());  // another shape has another layout
  std::vector<engine::Action> under_way;
  const auto pass_on = [&](engine::Action::Kind kind, std::size_t chunk) {
    begin({kind, 0, chunk}, 1, under_way);
    await({kind, 0, chunk}, under_way);
  };
  for (const Pass& pass : passes_) {
    if (pass.kind != Pass::Kind::kForward && pass.kind != Pass::Kind::kHead) break;
    const engine::UnitRange& chunk = model_.chunks()[pass.chunk];
    if (pass.unit == chunk.first && !place_.begins(pass.chunk))
      pass_on(engine::Action::Kind::kReceiveInput, pass.chunk);
    for (const engine::Access& access : pass.accesses) resources_.source.acquire_for_reading(access.unit);
    Execution one = execution(pass.unit, 0, 0, micro_batch);
    one.training = false;
    one.logits = logits;
    one.logits_row = logits_row;
    one.first_position = text.first_position;
    if (text.cache != nullptr) one.cache = text.cache->unit(pass.unit, text.rows);
    run(pass.unit, programs_[pass.unit]->forward, one, {});
    loss += one.loss;
    for (const engine::Access& access : pass.accesses) resources_.source.release_from_reading(access.unit);
    if (pass.unit + 1 == chunk.end && !place_.ends(pass.chunk))
      pass_on(engine::Action::Kind::kSendOutput, pass.chunk);
  }
  return loss;
}

double Executor::evaluate(const MicroBatch& micro_batch) {
  check(micro_batch);
  if (counted(micro_batch.targets) == 0)
    fail(ErrorCode::kInvalidArgument, "no target of this micro-batch counts: it has no loss");
  return run_forward(micro_batch, {}, 0, {});
}

// Attention is causal: tokens do not attend to the padding after them, so its contents do not matter.
void Executor::padded_logits(std::span<const std::int32_t> tokens, std::span<float> logits,
                             TextCache* cache) {
  std::vector<std::int32_t> padded(model_.shape.rows(), 0);
  std::ranges::copy(tokens, padded.begin());
  const bool stored = cache != nullptr && model_.shape.batch == 1 && cache->has_room_for(tokens);
  if (cache != nullptr) cache->begin();
  run_forward({padded, {}, 0}, logits, tokens.size() - 1, {stored ? cache : nullptr, 0, tokens.size()});
  if (stored) cache->store(tokens);
}

// Computes the whole text, in the smallest shape that it fits into.
void Executor::whole_logits(std::span<const std::int32_t> tokens, std::span<float> logits, TextCache* cache) {
  constexpr std::size_t kGrain = 64;
  Shape shape = model_.shape;
  shape.batch = 1;
  shape.length = std::min(shape.length, round_up(tokens.size(), kGrain));
  const Model::Impl small(shape, model_.recompute);
  Executor executor(small, choices_, 1, resources_);
  if (executor.activation_bytes() > activations_.size() || executor.workspace_bytes() > workspace_.size()) {
    return padded_logits(tokens, logits, cache);
  }
  executor.set_memory(activations_, workspace_);
  executor.padded_logits(tokens, logits, cache);
}

Executor* Executor::one_token() {
  if (!one_token_) {
    Shape shape = model_.shape;
    shape.batch = shape.length = 1;
    one_token_model_ = std::make_unique<const Model::Impl>(shape, model_.recompute);
    one_token_ = std::make_unique<Executor>(*one_token_model_, choices_, 1, resources_);
    if (one_token_->activation_bytes() <= activations_.size() &&
        one_token_->workspace_bytes() <= workspace_.size())
      one_token_->set_memory(activations_, workspace_);
  }
  return one_token_->activations_.empty() ? nullptr : one_token_.get();
}

void Executor::next_logits(std::span<const std::int32_t> tokens, std::span<float> logits, TextCache* cache) {
  check_logits(tokens, logits);
  const bool continued = cache != nullptr && cache->is_continued_by(tokens);
  Executor* const one = continued ? one_token() : nullptr;
  if (one == nullptr) return whole_logits(tokens, logits, cache);
  const Text text{cache, cache->stored(), 1};
  cache->begin();
  one->run_forward({tokens.last(1), {}, 0}, logits, 0, text);
  cache->store(tokens);
}

void Executor::check_logits(std::span<const std::int32_t> tokens, std::span<float> logits) const {
  check_tokens(tokens);
  if (tokens.empty() || tokens.size() > model_.shape.length) {
    fail(ErrorCode::kInvalidArgument, "{} tokens are given to continue; between 1 and {} are possible",
         tokens.size(), model_.shape.length);
  }
  if (logits.size() != model_.shape.config.vocabulary) {
    fail(ErrorCode::kInvalidArgument, "room for {} logits is given; the model has {}", logits.size(),
         model_.shape.config.vocabulary);
  }
}

void Executor::check_tokens(std::span<const std::int32_t> tokens) const {
  const auto vocabulary = static_cast<std::int64_t>(model_.shape.config.vocabulary);
  for (const std::int32_t token : tokens) {
    if (token >= 0 && token < vocabulary) continue;
    fail(ErrorCode::kInvalidArgument,
         "token {} is outside the model's vocabulary of {}: is the data made for another model?", token,
         vocabulary);
  }
}

void Executor::check(const MicroBatch& micro_batch) const {
  const std::size_t rows = model_.shape.rows();
  if (micro_batch.tokens.size() != rows || micro_batch.targets.size() != rows) {
    fail(ErrorCode::kInvalidArgument,
         "a micro-batch has {} tokens and {} targets; the model was made for {} x {}",
         micro_batch.tokens.size(), micro_batch.targets.size(), model_.shape.batch, model_.shape.length);
  }
  check_tokens(micro_batch.tokens);
  for (const std::int32_t target : micro_batch.targets) {
    if (target != kernels::kIgnoredTarget) check_tokens({&target, 1});
  }
}

}  // namespace sluice::models
