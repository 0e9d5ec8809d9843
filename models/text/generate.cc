#include "models/text/generate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "core/random.h"
#include "core/system.h"
#include "core/text_file.h"
#include "engine/checkpoint/best_checkpoint.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/file_sum.h"
#include "engine/machine/process.h"
#include "engine/machine/tools.h"
#include "engine/planner/planner.h"
#include "engine/saving/checkpoint_values.h"
#include "engine/steps/assembly.h"
#include "engine/steps/scheduled_engine.h"
#include "models/data/tokens.h"
#include "models/families/initialize.h"
#include "models/families/weights.h"
#include "models/model/model.h"
#include "models/run/training_run.h"
#include "offload/disk_folders.h"

namespace sluice::models {
namespace {

constexpr std::uint64_t kSamplingStream = 0x67656e6572617465;  // of random numbers; not used by training

// A placeholder for a model that is not trained.
class NoOptimizer final : public optim::Optimizer {
 public:
  NoOptimizer() : Optimizer(optim::Settings("none")) {}
  std::vector<optim::StateArray> state() const override { return {}; }
  void apply(Threads&, const optim::Hyperparameters&, const optim::Span&) const override {
    fail(ErrorCode::kState, "a model that was opened for reading cannot be trained");
  }
};

std::string best_in(const std::string& given) {
  const std::optional<engine::BestCheckpoint> best = engine::best_checkpoint(engine::list_checkpoints(given));
  if (best) return best->folder;
  fail(ErrorCode::kNotFound,
       "'{}' holds no whole checkpoint with a validation loss; name the --out folder of a run with "
       "--eval-every, or leave --best out",
       given);
}

std::string model_folder(const std::string& given, bool best) {
  const std::filesystem::path path(given);
  if (!std::filesystem::is_directory(path))
    fail(ErrorCode::kNotFound,
         "'{}' is not a folder; name a checkpoint, an --out folder or a Hugging Face folder", given);
  if (best) return best_in(given);
  if (std::filesystem::exists(path / "config.json")) return given;
  const engine::CheckpointList list = engine::list_checkpoints(given);
  if (list.whole.empty())
    fail(ErrorCode::kNotFound, "'{}' holds neither a config.json nor a whole checkpoint", given);
  return list.whole.back().path;
}

// Verifies a checkpoint's config.json: with a changed one the weights would be another model's.
void check_config_file(const std::string& folder) {
  const std::string manifest = (std::filesystem::path(folder) / engine::kManifestFile).string();
  if (!std::filesystem::exists(manifest)) return;
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  engine::FileSummer found;
  const std::string text = read_text_file(path);
  found.add(std::as_bytes(std::span(text)));
  const engine::FileSum sum = found.finish();
  for (const engine::CheckpointFile& file : engine::Manifest::parse(read_text_file(manifest), manifest).files)
    if (file.name == "config.json" && file.sum != sum)
      fail(ErrorCode::kCorrupt,
           "'{}' is not what was written with this checkpoint: it is damaged or was edited; put the written "
           "one back, or use another checkpoint",
           path);
}

void check_generate_settings(const GenerateSettings& s) {
  if (!std::isfinite(s.temperature) || s.temperature < 0)
    fail(ErrorCode::kInvalidArgument, "temperature must be 0 or more, {} was given", s.temperature);
  if (!std::isfinite(s.top_p) || s.top_p <= 0 || s.top_p > 1)
    fail(ErrorCode::kInvalidArgument, "top-p must be above 0 and at most 1, {} was given", s.top_p);
}

std::int32_t parse_token(std::string_view word, std::size_t vocabulary) {
  std::size_t id = 0;
  const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), id);
  if (error != std::errc() || rest != word.data() + word.size() || id >= vocabulary)
    fail(ErrorCode::kInvalidArgument,
         "'{}' is not a token id below {}, the model's vocabulary; ids are given as '464 318' or '464,318', "
         "also to --prompt where the model's tokens are not bytes (python -m sluice generate --tokenizer "
         "FOLDER takes text)",
         word, vocabulary);
  return static_cast<std::int32_t>(id);
}

std::vector<std::int32_t> tokens_of_bytes(const std::string& prompt) {
  std::vector<std::int32_t> tokens;
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  if (tokens.empty()) tokens.push_back('\n');
  return tokens;
}

std::vector<std::int32_t> tokens_of_ids(const std::string& ids, std::size_t vocabulary) {
  std::vector<std::int32_t> tokens;
  constexpr std::string_view kBlanks = " ,\t\n";
  for (std::size_t at = ids.find_first_not_of(kBlanks); at != std::string::npos;) {
    const std::size_t end = std::min(ids.find_first_of(kBlanks, at), ids.size());
    tokens.push_back(parse_token(std::string_view(ids).substr(at, end - at), vocabulary));
    at = ids.find_first_not_of(kBlanks, end);
  }
  return tokens;
}

std::vector<std::int32_t> prompt_of(const GenerateSettings& s, std::size_t vocabulary, bool bytes) {
  if (s.prompt_tokens && !s.prompt.empty())
    fail(ErrorCode::kInvalidArgument, "--prompt and --prompt-tokens are given; one prompt is needed");
  if (!s.prompt_tokens && bytes) return tokens_of_bytes(s.prompt);
  std::vector<std::int32_t> tokens = tokens_of_ids(s.prompt_tokens.value_or(s.prompt), vocabulary);
  if (tokens.empty())
    fail(ErrorCode::kInvalidArgument,
         "there is no token to go on from: give {} at least one token id, as '464'",
         s.prompt_tokens ? "--prompt-tokens" : "--prompt (this model's tokens are not bytes)");
  return tokens;
}

