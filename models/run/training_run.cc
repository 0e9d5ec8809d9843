#include "models/run/training_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/descriptor.h"
#include "core/error.h"
#include "core/log.h"
#include "core/system.h"
#include "engine/checkpoint/run_id.h"
#include "engine/saving/checkpoint_values.h"
#include "engine/saving/section_values.h"
#include "models/families/initialize.h"
#include "models/families/weights.h"
#include "models/run/rank_files.h"
#include "models/run/recipe.h"

namespace sluice::models {
namespace {

LearningRate learning_rate_of(const Recipe& recipe, std::uint64_t steps) {
  return {recipe.learning_rate, recipe.warmup, steps, recipe.final_learning_rate,
          schedule_shape(recipe.schedule)};
}

// Returns AdamW's share of the learning rate, by which it follows the schedule.
double adamw_share(const Recipe& recipe) {
  if (!recipe.adamw_learning_rate) return 1;
  return recipe.learning_rate == 0 ? 0 : *recipe.adamw_learning_rate / recipe.learning_rate;
}

std::uint64_t samples_of_step(const TrainSettings& s) { return s.accumulate * s.batch; }

}  // namespace

TrainingRun::TrainingRun(Setup& setup, RunRanks& ranks, const TrainEvents& events)
    : setup_(setup),
      ranks_(ranks),
      settings_(setup.settings),
      events_(events),
      learning_rate_(learning_rate_of(setup.plan.recipe, setup.settings.steps)),
      loss_scale_(loss_scale_of(setup.settings)),
      traces_(ranks.communicator(), setup.settings.trace, ranks.place()),
      assembly_(setup.plan,
                {setup.tools->threads, *setup.tools->io, *setup.optimizer, setup.tools->library.get(),
                 ranks.of_section(), nullptr, ranks.sections()},
                {.trace_events = trace_events(settings_),
                 .timeline_parts = settings_.profile.empty() ? 0 : kProfileParts,
                 .origin = origin_}) {
  runner_ = std::make_unique<Runner>(setup.own_model(), setup.plan.plan, engine_, setup.tools->threads,
                                     *setup.tools->library, assembly_.ledger(), assembly_.trace(), place(),
                                     layer_ranks());
  check_folder();
  ranks_.set_meanwhile([this] { serve_ranks(); });
  if (!ranks_.is_first()) return;
  check_room();
  remove_files_of_absent_ranks(settings_.profile, ranks_.size(), kProfileBeginning);
}

// Called while the run waits for other ranks. The engine's own waits during that are a part of it.
void TrainingRun::serve_ranks() {
  const double before = engine_.counters().rank_wait_seconds;
  engine_.serve_ranks();
  waits_within_waits_ += engine_.counters().rank_wait_seconds - before;
}

LayerRanks TrainingRun::layer_ranks() {
  const auto along = [&](comm::Communicator* axis) {
    return axis == nullptr
               ? nullptr
               : std::make_unique<MessageAxis>(*axis, assembly_.trace(), [this] { serve_ranks(); });
  };
  tensor_ = along(ranks_.tensor());
  sequence_ = along(ranks_.sequence());
  return {tensor_.get(), sequence_.get()};
}

Place TrainingRun::place() {
  if (!setup_.plan.pipeline) return {};
  neighbours_ =
      std::make_unique<MessageNeighbours>(*ranks_.sections(), assembly_.trace(), [this] { serve_ranks(); });
  return {setup_.plan.pipeline->pipeline, setup_.plan.pipeline->section, neighbours_.get()};
}

// Each section writes its own part of a checkpoint.
void TrainingRun::check_folder() {
  if (settings_.out.empty() || ranks_.sections() == nullptr) return;
  const engine::SharedFolder folder =
      engine::find_shared_folder(*ranks_.communicator(), settings_.out, settings_.out + "/.");
  if (!folder.why_not.empty())
    fail(ErrorCode::kInvalidArgument,
         "{}, where each stage of a pipeline writes its part of a checkpoint; give an --out that all hosts "
         "see",
         folder.why_not);
}

TrainingRun::~TrainingRun() { ranks_.set_meanwhile({}); }

bool TrainingRun::stop_requested() {
  if (!stop_ && events_.stop) stop_ = events_.stop();
  return stop_;
}

bool TrainingRun::load_units(const engine::UnitSource& of_model) {
  const engine::UnitSource source = setup_.section ? of_section(of_model, *setup_.section) : of_model;
  for (engine::UnitId unit = 0; unit < engine_.layout().units().size(); ++unit) {
    if (ranks_.size() == 1 && stop_requested()) return false;
    engine_.load(unit, source);
  }
  return true;
}

// A run that was killed before its first checkpoint starts again under its own id.
void TrainingRun::begin_metrics() {
  if (ranks_.is_first()) {
    const bool again = settings_.resume && !settings_.out.empty();
    run_id_ = (again ? engine::read_run_id(settings_.out) : std::nullopt).value_or(random_name());
  }
  run_id_ = ranks_.from_first(run_id_);
  if (settings_.resume)
    resume_metrics();
  else if (!settings_.metrics.empty())
    metrics_.emplace(settings_.metrics, run_id_, std::nullopt);
  if (ranks_.is_first() && !settings_.out.empty()) engine::write_run_id(settings_.out, run_id_);
}

void TrainingRun::resume_metrics() {
  if (settings_.metrics.empty()) return;
  metrics_.emplace(settings_.metrics, run_id_, step_);
  if (ranks_.is_first()) cut_metrics_of_absent_ranks(settings_.metrics, ranks_.size(), run_id_, step_);
}

TrainingRun::LoadingMemory TrainingRun::loading_memory(std::size_t charged) {
  constexpr std::size_t kMost = 16 * engine::kStreamBlock;
  const std::span<std::byte> idle = runner_->idle_activations();
  if (idle.size() >= kMost) return {{}, idle.first(kMost)};
  LoadingMemory memory{{assembly_.ledger(), allocator::Purpose::kCheckpoint, charged}, {}};
  memory.bytes = memory.own.bytes();
  return memory;
}

void TrainingRun::load_initial() {
  begin_metrics();
  if (setup_.first_values)
    return void(
        load_units(initial_values(setup_.config, *setup_.layout, settings_.seed, setup_.tools->threads)));
  const LoadingMemory memory = loading_memory(engine::kStreamBuffer);
  engine::ReadAhead ahead(memory.bytes, &setup_.tools->threads);
  HuggingFaceWeights weights(*setup_.tools->io, settings_.model, setup_.config, *setup_.layout, ahead);
  load_units(weights.source());
}

void TrainingRun::resume(const std::string& folder) {
  const LoadingMemory memory = loading_memory(setup_.plan.checkpoint_buffers);
  engine::ReadAhead ahead(memory.bytes, &setup_.tools->threads);
  const engine::CheckpointReader checkpoint(*setup_.tools->io, folder, ahead);
  if (ranks_.is_first()) compare_run_record(checkpoint.run(), run_record(setup_, {}), folder);
  run_id_ = json_field<std::string>(checkpoint.run(), "run", folder);
  step_ = saved_step_ = checkpoint.step();
  resume_metrics();
  next_sample_ = json_field<std::uint64_t>(checkpoint.run(), "next_sample", folder);
  skipped_ = json_field<std::uint64_t>(checkpoint.run(), "skipped", folder);
  if (const Json scale = json_field<Json>(checkpoint.run(), "loss_scale", folder);
      loss_scale_.is_dynamic() && !scale.is_null())
    loss_scale_.restore(scale, folder);
  if (ranks_.is_first() && settings_.eval_every != 0 &&
      engine::was_judged_otherwise(engine::list_checkpoints(settings_.out), judge()))
    log().warn(
        "checkpoints in '{}' were validated by other data or another number of batches: the best one is "
        "found anew, and --keep alone says how long those stay; copy what you want to keep",
        settings_.out);
  engine::CheckpointValues values(checkpoint, *setup_.layout, *setup_.optimizer);
  checkpoint_ = folder;
  const auto begin = std::chrono::steady_clock::now();
  if (!load_units(values.source())) return;
  engine_.settle();
  engine_.set_steps(step_ - skipped_);
  if (events_.resumed) events_.resumed(checkpoint_report(begin));
}

// Called before the first step, so that a lack of space for checkpoints is found at once.
void TrainingRun::check_room() const {
  if (settings_.out.empty()) return;
  const std::size_t there = engine::list_checkpoints(settings_.out).whole.size();
  const std::uint64_t saves =
      settings_.save_every == 0 ? 1 : divide_up(settings_.steps, settings_.save_every);
  const std::uint64_t most = std::min<std::uint64_t>(saves + there, most_checkpoints(settings_));
  engine::check_room(settings_.out,
                     setup_.plan.checkpoint_bytes * std::max<std::uint64_t>(1, most - std::min(most, there)));
}

std::string TrainingRun::last_checkpoint() const {
  if (checkpoint_.empty()) return "no checkpoint was written yet";
  return fmt::format("the last checkpoint stands: '{}' (step {}); go on from it with --resume", checkpoint_,
                     saved_step_);
}

void require_finite(double loss) {
  if (!std::isfinite(loss)) fail(ErrorCode::kNotFinite, "the loss is {}: it is not finite", loss);
}

// A loss that is not finite has gradients that are not; with a dynamic scale the engine finds them.
engine::StepResult TrainingRun::apply_or_skip(double loss, bool& skipped) {
  if (!loss_scale_.is_dynamic()) require_finite(loss);
  engine::StepResult result;
  try {
    result = engine_.step();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFinite || !loss_scale_.is_dynamic()) throw;
    loss_scale_.skipped(error.what());
    skipped = true;
    return {std::numeric_limits<double>::infinity(), 1};
  }
  require_finite(loss);
  loss_scale_.applied();
  return result;
}

