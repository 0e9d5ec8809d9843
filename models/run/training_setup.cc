#include "models/run/training_setup.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "core/bytes.h"
#include "core/error.h"
#include "core/system.h"
#include "core/text_file.h"
#include "engine/machine/machine_rates.h"
#include "engine/machine/process.h"
#include "engine/planner/planner.h"
#include "engine/saving/checkpoint_values.h"
#include "models/families/initialize.h"
#include "models/run/learning_rate.h"
#include "models/run/mesh_choice.h"
#include "models/run/pipeline_plan.h"
#include "models/run/profile.h"
#include "models/run/recipe.h"
#include "models/run/run_ranks.h"
#include "models/run/training_run.h"
#include "offload/disk_folders.h"

namespace sluice::models {
namespace {

template <class Number>
void check(bool valid, const char* name, Number given, const char* wanted) {
  if (!valid) fail(ErrorCode::kInvalidArgument, "{} must be {}, {} was given", name, wanted, given);
}

bool within(double value, double low, double high) {
  return std::isfinite(value) && value >= low && value < high;
}

void check_at_least_0(const std::optional<double>& value, const char* name, const char* wanted) {
  if (value) check(within(*value, 0, 1e6), name, *value, wanted);
}

constexpr const char* kClips = "0 (none), or from 1e-30 to below 1e30";
bool is_clip(double value) { return value == 0 || within(value, 1e-30, 1e30); }

// Returns the most space that the checkpoints of a run can take.
std::uint64_t checkpoint_room(const TrainSettings& settings, std::uint64_t checkpoint_bytes) {
  if (settings.out.empty()) return 0;
  const std::uint64_t saves = settings.save_every == 0 ? 1 : divide_up(settings.steps, settings.save_every);
  return checkpoint_bytes * std::min<std::uint64_t>(saves, most_checkpoints(settings));
}

double block_parameters(const Model& model) {
  double count = 0;
  for (const engine::UnitSpec& unit : model.units())
    for (const engine::ParameterSpec& parameter : unit.parameters)
      if (!parameter.by_elements) count += static_cast<double>(parameter.elements());
  return count;
}

void check_stages(const TrainSettings& s) {
  if (s.pipeline != engine::PipelineOrder::k1F1B && sections_of(s) == 1)
    fail(ErrorCode::kInvalidArgument,
         "--pipeline {} is the order of a pipeline's passes, and there is no pipeline: give --mesh "
         "pipeline=P, too",
         engine::name_of(s.pipeline));
  check(s.chunks >= 1 && s.chunks <= 1024, "chunks", s.chunks, "from 1 to 1024");
  if (s.chunks > 1 && sections_of(s) == 1)
    fail(ErrorCode::kInvalidArgument,
         "--chunks {} is how many chunks of blocks each stage of a pipeline has, and there is no pipeline: "
         "give --mesh pipeline=P, too",
         s.chunks);
  if (s.chunks > 1 && engine::splits_backward(s.pipeline))
    fail(ErrorCode::kInvalidArgument,
         "--pipeline {} is for stages of one chunk each, and --chunks is {}: leave one of them out",
         engine::name_of(s.pipeline), s.chunks);
  if (s.stages && sections_of(s) == 1)
    fail(
        ErrorCode::kInvalidArgument,
        "--stages '{}' says which blocks each stage of a pipeline has, and there is no pipeline: give --mesh "
        "pipeline=P, too (--stage, without an s, is what ZeRO partitions)",
        *s.stages);
}

std::string values_text(const TrainSettings& s) {
  if (!begins_with_first_values(s.model)) return fmt::format("the weights in '{}'", s.model);
  return fmt::format("first values, seed {}{}", s.seed,
                     is_preset(s.model) ? "" : fmt::format("; no weights in '{}'", s.model));
}

// Return this rank's share of the memory that one process of the machine may use, and of the machine's cores,
// for settings that leave them open.
std::uint64_t share_of_memory(std::uint64_t memory, const TrainSettings& s) {
  return memory / static_cast<std::uint64_t>(s.ranks_here);
}
int share_of_cores(int cores, const TrainSettings& s) {
  constexpr double kRounding = 1e-9;  // for shares that add up to a whole core
  return std::max(1, static_cast<int>(cores * s.share_of_cores + kRounding));
}

// Weights without a record of their training are assumed to know the whole context.
std::uint64_t learned_length(const TrainSettings& s, const ModelConfig& config, bool first_values) {
  if (first_values) return s.length;
  return std::max<std::uint64_t>(s.length, learned_from(s.model).length.value_or(config.context));
}

void choose_recipe(PlanResult& plan, const TrainSettings& s, const Model& model) {
  const RecipeBasis basis = {block_parameters(model), begins_with_first_values(s.model)};
  std::string from;
  std::optional<Json> record;
  if (s.resume) {
    const engine::CheckpointList list = engine::list_checkpoints(s.out);
    if (!list.whole.empty()) {
      from = list.whole.back().path;
      record = read_run_record(from);
    }
  }
  plan.recipe = make_recipe(s, basis, record ? &*record : nullptr, from);
  plan.recipe_text = to_text(plan.recipe, s, basis) +
                     fmt::format("begins with       {}\n", from.empty() ? values_text(s) : "'" + from + "'");
}

// Sets the sizes of checkpoints and of the files that report on the run.
void add_file_sizes(PlanResult& plan, const TrainSettings& s, const engine::Layout& layout,
                    const optim::Optimizer& optimizer) {
  const engine::CheckpointTensors tensors(layout, optimizer);
  std::vector<std::uint64_t> bytes = tensors.file_bytes();
  for (const engine::OwnFile& file : copied_files(s.model)) bytes.push_back(file.bytes());
  plan.checkpoint_bytes = engine::bytes_needed(bytes);
  // A run that reads and writes no such file needs no buffer.
  if (!s.out.empty())
    plan.checkpoint_buffers = tensors.buffer_bytes(s.ranks.size);
  else
    plan.checkpoint_buffers = begins_with_first_values(s.model) ? 0 : engine::kStreamBuffer;
  plan.trace_bytes = trace_events(s) * engine::kTraceEventBytes + (s.profile.empty() ? 0 : kProfileBytes);
}

// Returns the advice for ranks along "sequence" that cannot share out the pieces of sequences evenly.
std::string sequence_advice(const TrainSettings& s, std::size_t ranks, const ModelConfig& config) {
  constexpr std::size_t kUsualPieces = 4;  // more cost time, and allow more ranks
  const std::size_t most = most_pieces(s.length), needed = ranks * kPieceTokens;
  if (!std::has_single_bit(ranks)) return "let the number of ranks be a power of 2";
  if (ranks <= most)
    return fmt::format(
        "give --sequence-grain {}, also to the runs that are to have the same bits on other ranks",
        std::max(ranks, std::min(kUsualPieces, most)));
  if (needed <= config.context)
    return fmt::format("give --sequence-grain {}, with --seq as a multiple of {}", ranks, needed);
  return fmt::format(
      "no --sequence-grain does, since that takes a --seq of {}, and the model's context is {}", needed,
      config.context);
}

// Gradients of a reproducible run are summed over the pieces of sequences.
void check_sequence_grain(const TrainSettings& s, const ModelConfig& config) {
  const std::size_t ranks = sequence_cut(s).ranks, pieces = s.sequence_grain.value_or(1);
  if (pieces % ranks != 0)
    fail(ErrorCode::kInvalidArgument,
         "--mesh cuts sequences over {} ranks, and --reproducible computes each sequence in {} "
         "(--sequence-grain), which these ranks cannot share out evenly: {}",
         ranks, pieces == 1 ? "one piece" : fmt::format("{} pieces", pieces),
         sequence_advice(s, ranks, config));
  // More would leave each little of the blocks that ranks send, and messages take memory that no plan counts.
  constexpr std::size_t kMostSums = 256;
  if (ranks > 1 && own_micro_batches(s) > kMostSums)
    fail(ErrorCode::kInvalidArgument,
         "--mesh cuts sequences over {} ranks, which have {} micro-batches each in a step; --reproducible, "
         "with a sum for each, takes {}: give more ranks to data, or a smaller --accumulate with a larger "
         "--batch",
         ranks, own_micro_batches(s), kMostSums);
}

}  // namespace

void check_mesh(const TrainSettings& s) {
  if (const int ranks = data_size(s); s.accumulate % static_cast<std::size_t>(ranks) != 0)
    fail(ErrorCode::kInvalidArgument,
         "accumulate is {} micro-batches in a step of all ranks, which {} ranks cannot share evenly; give a "
         "multiple of {}",
         s.accumulate, ranks, ranks);
  check_stages(s);
}

void check_settings(const TrainSettings& s) {
  check(s.batch >= 1 && s.batch <= 1'000'000, "batch", s.batch, "from 1 to 1000000");
  check(s.accumulate >= 1 && s.accumulate <= 1'000'000, "accumulate", s.accumulate, "from 1 to 1000000");
  if (!s.chooses_mesh) check_mesh(s);
  if (s.chooses_mesh && s.stages)
    fail(ErrorCode::kInvalidArgument,
         "--stages '{}' says which blocks each stage of a pipeline has, and --mesh auto chooses how many "
         "stages there are: leave --stages out, or state the mesh",
         *s.stages);
  if (s.grain && !s.plan.reproducible)
    fail(ErrorCode::kInvalidArgument,
         "--grain {} is how many pieces layers are cut into for sums that are reproducible: give "
         "--reproducible, "
         "too, or leave it out",
         *s.grain);
  if (s.grain) check(*s.grain >= 1 && *s.grain <= 1024, "grain", *s.grain, "from 1 to 1024");
  if (s.sequence_grain && !s.plan.reproducible)
    fail(ErrorCode::kInvalidArgument,
         "--sequence-grain {} is how many pieces sequences are cut into for sums that are reproducible: give "
         "--reproducible, too, or leave it out",
         *s.sequence_grain);
  if (s.sequence_grain && (*s.sequence_grain > 1024 || !std::has_single_bit(*s.sequence_grain)))
    fail(ErrorCode::kInvalidArgument, "sequence-grain must be 1, 2, 4, ... up to 1024, {} was given",
         *s.sequence_grain);
  check(s.length <= 100'000'000, "seq", s.length, "at most the model's context");
  check(s.steps >= 1, "steps", s.steps, "at least 1");
  check(s.keep >= 1, "keep", s.keep, "at least 1");
  check(s.eval_batches >= 1, "eval-batches", s.eval_batches, "at least 1");
  check_at_least_0(s.learning_rate, "lr", "0 or more, and below 1e6");
  if (s.adamw_learning_rate) {
    check_at_least_0(s.adamw_learning_rate, "adamw-lr", "0 or more, and below 1e6");
    if (s.optimizer.name != "muon")
      fail(ErrorCode::kInvalidArgument, "adamw-lr is given, and {} has none; it is for muon, and lr for {}",
           s.optimizer.name, s.optimizer.name);
  }
  check_at_least_0(s.weight_decay, "weight-decay", "0 or more, and below 1e6");
  check(is_clip(s.clip.value_or(0)), "clip", s.clip.value_or(0), kClips);
  check(is_clip(s.clip_value), "clip-value", s.clip_value, kClips);
  check(within(s.held_out, 0, 1), "held-out", s.held_out, "a share from 0 to below 1");
  check_at_least_0(s.final_learning_rate, "final-lr", "a share of lr, 0 or more, and below 1e6");
  if (s.schedule) schedule_shape(*s.schedule);
  if (!sluice::is_float(s.dtype))
    fail(ErrorCode::kInvalidArgument, "dtype must be f32, bf16 or f16, {} was given", name_of(s.dtype));
  loss_scale_of(s);
  if (s.out.empty() && (s.save_every != 0 || s.resume))
    fail(ErrorCode::kInvalidArgument, "{} needs --out, the folder of checkpoints",
         s.resume ? "--resume" : "--save-every");
}

LossScale loss_scale_of(const TrainSettings& s) {
  const std::string scale = s.loss_scale.value_or(s.dtype == Dtype::kF16 ? "dynamic" : "1");
  if (scale == "dynamic")
    return LossScale::dynamic(s.initial_scale.value_or(LossScale::kInitial),
                              s.scale_growth_interval.value_or(LossScale::kGrowthInterval));
  if (s.initial_scale || s.scale_growth_interval)
    fail(ErrorCode::kInvalidArgument,
         "{} is given, and the loss scale is {}, which does not change; leave it out, or give loss-scale "
         "dynamic",
         s.initial_scale ? "initial-scale" : "scale-growth-interval", scale);
  double number = 0;
  const auto [end, error] = std::from_chars(scale.data(), scale.data() + scale.size(), number);
  if (error != std::errc() || end != scale.data() + scale.size())
    fail(ErrorCode::kInvalidArgument,
         "loss-scale must be dynamic, or a number above 0 that is finite; '{}' was given", scale);
  return LossScale::fixed(number);
}

std::uint64_t most_checkpoints(const TrainSettings& settings) {
  const std::uint64_t more = settings.eval_every == 0 ? 1 : 2;
  return settings.keep > UINT64_MAX - more ? UINT64_MAX : settings.keep + more;
}

std::size_t trace_events(const TrainSettings& settings) {
  if (!settings.trace.empty()) return kTraceEvents;
  return settings.profile.empty() ? 0 : kProfileEvents;
}

std::vector<engine::OwnFile> copied_files(const std::string& model) {
  constexpr std::uint64_t kMost = 64 * kMiB;
  std::vector<engine::OwnFile> files;
  if (is_preset(model)) return files;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"}) {
    const std::string path = path_in(model, name);
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error) || ::access(path.c_str(), R_OK) != 0) continue;
    const std::uint64_t bytes = std::filesystem::file_size(path, error);
    if (!error && bytes <= kMost) files.push_back({name, {}, path});
  }
  return files;
}

