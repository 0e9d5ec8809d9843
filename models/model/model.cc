#include "models/model/model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "models/families/family.h"
#include "models/graph/program.h"
#include "models/model/model_impl.h"
#include "models/model/text_cache.h"

namespace sluice::models {
namespace {

void check_cut(const Shape& shape) {
  const ModelConfig& config = shape.config;
  const TensorCut& cut = shape.cut;
  const std::string of =
      fmt::format("{} pieces of a layer{}", cut.pieces,
                  cut.ranks > 1 ? fmt::format(" over {} ranks along tensor (--mesh)", cut.ranks) : "");
  ensure(cut.pieces % cut.ranks == 0 && (cut.pieces == cut.ranks || std::has_single_bit(cut.pieces)),
         "{} cannot be shared out evenly, or not be added pairwise", of);
  for (const auto& [count, what] : {std::pair(config.heads, "heads"),
                                    {config.hidden_width, "hidden columns"},
                                    {config.vocabulary, "entries in its vocabulary"}})
    if (count < cut.pieces)
      fail(ErrorCode::kInvalidArgument,
           "{} are asked for, and the model has {} {}, of which each needs one: give fewer", of, count, what);
  if (config.kv_heads < cut.pieces && (cut.pieces % config.kv_heads != 0 || cut.ranks < cut.pieces))
    fail(ErrorCode::kInvalidArgument,
         "{} are asked for, and the model has {} key/value heads, which they cannot share out evenly: give a "
         "multiple "
         "of that, or fewer",
         of, config.kv_heads);
}

std::string cut_advice(const Shape& shape, std::size_t grain) {
  const SequenceCut& cut = shape.sequence;
  const std::size_t context = shape.config.context, most = most_pieces(shape.length);
  const std::string length =
      grain <= context
          ? fmt::format("give --seq as a multiple of {}", grain)
          : fmt::format("--seq must be a multiple of {}, and the model's context is {}", grain, context);
  if (cut.pieces == cut.ranks || most == 1 || most % cut.ranks != 0) return length;
  return length + fmt::format("{} --sequence-grain {}", grain <= context ? ", or" : ": give", most);
}

void check_shape(const Shape& shape) {
  const ModelConfig& config = shape.config;
  check_config(config);
  if (!sluice::is_float(shape.dtype)) {
    fail(ErrorCode::kInvalidArgument, "models compute in f32, bf16 or f16, not in {}", name_of(shape.dtype));
  }
  if (shape.batch == 0 || shape.length == 0) {
    fail(ErrorCode::kInvalidArgument, "a micro-batch of {} sequences of {} tokens is empty", shape.batch,
         shape.length);
  }
  if (shape.length > config.context) {
    fail(ErrorCode::kInvalidArgument,
         "sequences of {} tokens are asked for; the model's context is {}: use at most that", shape.length,
         config.context);
  }
  check_cut(shape);
  const SequenceCut& sequence = shape.sequence;
  ensure(sequence.pieces % sequence.ranks == 0, "{} ranks cannot share {} pieces of sequences evenly",
         sequence.ranks, sequence.pieces);
  if (const std::size_t grain = sequence.pieces * kPieceTokens;
      sequence.is_cut() && shape.length % grain != 0)
    fail(ErrorCode::kInvalidArgument, "sequences of {} tokens are to be cut {}: {}", shape.length,
         sequence.pieces == sequence.ranks
             ? fmt::format("over {} ranks along sequence (--mesh)", sequence.ranks)
             : fmt::format("into {} pieces (--sequence-grain)", sequence.pieces),
         cut_advice(shape, grain));
}

Shape uncut(Shape shape) {
  shape.cut = {};
  return shape;
}

Architecture make_architecture(const Shape& shape) {
  check_shape(shape);
  return shape.config.family->build(shape);
}

}  // namespace

Model::Impl::Impl(const Shape& model_shape, const std::string& recompute_names,
                  const std::vector<engine::UnitRange>& section)
    : shape(model_shape),
      recompute(recompute_names),
      architecture(make_architecture(shape)),
      whole(make_architecture(uncut(shape))) {
  for (const char* word : {"auto", "none", "full"}) {
    if (recompute == word) recompute.clear();
  }
  if (!recompute.empty()) check_recompute();
  const std::size_t blocks = architecture.block_of.size();
  const engine::UnitRange all{0, static_cast<engine::UnitId>(blocks + 2)};
  const std::vector<engine::UnitRange> own = section.empty() ? std::vector{all} : section;
  const auto is_here = [&](std::size_t unit) {
    return std::ranges::any_of(own, [&](auto range) { return unit >= range.first && unit < range.end; });
  };
  has_embedding_ = is_here(0);
  has_head_ = is_here(blocks + 1);
  engine::UnitId units_so_far = first();
  for (const engine::UnitRange& range : own) {
    ensure(
        range.end <= all.end && std::max<engine::UnitId>(range.first, 1) < std::min(range.end, all.end - 1),
        "a section of the units {} to {} has no block of a model of {} blocks", range.first, range.end,
        blocks);
    const auto size = static_cast<engine::UnitId>(range.size());
    chunks_.push_back({units_so_far, units_so_far + size});
    units_so_far += size;
  }

  add_unit("embedding", "", architecture.embedding, has_embedding_ || has_copy());
  for (std::size_t i = 0; i < blocks; ++i) {
    add_unit(fmt::format("block.{}", i), fmt::format(fmt::runtime(architecture.block_prefix), i),
             architecture.blocks[architecture.block_of[i]], is_here(i + 1));
  }
  add_unit(shape.config.tied_head ? "final" : "head", "", architecture.head, has_head_);
  check_borders();
}

void Model::Impl::add_unit(const std::string& name, const std::string& prefix, const Graph& graph,
                           bool is_here) {
  const std::uint64_t first_op = std::exchange(ops_of_model_, ops_of_model_ + graph.ops().size());
  const std::size_t index = parameters_of_model_;
  for (const GraphParameter& parameter : graph.parameters())
    parameters_of_model_ += parameter.foreign ? 0 : 1;
  if (!is_here) return;
  engine::UnitSpec unit{name, {}, true, shape.dtype, index};
  std::vector<engine::ParameterId> ids;
  for (const GraphParameter& parameter : graph.parameters()) {
    if (parameter.foreign) {
      ids.push_back(id_of(parameter.spec.name));
      continue;
    }
    engine::ParameterSpec spec = parameter.spec;
    spec.name = prefix + spec.name;
    spec.by_tokens &= has_embedding_;  // the head uses all rows of a copied embedding
    unit.parameters.push_back(std::move(spec));
    ids.push_back(parameters_++);
  }
  first_ops_.push_back(first_op);
  graphs_.push_back(&graph);
  units.push_back(std::move(unit));
  parameter_ids.push_back(std::move(ids));
}

engine::ParameterId Model::Impl::id_of(const std::string& name) const {
  engine::ParameterId id = 0;
  for (const engine::UnitSpec& unit : units)
    for (const engine::ParameterSpec& parameter : unit.parameters) {
      if (parameter.name == name) return id;
      ++id;
    }
  fail(ErrorCode::kInternal, "no unit before has the parameter '{}'", name);
}

// The gradients between any two units use the same memory, so they must have the same size.
void Model::Impl::check_borders() const {
  for (engine::UnitId unit = first() + 1; unit < units.size(); ++unit) {
    const Value &handed = graph(unit - 1).values()[*graph(unit - 1).output()],
                &taken = graph(unit).values()[*graph(unit).input()],
                &first = graph(last()).values()[*graph(last()).input()];
    ensure(handed.bytes() == taken.bytes() && taken.bytes() == first.bytes(),
           "unit '{}' takes {} bytes, '{}' hands it {}, and the last one takes {}", units[unit].name,
           taken.bytes(), units[unit - 1].name, handed.bytes(), first.bytes());
  }
}

void Model::Impl::check_recompute() const {
  std::vector<std::string> known;
  for (const Graph& block : architecture.blocks)
    for (const auto& op : block.ops())
      if (std::ranges::count(known, op->spec().name) == 0) known.push_back(op->spec().name);
  for (const std::string& name : split_names(recompute)) {
    if (std::ranges::count(known, name) > 0) continue;
    if (name.empty())
      fail(ErrorCode::kInvalidArgument,
           "'{}' lacks a name beside a +; give auto, none, full, or names of ops joined by +, as ln1+gelu",
           recompute);
    const std::string nearest = nearest_word(name, known);
    fail(ErrorCode::kInvalidArgument,
         "'{}' is not an op that can be recomputed{}; this model's blocks have {}", name,
         nearest.empty() ? "" : ": did you mean '" + nearest + "'?", fmt::join(known, ", "));
  }
}

const Graph& Model::Impl::same_in(const Architecture& other, const Graph& graph) const {
  for (std::size_t i = 0; i < architecture.blocks.size(); ++i)
    if (&graph == &architecture.blocks[i]) return other.blocks[i];
  return &graph == &architecture.head ? other.head : other.embedding;
}

std::vector<std::vector<engine::WrittenElements>> Model::Impl::written() const {
  if (shape.cut.ranks == 1) return {};
  std::vector<std::vector<engine::WrittenElements>> written;
  for (const engine::UnitSpec& unit : units)
    for (const engine::ParameterSpec& parameter : unit.parameters)
      written.emplace_back(static_cast<std::size_t>(parameter.uses),
                           engine::WrittenElements(shape.cut.ranks));
  for (std::size_t rank = 0; rank < shape.cut.ranks; ++rank) {
    Shape of_rank = shape;
    of_rank.cut.rank = rank;
    const Architecture cut = make_architecture(of_rank);
    for (engine::UnitId unit = first(); unit < units.size(); ++unit)
      for (const auto& op : same_in(cut, graph(unit)).ops())
        for (const ParameterUse& use : op->spec().parameters)
          written[parameter_ids[unit][use.slot]][static_cast<std::size_t>(use.use)][rank] =
              use.writes.value_or(
                  std::vector<comm::Runs>{{0, graph(unit).parameters()[use.slot].spec.elements()}});
  }
  return written;
}

std::vector<Choice> Model::Impl::choices(engine::UnitId unit) const {
  const Graph& of_whole = same_in(whole, graph(unit));
  std::vector<Choice> choices = choice_ladder(of_whole);
  if (recompute.empty() || choices.size() == 1) return choices;
  Choice own = named_choice(of_whole, recompute);
  if (std::ranges::count(choices, recompute, &Choice::name) > 0) return choices;
  const auto fewer = [&](const Choice& choice) {
    return kept_bytes(of_whole, choice) < kept_bytes(of_whole, own);
  };
  choices.insert(std::ranges::find_if(choices.begin(), choices.end() - 1, fewer), std::move(own));
  return choices;
}

std::size_t Model::Impl::chunk_of(engine::UnitId unit) const {
  const auto found = std::ranges::upper_bound(chunks_, unit, {}, &engine::UnitRange::end);
  return static_cast<std::size_t>(found - chunks_.begin());
}

std::vector<Pass> Model::Impl::passes(bool splits_backward) const {
  std::vector<Pass> passes, of_weights;
  const engine::UnitId end_of_blocks = last() + (has_head_ ? 0 : 1);
  for (engine::UnitId unit = first(); unit < end_of_blocks; ++unit) {
    passes.push_back({Pass::Kind::kForward, unit, {{unit, true, -1, false}}});
  }
  if (has_head_) {
    passes.push_back({Pass::Kind::kHead, last(), {{last(), true, 0, true}}});
    if (shape.config.tied_head) passes.back().accesses.push_back({0, true, 0, false, true});
  }
  for (engine::UnitId unit = end_of_blocks; unit-- > first() + (has_embedding_ ? 1 : 0);) {
    const bool is_split = splits_backward && graph(unit).splits_backward();
    passes.push_back({Pass::Kind::kBackward, unit, {{unit, true, 0, !is_split}}});
    if (is_split) of_weights.push_back({Pass::Kind::kWeights, unit, {{unit, false, 0, true}}});
  }
  if (has_embedding_)
    passes.push_back({Pass::Kind::kBackward, 0, {{0, false, shape.config.tied_head ? 1 : 0, true}}});
  passes.insert(passes.end(), of_weights.begin(), of_weights.end());
  if (has_copy()) passes.push_back({Pass::Kind::kAdd, 0, {{0, false, -1, true}}});
  for (Pass& pass : passes) {
    pass.chunk = chunk_of(pass.unit);
    for (engine::Access& access : pass.accesses) access.chunk = pass.chunk;
  }
  return passes;
}

Model::Model(const ModelConfig& config, Dtype dtype, std::size_t batch, std::size_t length,
             const std::string& recompute, const TensorCut& cut, const SequenceCut& sequence)
    : impl_(std::make_unique<Impl>(Shape{config, dtype, batch, length, cut, sequence}, recompute)) {}

Model::Model(const Model& whole, const std::vector<engine::UnitRange>& chunks)
    : impl_(std::make_unique<Impl>(whole.impl_->shape, whole.impl_->recompute, chunks)) {}

Model::~Model() = default;

const ModelConfig& Model::config() const { return impl_->shape.config; }
std::size_t Model::batch() const { return impl_->shape.batch; }
std::size_t Model::length() const { return impl_->shape.length; }
const std::vector<engine::UnitSpec>& Model::units() const { return impl_->units; }

kernels::AttentionShape Model::attention() const {
  const ModelConfig& config = impl_->shape.config;
  kernels::AttentionShape shape;
  shape.batch = impl_->shape.batch;
  shape.length = impl_->shape.length;
  shape.heads = config.heads;
  shape.kv_heads = config.kv_heads;
  shape.head_width = config.head_width;
  shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_width)));
  return shape;
}

