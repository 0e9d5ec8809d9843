#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "bindings/cli/commands.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "offload/disk_folders.h"

namespace sluice::cli {
namespace {

// Binds the flags that define the computation of a step.
void bind_shape(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.choice("--dtype", options.dtype, {"f32", "bf16", "f16"}, "type of parameters and activations");
  flags.whole("--seq", s.length, "tokens in a sequence; 0 for the model's context, at most 1024");
  flags.whole("--batch", s.batch, "sequences in a micro-batch");
  flags.whole("--accumulate", s.accumulate, "micro-batches in a step, of all ranks together");
}

void bind_model_and_data(Flags& flags, models::TrainSettings& s) {
  flags.group("Model and data");
  flags.text("--model", s.model,
             "a preset (tiny, gpt2-124m, ..., llama-70b) or a Hugging Face folder; with config.json alone it "
             "trains from first values");
  flags.texts("--data", s.data,
              "text files and folders (bytes as tokens), or .bin token files of llm.c and nanoGPT; sluice "
              "plan needs none");
  flags.choice(
      "--tokens", s.tokens, {"auto", "bytes"},
      "bytes makes each byte a token; a preset then gets a vocabulary of 256, a folder without weights keeps "
      "its own");
  flags.text("--valid", s.validation, "file for validation (a part of the data that is held out)");
  flags.real("--held-out", s.held_out, "share of the data that is held out for validation");
  flags.whole("--seed", s.seed, "seed of first values, of the order of the data and of dropout");
}

void bind_memory(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.group("Memory and machine");
  flags.size("--memory", s.memory, "limit of the whole process (what is free)");
  flags.texts("--disk", options.disk,
              "FOLDER or FOLDER:SIZE that lends disk space; data is striped over several");
  flags.text("--recompute", s.plan.recompute, "auto, none, full, or names of ops joined by +");
  flags.whole("--threads", s.threads, "compute threads (the cores that this process may use)");
}

void bind_mesh(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.text(
      "--mesh", options.mesh,
      "axes of the ranks, as data=2,pipeline=4,tensor=2: along pipeline the model is cut into stages of "
      "consecutive blocks, along tensor each layer by its heads, hidden columns and vocabulary, along "
      "sequence "
      "the length of each sequence; along data ranks have the same and other micro-batches (data=N alone is "
      "--ranks N). auto plans the meshes of --ranks N ranks, and takes the one with the shortest step, or a "
      "simpler one whose step is at most a tenth longer");
  flags.choice("--pipeline", options.pipeline, {"1f1b", "gpipe", "zb-h1"},
               "order of the stages' passes: 1f1b holds fewer micro-batches, gpipe waits less for messages, "
               "zb-h1 has no stage wait for gradients of weights, and takes more memory than 1f1b");
  flags.whole(
      "--chunks", s.chunks,
      "chunks of consecutive blocks that each stage has: with more than one stages are interleaved, wait "
      "less, and send more",
      1);
  flags.text("--stages", s.stages,
             "the blocks of each stage, as 0-7,8-15, and with --chunks of its chunks: the first ones of all "
             "stages, then the second ones (what makes a step short)");
}

void bind_ranks(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.group("Ranks");
  flags.whole(
      "--ranks", options.ranks,
      "processes of this machine that train the model together; memory, disk and threads are those of "
      "each one, and by default its share of the machine (mpirun and srun say how many there are; 1 lets "
      "each "
      "of theirs train alone)");
  flags.whole(
      "--stage", s.plan.stage,
      fmt::format(
          "what is partitioned over the ranks, from 0 (nothing) to {}, for all units (chosen unit by unit)",
          engine::kMostStage));
  flags.toggle(
      "--reproducible", s.plan.reproducible,
      "the same bits on one rank and on several: gradients are added pairwise over the micro-batches of all, "
      "and layers are computed in --grain pieces, sequences in --sequence-grain");
  flags.whole(
      "--grain", s.grain,
      "with --reproducible, the pieces that a layer is cut into, at any size of --mesh's tensor that divides "
      "them (up to 4, by the key/value heads)");
  flags.whole(
      "--sequence-grain", s.sequence_grain,
      "with --reproducible, the pieces that a sequence is cut into, at any size of --mesh's sequence that "
      "divides them (1)");
  flags.seconds("--silence", options.silence, "seconds without a sign of life after which a rank has failed");
  flags.seconds("--patience", options.patience,
                "seconds after which a rank has failed that lives and does not take part");
}

void bind_setting(Flags& flags, const optim::Setting& setting, const std::string& help, Json& settings) {
  const std::string name(setting.name);
  std::string flag = name;
  std::ranges::replace(flag, '_', '-');
  const Flags::Set set = [&settings, name](const Json& value) { settings[name] = value; };
  switch (type_of(setting.range)) {
    case optim::SettingType::kSwitch:
      flags.toggles(flag, set, help);
      return;
    case optim::SettingType::kChoice:
      flags.choice("--" + flag, set, setting.choices, help);
      return;
    case optim::SettingType::kNumber:
      flags.real("--" + flag, set, help);
      return;
  }
}

// Names the setting's optimizers with their defaults in training: "for sgd (0), muon (0.95): ...".
std::string help_of(const optim::Setting& setting) {
  std::vector<std::string> owners;
  for (const optim::SettingOwner& owner : setting.owners) {
    const Json& value = owner.in_training();
    owners.push_back(fmt::format("{} ({})", owner.optimizer,
                                 value.is_string()    ? value.get<std::string>()
                                 : value.is_boolean() ? value.dump()
                                                      : fmt::format("{}", value.get<double>())));
  }
  return fmt::format("for {}: {}", fmt::join(owners, ", "), setting.help);
}

// Adds a flag for each name in the optimizers' table.
void bind_settings(Flags& flags, Json& settings) {
  std::map<std::string_view, std::string> help;
  for (const optim::Setting& setting : optim::setting_table()) {
    std::string& text = help[setting.name];
    text += (text.empty() ? "" : "; ") + help_of(setting);
  }
  for (const optim::Setting& setting : optim::setting_table())
    if (const auto text = help.extract(setting.name)) bind_setting(flags, setting, text.mapped(), settings);
}

void bind_optimizer(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.real("--clip", s.clip, "upper bound of the gradient's global norm (1); 0 for none");
  flags.real("--clip-value", s.clip_value,
             "upper bound of the size of the gradient's elements, after --clip; 0 for none");
  flags.text("--loss-scale", s.loss_scale, "dynamic, or a number (dynamic with --dtype f16, else 1)");
  flags.real("--initial-scale", s.initial_scale, "first value of a dynamic loss scale (65536)");
  flags.whole("--scale-growth-interval", s.scale_growth_interval,
              "consecutive steps after which a dynamic loss scale doubles (2000)");
  optim::OptimizerSettings& optimizer = s.optimizer;
  flags.choice("--optimizer", optimizer.name, optim::optimizer_names(),
               "optimizer that updates the parameters");
  bind_settings(flags, optimizer.settings);
  flags.choice("--state", options.state, optim::state_type_names(), "type of the optimizer's state");
  flags.choice("--master", options.master, {"f32", "none"},
               "f32 gives parameters that are not f32 an f32 copy; none rounds bf16 ones stochastically");
}

void bind_steps(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.group("Steps");
  bind_shape(flags, s, options);
  flags.whole("--steps", s.steps, "steps of the whole run");
  flags.real("--lr", s.learning_rate,
             "learning rate (by optimizer and size: for adamw from 1.3e-3 for 1 million parameters in "
             "blocks, over 6e-4 for 85 and 2e-4 for 1,200, to 6e-5 for 175,000, and a tenth of it for a "
             "folder with weights; docs/optimizers.md has the whole rule)");
  flags.real(
      "--adamw-lr", s.adamw_learning_rate,
      "learning rate of the parameters that muon leaves to adamw: vectors, embedding and head (--lr; with "
      "--muon-scale original the rate that adamw would have)");
  flags.whole("--warmup", s.warmup,
              "steps over which the learning rate rises (a tenth of --steps, from 40 to 2000)");
  flags.choice("--schedule", s.schedule, {"constant", "cosine", "linear"},
               "how the learning rate goes on after that (cosine)");
  flags.real("--final-lr", s.final_learning_rate, "share of the learning rate that is left at the end (0.1)");
  flags.real(
      "--weight-decay", s.weight_decay,
      "weight decay of matrices, while biases and norms have none (adamw, muon 0.1; lion 0.3; others 0)");
  bind_optimizer(flags, s, options);
}

void bind_output(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.group("Output");
  flags.text("--out", s.out, "folder for checkpoints; without it none are written");
  flags.whole("--save-every", s.save_every, "steps between checkpoints; 0 for one at the end only");
  flags.whole(
      "--keep", s.keep,
      "how many of the newest checkpoints are kept; with --eval-every the one of least validation loss, too");
  flags.toggle("--resume", s.resume, "go on from the newest whole checkpoint in --out");
  flags.whole("--eval-every", s.eval_every,
              "steps between validations, besides the one before each checkpoint; 0 for none");
  flags.whole("--eval-batches", s.eval_batches, "micro-batches in a validation");
  flags.text("--metrics", s.metrics, "FILE.jsonl that gets a line for each step");
  flags.text("--trace", s.trace, "FILE.json for Perfetto, which shows what ran when");
  flags.text("--profile", s.profile,
             "FILE.html with a report: memory over time, what moved and stalled, plan and measurement");
  flags.choice("--progress", options.progress, {"auto", "bar", "lines", "none"}, "how steps are shown");
  flags.text("--config", options.config, "JSON file with the same names (save_every); flags win over it");
}

void bind_placement(Flags& flags, models::TrainSettings& s, TrainOptions& options) {
  flags.group("Placement, for tests and measurements (the plan chooses what is not given)");
  flags.whole("--group", s.plan.group, "micro-batches that pass through a unit together");
  flags.whole("--prefetch", s.plan.prefetch, "how many accesses are fetched ahead, at most 64");
  flags.whole("--chunk-elements", s.plan.chunk_elements,
              fmt::format("elements in a chunk of a streamed update, a multiple of {}", engine::kChunkGrain));
  flags.choice("--place-parameters", options.places[0], {"memory", "disk"},
               "where every unit's parameters are");
  flags.choice("--place-gradients", options.places[1], {"memory", "disk"},
               "where every unit's gradients are");
  flags.choice("--place-state", options.places[2], {"memory", "disk"},
               "where every unit's optimizer state is");
}

void bind_all(CLI::App& app, TrainOptions& options) {
  Flags flags(app);
  bind_model_and_data(flags, options.settings);
  bind_steps(flags, options.settings, options);
  bind_memory(flags, options.settings, options);
  bind_ranks(flags, options.settings, options);
  bind_mesh(flags, options.settings, options);
  bind_output(flags, options.settings, options);
  bind_placement(flags, options.settings, options);
}

}  // namespace

void bind_train(CLI::App& app, TrainOptions& options) {
  bind_all(app, options);
  Flags(app).whole(
      "--stop-with", options.caller,
      "for programs: stop, as by SIGTERM, when the process with this id, which started this one, ends");
  Flags(app).text("--machine", options.machine, "only for sluice plan, since a run trains on this machine");
}

void bind_plan(CLI::App& app, TrainOptions& options) {
  bind_all(app, options);
  Flags(app).text(
      "--machine", options.machine,
      "FILE of another machine, written there by sluice doctor --json: plans for that machine and examines "
      "nothing here; --disk then names its disks");
  Flags(app).link(
      "--link", options.settings.link,
      "what joins the ranks, or with --hosts the hosts: bandwidth in each direction, and latency, as "
      "in 100Gbit/s,5us (sending takes no time)");
  Flags(app).link("--link-host", options.settings.host_link,
                  "what joins the ranks of one host, in the same way (--link where there is one host, and "
                  "otherwise that takes no time)");
  Flags(app).whole(
      "--hosts", options.hosts,
      "machines that share the ranks evenly, neighbours on one; --link is what joins them then (1)");
  Flags(app).toggle("--json", options.json, "print the plan as JSON");
}

void bind_step_bench(CLI::App& app, TrainOptions& options) {
  Flags flags(app);
  flags.group("The step");
  bind_shape(flags, options.settings, options);
  bind_optimizer(flags, options.settings, options);
  bind_memory(flags, options.settings, options);
  bind_placement(flags, options.settings, options);
}

void read_choices(const TrainOptions& options, models::TrainSettings& settings) {
  for (const std::string& disk : options.disk) settings.disk.push_back(offload::parse_disk(disk));
  settings.dtype = *dtype_from_name(options.dtype);
  settings.chooses_mesh = options.chooses_mesh();
  if (options.mesh && !settings.chooses_mesh) settings.mesh = comm::Mesh::parse(*options.mesh);
  settings.pipeline = engine::pipeline_order(options.pipeline);
  if (settings.mesh && options.ranks && *options.ranks != settings.mesh->ranks())
    fail(ErrorCode::kInvalidArgument, "--mesh {} is of {} ranks, and --ranks is {}; leave --ranks out",
         *options.mesh, settings.mesh->ranks(), *options.ranks);
  for (std::size_t part = 0; part < engine::kParts; ++part)
    if (options.places[part]) settings.plan.places[part] = engine::tier_of_place(*options.places[part]);
  settings.optimizer.storage = {*optim::state_type_from_name(options.state), options.master == "f32",
                                settings.seed};
  if (settings.plan.recompute == "auto") settings.plan.recompute.reset();
}

models::TrainSettings finish_settings(CLI::App& app, TrainOptions& options) {
  if (!options.config.empty()) apply_config(app, read_json_file(options.config), options.config);
  models::TrainSettings settings = options.settings;
  settings.source = options.config;
  if (settings.model.empty())
    fail(ErrorCode::kInvalidArgument, "--model is missing: name a preset ({}) or a Hugging Face folder",
         fmt::join(models::preset_names(), ", "));
  read_choices(options, settings);
  return settings;
}

}  // namespace sluice::cli