void set_request(PlanResult& plan, const TrainSettings& s) {
  plan.disk = s.disk;
  plan.request = s.plan;
  plan.request.flags = true;
  plan.request.ranks = section_ranks(s);
  plan.request.clip = plan.recipe.clip > 0 || loss_scale_of(s).is_dynamic();
  set_links(s, s.ranks.rank, plan.rates);
}

void fit(PlanResult& plan, const TrainSettings& s, const optim::Optimizer& optimizer, int cores) {
  set_request(plan, s);
  try {
    plan.plan = engine::make_plan(plan.profile, optimizer, plan.budget, plan.request, plan.rates);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBudget || s.threads <= cores) throw;
    throw Error(
        ErrorCode::kBudget,
        fmt::format("{} threads are asked for, each with workspace of its own, and this process may use {} "
                    "cores: try --threads {}. With as many as are asked for, {}",
                    s.threads, cores, cores, error.what()),
        error.lacks());
  }
}

void settle_grain(TrainSettings& s, const ModelConfig& config) {
  constexpr std::size_t kMostPieces = 4;
  if (!s.plan.reproducible) return;
  check_sequence_grain(s, config);
  const std::size_t most = std::bit_floor(config.kv_heads);
  if (!s.grain) s.grain = std::min(kMostPieces, most);
  if (*s.grain > most || !std::has_single_bit(*s.grain))
    fail(ErrorCode::kInvalidArgument,
         "--grain {} is asked for; it may be 1, 2, 4, ... up to {}, since the model has {} key/value heads",
         *s.grain, most, config.kv_heads);
  if (const auto ranks = static_cast<std::size_t>(tensor_size(s)); *s.grain % ranks != 0)
    fail(ErrorCode::kInvalidArgument,
         "--mesh has {} ranks along tensor, and --reproducible cuts layers into {} pieces (--grain), which "
         "these ranks cannot share out evenly: {}",
         ranks, *s.grain,
         std::has_single_bit(ranks) && ranks <= most
             ? fmt::format("give --grain {}, also to the runs that are to have the same bits on other ranks",
                           ranks)
             : fmt::format("with {} key/value heads it may be up to {} ranks", config.kv_heads, most));
}