std::size_t Model::text_cache_bytes(std::size_t tokens) const {
  return TextCache::bytes(impl_->shape.config, impl_->shape.dtype, tokens) + kAlignment;
}

namespace {

bool alike(const kernels::Product& a, const kernels::Product& b) {
  const auto shape = [](const kernels::Product& p) {
    return std::tuple(p.m, p.n, p.k, p.a.type, p.c.type, p.transpose_a, p.transpose_b);
  };
  return shape(a) == shape(b);
}

std::size_t index_of(const kernels::Product& product, std::vector<kernels::Product>& known) {
  const auto found =
      std::ranges::find_if(known, [&](const kernels::Product& other) { return alike(product, other); });
  const auto index = static_cast<std::size_t>(found - known.begin());
  if (found == known.end()) known.push_back(product);
  return index;
}

// Distributes an op's operations over its products, by their sizes. Without products they count as
// attention's.
engine::Work work_of(const kernels::ProductSurvey& asked, double flops, double bytes,
                     std::vector<kernels::Product>& known) {
  engine::Work work;
  work.bytes = bytes;
  double sizes = 0;
  const auto size = [](const kernels::Product& p) {
    return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  };
  for (const kernels::Product& product : asked.products()) sizes += size(product);
  if (sizes == 0) work.attention = flops;
  for (const kernels::Product& product : asked.products()) {
    const std::size_t index = index_of(product, known);
    work.products.resize(known.size());
    work.products[index] += flops * size(product) / sizes;
  }
  return work;
}

// Counts the bytes that a rank and its host receive: for a sum, the other ranks' contributions to its part
// and then the other parts; for a gather, the other parts.
void count_calls(const std::vector<LayerCall>& calls, const Shape& shape, engine::Work& work) {
  for (const LayerCall& call : calls) {
    const std::size_t ranks = call.along_sequence ? shape.sequence.ranks : shape.cut.ranks,
                      rank = call.along_sequence ? shape.sequence.rank : shape.cut.rank;
    const std::size_t own = call.values / ranks + (rank < call.values % ranks ? 1 : 0);
    const std::size_t added = call.gathers ? 0 : own * (ranks - 1);
    work.received += (added + call.values - own) * size_of(call.type);
    const PartsFromHosts& come = call.along_sequence ? shape.sequence.from_hosts : shape.cut.from_hosts;
    const std::size_t parts = come.gathered + (call.gathers ? 0 : come.added);
    work.from_hosts += call.values * parts / ranks * size_of(call.type);
    work.waits += call.gathers ? 1 : 2;
  }
}

engine::Work forward_work(const Op& op, const Shape& shape, const kernels::MatrixLibrary& library,
                          std::vector<kernels::Product>& known) {
  kernels::ProductSurvey asked(library);
  op.forward_workspace(asked);
  engine::Work work = work_of(asked, op.spec().forward_flops, op.spec().forward_bytes, known);
  count_calls(op.spec().forward_calls, shape, work);
  return work;
}

engine::Work backward_work(const Op& op, const Shape& shape, const kernels::MatrixLibrary& library,
                           std::vector<kernels::Product>& known) {
  kernels::ProductSurvey asked(library);
  op.backward_workspace(asked);
  engine::Work work = work_of(asked, op.spec().backward_flops, op.spec().backward_bytes, known);
  count_calls(op.spec().backward_calls, shape, work);
  return work;
}

engine::Work weights_work(const Op& op, const kernels::MatrixLibrary& library,
                          std::vector<kernels::Product>& known) {
  kernels::ProductSurvey asked(library);
  op.weights_workspace(asked);
  return work_of(asked, op.spec().weights_flops, op.spec().weights_bytes, known);
}

// Returns the part of backward_work() whose communication overlaps with the gradients of weights, with the
// work of these.
engine::Work beside_work(const Op& op, const Shape& shape, const kernels::MatrixLibrary& library,
                         std::vector<kernels::Product>& known) {
  std::vector<LayerCall> calls = op.spec().backward_calls;
  std::erase_if(calls, [](const LayerCall& call) { return !call.beside_weights; });
  if (calls.empty()) return {};
  engine::Work work = weights_work(op, library, known);
  count_calls(calls, shape, work);
  return work;
}

engine::UnitProfile profile_unit(const Graph& graph, const Shape& shape, const std::vector<Choice>& choices,
                                 bool splits_backward, kernels::ProductSurvey& products,
                                 std::vector<kernels::Product>& known) {
  engine::UnitProfile profile;
  for (const auto& op : graph.ops()) {
    profile.forward += forward_work(*op, shape, products.library(), known);
    profile.backward += backward_work(*op, shape, products.library(), known);
    if (!splits_backward) profile.beside += beside_work(*op, shape, products.library(), known);
    if (splits_backward && op->spec().splits_backward)
      profile.weights += weights_work(*op, products.library(), known);
  }
  if (graph.input()) profile.input_bytes = graph.values()[*graph.input()].bytes();
  for (const Choice& choice : choices) {
    const UnitProgram program = compile(graph, choice, products, splits_backward);
    // The head has no forward pass to recompute.
    engine::Work again;
    for (const std::size_t op : graph.output() ? recomputed_ops(graph, choice) : std::vector<std::size_t>())
      again += forward_work(*graph.ops()[op], shape, products.library(), known);
    profile.choices.push_back({choice.name, program.kept_bytes, std::move(again), program.workspace_bytes(),
                               program.forward.steps.size(), program.backward.steps.size(),
                               program.kept_for_weights_bytes, program.left_for_weights_bytes,
                               program.weights.steps.size()});
  }
  return profile;
}

}  // namespace