// Returns the loss of the step, the mean over the targets of all ranks.
double TrainingRun::compute(std::uint64_t number, float scale) {
  const std::span<const MicroBatch> own = setup_.data->training(next_sample_);
  const std::uint64_t targets = ranks_.sum(counted_targets(own));
  const std::vector<double> losses =
      runner_->train_step(own, {settings_.seed, number, targets, scale}, [this] { stop_requested(); });
  RunRanks::Outcome all{losses, stop_};
  if (ranks_.size() > 1)
    waits_.during(engine::Waits::For::kRanks, "the losses of a step", [&] { all = ranks_.combine(all); });
  stops_ = all.stop;
  return loss_of_step(all.losses, targets);
}

double TrainingRun::run_step(std::uint64_t number, StepReport& report) {
  const double rate = learning_rate_.at(number);
  const float scale = loss_scale_.value();
  if (loss_scale_.is_dynamic() || scale != 1) report.loss_scale = scale;
  const Recipe& recipe = setup_.plan.recipe;
  const double rest = rate * adamw_share(recipe);
  engine::StepSettings settings{
      {{rate, recipe.weight_decay}, {rest, 0}, {rest, recipe.weight_decay}}, recipe.clip, 1.0 / scale};
  settings.clip_value = settings_.clip_value;
  engine_.begin_step(settings);
  try {
    const double loss = compute(number, scale);
    report.gradient_norm = apply_or_skip(loss, report.skipped).gradient_norm;
    return loss;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFinite) throw;
    fail(
        ErrorCode::kNotFinite,
        "{}. Try {}a smaller --lr or a longer --warmup; values of the model or the data may also be at fault",
        error.what(), scale > 1 ? fmt::format("a --loss-scale below {:g}, ", scale) : "");
  }
}