void count_transport(const TrainSettings& s, int cores, engine::MachineRates& rates) {
  if (s.ranks.size == 1) return;
  rates.rank_processor_seconds = engine::rank_processor_seconds(
      s.ranks_here, s.threads, cores, s.ranks.on_hosts().all_on_one(), rates.memory_bandwidth);
}

void choose_section(Setup& setup, RunRanks& ranks) {
  PlanResult& plan = setup.plan;
  set_request(plan, setup.settings);
  setup.section_model =
      plan_section(plan, setup.settings, *setup.model, *setup.optimizer, *setup.tools->library, ranks);
  const PipelinePlan& pipeline = *plan.pipeline;
  const std::optional<engine::Twin>& twin = plan.profile.twin;
  setup.section = std::make_unique<engine::Section>(*setup.layout, pipeline.cut, pipeline.pipeline.sections,
                                                    pipeline.section, twin && twin->is_copy);
  if (ranks.communicator() == nullptr) return;  // the run is only planned
  setup.files = std::make_unique<engine::SectionOfFiles>(engine::SectionOfFiles{
      *setup.section, engine::partitions_of(*setup.layout, *setup.optimizer, *setup.section, plan.plan,
                                            *ranks.communicator())});
}

Setup begin_setup(const TrainSettings& settings, const engine::Machine* there) {
  check_settings(settings);
  if (there == nullptr) check_outputs(settings);
  Setup setup;
  setup.settings = settings;
  TrainSettings& s = setup.settings;
  setup.config = resolve_training_model(s);
  setup.first_values = begins_with_first_values(s.model);
  if (s.length == 0) s.length = std::min<std::size_t>(setup.config.context, 1024);
  settle_grain(s, setup.config);
  setup.learned_length = learned_length(s, setup.config, setup.first_values);
  if (s.memory == 0)
    s.memory = share_of_memory(there == nullptr ? engine::default_memory() : there->memory.usable, s);
  if (s.threads == 0) s.threads = share_of_cores(there == nullptr ? usable_cpus() : there->cores, s);
  setup.optimizer = optim::make_optimizer(s.optimizer, optim::Settings::Defaults::kTraining);
  setup.model = std::make_unique<Model>(setup.config, s.dtype, s.batch, s.length,
                                        s.plan.recompute.value_or(""), tensor_cut(s), sequence_cut(s));
  setup.layout = std::make_unique<engine::Layout>(setup.model->units());
  engine::check_masters(setup.model->units(), *setup.optimizer);
  choose_recipe(setup.plan, s, *setup.model);
  add_file_sizes(setup.plan, s, *setup.layout, *setup.optimizer);
  if (there != nullptr) return setup;
  if (!s.out.empty())
    engine::check_file_limit(engine::CheckpointTensors(*setup.layout, *setup.optimizer).file_bytes());
  offload::resolve_disk(s.disk, s.out, checkpoint_room(s, setup.plan.checkpoint_bytes), s.ranks_here);
  return setup;
}