engine::Profile Model::profile(std::size_t micro_batches, const kernels::MatrixLibrary& library,
                               std::size_t hidden_bytes, bool splits_backward) const {
  engine::Profile profile;
  kernels::ProductSurvey products(library, hidden_bytes);
  profile.units = impl_->units;
  std::map<const Graph*, engine::UnitId> known;  // the first unit with this graph
  for (engine::UnitId unit = 0; unit < profile.units.size(); ++unit) {
    if (unit < impl_->first()) {  // of a copied embedding only the table is read
      profile.unit_profiles.emplace_back().choices = {{"none", 0, {}, 0}};
      continue;
    }
    const auto [first, is_new] = known.emplace(&impl_->graph(unit), unit);
    profile.unit_profiles.push_back(is_new
                                        ? profile_unit(impl_->graph(unit), impl_->shape, impl_->choices(unit),
                                                       splits_backward, products, profile.products)
                                        : profile.unit_profiles[first->second]);
  }
  for (const Pass& pass : impl_->passes(splits_backward)) {
    profile.schedule.insert(profile.schedule.end(), pass.accesses.begin(), pass.accesses.end());
  }
  profile.written = impl_->written();
  if (impl_->shape.config.tied_head && impl_->has_embedding() != impl_->has_head())
    profile.twin = {0, impl_->has_embedding() ? 1 : 0, !impl_->has_embedding()};
  profile.micro_batches = micro_batches;
  profile.pieces = impl_->shape.sequence.own_pieces();
  // All micro-batches but the first accumulate gradients of weights; the first is counted as if it did.
  for (kernels::Product& product : profile.products)
    product.accumulate = product.transpose_a && profile.micro_batches * profile.pieces > 1;
  profile.tokens = impl_->shape.rows();
  profile.border_gradient_bytes = profile.unit_profiles.back().input_bytes;
  profile.hidden_bytes = products.hidden_bytes();
  profile.native_products = kernels::has_products_of(impl_->shape.dtype, library);
  return profile;
}

}  // namespace sluice::models