StepReport TrainingRun::step() {
  const std::uint64_t number = step_ + 1;
  in_step_ = true;
  StepReport report;
  const auto begin = std::chrono::steady_clock::now();
  report.loss = run_step(number, report);
  last_loss_ = report.loss;
  step_ = number;
  if (report.skipped) ++skipped_;
  in_step_ = false;
  next_sample_ += samples_of_step(settings_);
  const auto end = std::chrono::steady_clock::now();
  report.seconds = std::chrono::duration<double>(end - begin).count();
  describe(report);
  if (!settings_.profile.empty()) series_.add(report, begin, end);
  return report;
}

void TrainingRun::describe(StepReport& report) {
  report.step = step_;
  report.steps = settings_.steps;
  report.learning_rate = learning_rate_.at(step_);
  report.tokens_per_second =
      static_cast<double>(samples_of_step(settings_) * settings_.length) / report.seconds;
  report.memory = allocator::resident_bytes();
  report.peak_memory = allocator::peak_resident_bytes();
  report.predicted_peak = setup_.plan.plan.peak_memory;
  report.budget = settings_.memory;
  if (const offload::RecordStore* disk = assembly_.disk_records()) {
    const offload::RecordStore::Counters now = disk->counters();
    report.disk_read = now.bytes_read - disk_counters_.bytes_read;
    report.disk_written = now.bytes_written - disk_counters_.bytes_written;
    disk_counters_ = now;
  }
  if (ranks_.size() > 1) {
    const comm::Transport::Counters now = ranks_.communicator()->counters();
    report.received = now.received - traffic_.received;
    report.received_from_hosts = now.received_from_hosts - traffic_.received_from_hosts;
    traffic_ = now;
  }
  engine::Engine::Counters now = engine_.counters();
  now.rank_wait_seconds += waits_.rank_seconds() - waits_within_waits_;
  if (neighbours_) now.rank_wait_seconds += neighbours_->waits().rank_seconds();
  for (const auto& axis : {tensor_.get(), sequence_.get()})
    if (axis != nullptr) now.rank_wait_seconds += axis->waits().rank_seconds();
  report.read_wait_seconds = now.read_wait_seconds - engine_counters_.read_wait_seconds;
  report.write_wait_seconds = now.write_wait_seconds - engine_counters_.write_wait_seconds;
  report.rank_wait_seconds = now.rank_wait_seconds - engine_counters_.rank_wait_seconds;
  report.optimizer_seconds = now.optimizer_seconds - engine_counters_.optimizer_seconds;
  engine_counters_ = now;
}