// Measures this machine, for `micro_batches` micro-batches of this rank in a step.
void measure(Setup& setup, std::size_t micro_batches) {
  const TrainSettings& s = setup.settings;
  const std::vector<offload::DiskKnowledge> disks = offload::know_disks(s.disk);
  setup.tools = std::make_unique<engine::Tools>(s.threads, offload::options_for(disks));
  const kernels::MatrixLibrary& library = *setup.tools->library;
  setup.plan.profile = setup.model->profile(
      micro_batches, library, engine::hidden_bytes(setup.model->units(), *setup.optimizer, library),
      engine::splits_backward(s.pipeline));
  setup.plan.rates =
      engine::measure_rates(setup.tools->threads, *setup.tools->library,
                            {setup.plan.profile.products, setup.model->attention(), s.dtype, *setup.optimizer,
                             engine::memory_sample(setup.plan.checkpoint_bytes, s.memory), s.ranks_here},
                            disks);
  // Ranks of a run measure at the same time, and so find their actual shares.
  if (s.communicator == nullptr)
    engine::share_cores(s.ranks_here, s.threads, s.threads, usable_cpus(), setup.plan.rates);
  count_transport(s, usable_cpus(), setup.plan.rates);
  const std::uint64_t held = setup.tools->base();
  setup.plan.budget = {s.memory, offload::usable_disk(s.disk),
                       engine::process_bytes(held - std::min(held, s.communication_in_use), s.threads) +
                           setup.plan.checkpoint_buffers + setup.plan.trace_bytes + s.communication_bytes};
}