// Returns the number of a text's last tokens that the next one depends on.
std::uint64_t window_of(const GenerateSettings& s, const ModelConfig& config,
                        const std::optional<std::uint64_t>& learned, std::uint64_t text) {
  constexpr std::uint64_t kUnstated = 1024;
  if (!s.window) {
    const std::uint64_t window = std::min<std::uint64_t>(config.context, learned.value_or(kUnstated));
    if (text > window && window < config.context)
      log().info(
          "each token follows from the last {}{}; --window says how many, up to the model's context of {}",
          window, learned ? ", as many as the model has learned from at once" : "", config.context);
    return window;
  }
  if (*s.window == 0 || *s.window > config.context)
    fail(ErrorCode::kInvalidArgument, "--window is {}; it may be 1 to {}, the model's context", *s.window,
         config.context);
  if (learned && *s.window > *learned)
    log().warn(
        "--window is {}, and the model has learned from {} tokens at once: what follows from more may be "
        "noise",
        *s.window, *learned);
  return *s.window;
}

// A model for inference: its units are fetched one after another, from wherever the plan puts them.
class Reader {
 public:
  // length: the most tokens that the next one depends on.
  Reader(const GenerateSettings& settings, const std::string& folder, const ModelConfig& config,
         std::uint64_t length)
      : tools_(settings.threads == 0 ? usable_cpus() : settings.threads, offload::IoOptions{}),
        model_(config, Dtype::kF32, 1, length) {
    engine::Planned planned;
    planned.disk = settings.disk;
    offload::resolve_disk(planned.disk, "", 0);
    planned.profile = model_.profile(1, *tools_.library);
    planned.profile.workspace_bytes += model_.text_cache_bytes(model_.length());
    std::erase_if(planned.profile.schedule,
                  [](const engine::Access& access) { return access.gradient_use >= 0; });
    planned.checkpoint_buffers = engine::kStreamBuffer;
    planned.budget = {settings.memory == 0 ? engine::default_memory() : settings.memory,
                      offload::usable_disk(planned.disk), tools_.base() + planned.checkpoint_buffers};
    planned.request.flags = true;
    planned.request.trains = false;
    planned.plan =
        engine::make_plan(planned.profile, optimizer_, planned.budget, planned.request, planned.rates);
    assembly_.emplace(planned, engine::Ground::Means{tools_.threads, *tools_.io, optimizer_},
                      engine::Ground::Options{});
    runner_ = std::make_unique<Runner>(model_, planned.plan, assembly_->engine(), tools_.threads,
                                       *tools_.library, assembly_->ledger());
    runner_->keep_text(model_.length());
    load(folder);
  }

  std::size_t length() const { return model_.length(); }
  void next_logits(std::span<const std::int32_t> tokens, std::span<float> logits) {
    runner_->next_logits(tokens, logits);
  }

 private:
  void load(const std::string& folder) {
    engine::Engine& engine = assembly_->engine();
    allocator::Region buffer(assembly_->ledger(), allocator::Purpose::kCheckpoint, engine::kStreamBuffer);
    engine::ReadAhead ahead(buffer.bytes());
    if (std::filesystem::exists(std::filesystem::path(folder) / engine::kManifestFile)) {
      const engine::CheckpointReader checkpoint(*tools_.io, folder, ahead);
      engine::CheckpointValues values(checkpoint, engine.layout());
      load_units(engine, values.source());
    } else {
      HuggingFaceWeights weights(*tools_.io, folder, model_.config(), engine.layout(), ahead);
      load_units(engine, weights.source());
    }
  }

  static void load_units(engine::Engine& engine, const engine::UnitSource& source) {
    for (engine::UnitId unit = 0; unit < engine.layout().units().size(); ++unit) engine.load(unit, source);
  }

  engine::Tools tools_;
  Model model_;
  NoOptimizer optimizer_;
  std::optional<engine::Assembly<engine::ScheduledEngine>> assembly_;
  std::unique_ptr<Runner> runner_;
};

}  // namespace

void generate(const GenerateSettings& settings, const GenerateEvents& events) {
  check_generate_settings(settings);
  const std::string folder = model_folder(settings.checkpoint, settings.best);
  check_config_file(folder);
  const ModelConfig config = resolve_model(folder);
  if (begins_with_first_values(folder))
    fail(ErrorCode::kInvalidArgument,
         "'{}' has a config.json and no weights; train it (sluice train --model {} --out RUN), and name that "
         "--out folder",
         folder, folder);
  const LearnedFrom learned = learned_from(folder);
  const bool bytes = config.vocabulary == kByteVocabulary || learned.bytes;
  std::vector<std::int32_t> tokens = prompt_of(settings, config.vocabulary, bytes);
  // The last sampled token is not read again.
  const std::uint64_t text = tokens.size() + std::max<std::uint64_t>(settings.tokens, 1) - 1;
  Reader reader(settings, folder, config, std::min(text, window_of(settings, config, learned.length, text)));
  if (events.begin) events.begin(bytes);
  const CounterRandom random(settings.seed, kSamplingStream);
  std::vector<float> logits(config.vocabulary);
  // A model of bytes may have a larger vocabulary, whose other tokens it has never seen.
  const std::span<const float> known = std::span(logits).first(bytes ? kByteVocabulary : logits.size());
  for (std::uint64_t i = 0; i < settings.tokens; ++i) {
    const std::size_t used = std::min(tokens.size(), reader.length());
    reader.next_logits(std::span(tokens).last(used), logits);
    const double uniform = to_unit_interval(random.block(i)[0]);
    tokens.push_back(sample_token(known, {settings.temperature, settings.top_k, settings.top_p}, uniform));
    if (events.token) events.token(tokens.back());
  }
}

}  // namespace sluice::models