CheckpointReport TrainingRun::checkpoint_report(std::chrono::steady_clock::time_point begin) const {
  return {checkpoint_, setup_.plan.checkpoint_bytes,
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
}

// Validation also runs before each checkpoint, so that the best one kept is known. A run that is to stop
// saves without it.
std::optional<double> TrainingRun::evaluate_if_due() {
  validation_ = nullptr;
  const bool is_due = due(settings_.eval_every) || (!settings_.out.empty() && due(settings_.save_every)) ||
                      step_ == settings_.steps;
  if (settings_.eval_every == 0 || !is_due) return std::nullopt;
  std::vector<double> losses, targets;
  const auto ranks = static_cast<std::uint64_t>(ranks_.data_size());
  for (auto i = static_cast<std::uint64_t>(ranks_.data_rank()); i < settings_.eval_batches; i += ranks) {
    if (ranks_.size() == 1 && stop_requested()) return std::nullopt;
    const MicroBatch& micro_batch = setup_.data->validation(i);
    losses.push_back(runner_->evaluate(micro_batch));
    targets.push_back(static_cast<double>(counted_targets({&micro_batch, 1})));
  }
  const double loss = ranks_.mean(losses, targets, settings_.eval_batches);
  validation_ = engine::validation_record(loss, judge());
  return loss;
}

Json TrainingRun::judge() const {
  Json judge = setup_.data->validation_identity();
  judge["batches"] = settings_.eval_batches;
  return judge;
}

void TrainingRun::save() {
  if (settings_.out.empty() || saved_step_ == step_) return;
  const TraceScope scope(assembly_.trace(), Trace::Lane::kSave, "a checkpoint");
  engine_.settle();
  const auto begin = std::chrono::steady_clock::now();
  engine::CheckpointTensors tensors(*setup_.layout, *setup_.optimizer);
  const std::string config = config_to_hugging_face(setup_.config, settings_.dtype).dump(2) + "\n";
  std::vector<engine::OwnFile> files = copied_files(settings_.model);
  files.push_back({"config.json", {std::as_bytes(std::span(config))}});
  checkpoint_ =
      tensors.save(engine_, *setup_.tools->io, assembly_.ledger(),
                   {.out = settings_.out, .step = step_, .buffer_bytes = setup_.plan.checkpoint_buffers},
                   run_record(setup_, {run_id_, step_, skipped_, next_sample_,
                                       loss_scale_.is_dynamic() ? loss_scale_.state() : Json(), validation_}),
                   files, setup_.files ? ranks_.communicator() : ranks_.of_section(), setup_.files.get());
  saved_step_ = step_;
  if (!ranks_.is_first()) return;
  CheckpointReport report = checkpoint_report(begin);
  report.best = engine::best_checkpoint(engine::list_checkpoints(settings_.out));
  report.removed = engine::prune(settings_.out, settings_.keep,
                                 report.best ? std::optional(report.best->step) : std::nullopt);
  if (events_.saved) events_.saved(report);
}

// If the line cannot be written, a checkpoint is saved, so that the step is not lost; but not with several
// ranks, since one rank cannot save alone.
void TrainingRun::add_metrics(const StepReport& report) {
  try {
    metrics_->add(report);
  } catch (const Error&) {
    if (ranks_.size() == 1) save();
    throw;
  }
}

void TrainingRun::save_trace() {
  try {
    traces_.save(assembly_.trace());
  } catch (const Error& error) {
    fail(error.code(), "step {} is done, but the trace was not written: {}; {}", step_, error.what(),
         last_checkpoint());
  }
}

// The events are appended as text, which takes less memory than Json values.
std::string TrainingRun::profile_text(const std::string& error) {
  const TrainSettings& s = settings_;
  Json json = {{"version", 1},
               {"run",
                {{"id", run_id_},
                 {"rank", ranks_.rank()},
                 {"ranks", ranks_.size()},
                 {"model", s.model},
                 {"dtype", name_of(s.dtype)},
                 {"batch", s.batch},
                 {"accumulate", s.accumulate},
                 {"seq", s.length},
                 {"threads", s.threads},
                 {"optimizer", setup_.optimizer->name()},
                 {"recipe", to_json(setup_.plan.recipe)},
                 {"cpu", cpu_model()},
                 {"kernel", kernel_version()},
                 {"matrix_library", setup_.tools->library->name()}}},
               {"plan", engine::to_json(setup_.plan.plan, setup_.plan.profile, setup_.plan.budget)},
               {"plan_text", plan_text(setup_.plan)},
               {"budget", {{"host", setup_.plan.budget.memory}}},
               {"peaks", ledger_peaks(assembly_.ledger())},
               {"memory", memory_columns(assembly_.ledger(), origin_)},
               {"resident", {{"peak", allocator::peak_resident_bytes()}}},
               {"steps", series_.rows(origin_)},
               {"windows", series_.windows(origin_)}};
  if (!s.disk.empty()) json["budget"]["disk"] = setup_.plan.budget.disk;
  if (!error.empty()) json["run"]["error"] = error;
  EventColumns events = event_columns(*assembly_.trace(), origin_);
  json["lanes"] = std::move(events.lanes);
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.pop_back();
  return text + ",\"events\":" + events.events + "}";
}

void TrainingRun::save_profile(const std::string& error) {
  if (settings_.profile.empty() || !events_.profiled) return;
  try {
    events_.profiled(profile_text(error));
  } catch (const Error& failure) {
    fail(failure.code(), "step {} is done, but the profile was not written: {}; {}", step_, failure.what(),
         last_checkpoint());
  }
}

void TrainingRun::save_reports_after_error(const std::string& error) noexcept {
  try {
    traces_.save_alone(assembly_.trace());
  } catch (const std::exception& failure) {
    log().warn("the trace was not written either: {}", failure.what());
  }
  try {
    save_profile(error);
  } catch (const std::exception& failure) {
    log().warn("the profile was not written either: {}", failure.what());
  }
}

void TrainingRun::run_steps() {
  while (step_ < settings_.steps && !stops()) {
    StepReport report = step();
    report.validation_loss = evaluate_if_due();
    if (events_.step && ranks_.is_first()) events_.step(report);
    if (metrics_) add_metrics(report);
    if (due(settings_.save_every)) save();
  }
}

TrainResult TrainingRun::train() {
  if (events_.begun) events_.begun();
  if (const offload::RecordStore* disk = assembly_.disk_records()) disk_counters_ = disk->counters();
  engine_counters_ = engine_.counters();
  try {
    run_steps();
    save();
    if (ranks_.size() > 1) {
      engine_.settle();
      ranks_.wait_for_all("the end of the run");  // no rank reads from this one afterwards
    }
  } catch (const Error& error) {
    ranks_.fail(error);
    save_reports_after_error(error.what());
    fail(error.code(), "{} step {}: {}; {}", in_step_ ? "in" : "after", step_ + (in_step_ ? 1 : 0),
         error.what(), last_checkpoint());
  }
  save_trace();
  save_profile("");
  TrainResult result;
  result.steps = step_;
  result.last_loss = last_loss_;
  result.peak_memory = allocator::peak_resident_bytes();
  result.predicted_peak = setup_.plan.plan.peak_memory;
  result.skipped = skipped_;
  result.stopped = step_ < settings_.steps;
  if (ranks_.is_first() && !settings_.out.empty())
    result.best = engine::best_checkpoint(engine::list_checkpoints(settings_.out));
  return result;
}

}  // namespace sluice::models