void measure_link(Setup& setup, RunRanks& ranks) {
  const engine::Budget& budget = setup.plan.budget;
  TrainSettings& s = setup.settings;
  if (!s.link) s.link = ranks.link(budget.memory - std::min(budget.memory, budget.base));
}

// Chooses the mesh by plans on rank 0, and sets it in the settings of all ranks, with the measured link.
std::optional<MeshChoice> settle_mesh(TrainSettings& settings) {
  Setup setup = begin_setup(settings);
  measure(setup, settings.accumulate);
  RunRanks ranks(settings);
  measure_link(setup, ranks);
  std::optional<MeshChoice> choice;
  const auto report_work = [&] {
    if (ranks.communicator() != nullptr) ranks.communicator()->report_work();
  };
  if (ranks.is_first())
    choice = choose_mesh({setup.config, *setup.optimizer, *setup.tools->library, setup.plan, usable_cpus(),
                          false, report_work},
                         setup.settings);
  settings.mesh = comm::Mesh::parse(ranks.from_first(choice ? choice->mesh.text() : ""));
  settings.chooses_mesh = false;
  settings.link = setup.settings.link;
  return choice;
}

// Ranks that choose a mesh make other collective calls than ranks with a given one.
void compare_meshes(const TrainSettings& s) {
  RunRanks ranks(s);
  const std::vector<std::string> all = ranks.from_all("the mesh of the run", s.chooses_mesh ? "auto"
                                                                             : s.mesh       ? s.mesh->text()
                                                                                            : "not given");
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      fail(ErrorCode::kInvalidArgument,
           "--mesh of rank 0 is {}, and that of rank {} is {}; start all ranks with the same settings",
           all[0], rank, all[rank]);
}

Setup prepare_on_mesh(const TrainSettings& settings) {
  Setup setup = begin_setup(settings);
  TrainSettings& s = setup.settings;
  if (!s.data.empty()) setup.data = std::make_unique<TrainingData>(s, setup.config);
  if (!setup.data && s.validation)
    fail(ErrorCode::kInvalidArgument,
         "--valid is '{}', and --data is not given; name both, or neither for a plan without data",
         *s.validation);
  if (setup.data && s.eval_every != 0 && !setup.data->has_validation())
    fail(ErrorCode::kInvalidArgument,
         "--eval-every needs data: name --valid, or let --held-out be more than 0");
  measure(setup, own_micro_batches(s));
  RunRanks ranks(s);
  ranks.compare(setup);
  measure_link(setup, ranks);
  if (sections_of(s) > 1) {
    choose_section(setup, ranks);
  } else {
    fit(setup.plan, s, *setup.optimizer, usable_cpus());
    ranks.agree_on_plan(setup);
  }
  return setup;
}

Setup prepare(const TrainSettings& given) {
  TrainSettings settings = given;
  compare_meshes(settings);
  std::optional<MeshChoice> choice;
  if (settings.chooses_mesh) choice = settle_mesh(settings);
  Setup setup = prepare_on_mesh(settings);
  setup.plan.mesh_choice = std::move(choice);
  return setup;
}

}  // namespace sluice::models
