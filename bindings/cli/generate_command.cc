#include <cstdio>

#include "bindings/cli/commands.h"
#include "core/error.h"
#include "core/printable.h"
#include "offload/disk_folders.h"

namespace sluice::cli {

void bind_generate(CLI::App& app, GenerateOptions& options) {
  Flags flags(app);
  models::GenerateSettings& s = options.settings;
  flags.text("--checkpoint", s.checkpoint,
             "a checkpoint, an --out folder (for its newest one) or a Hugging Face folder");
  flags.toggle("--best", s.best, "take the checkpoint of an --out folder that has the least validation loss");
  flags.text("--prompt", s.prompt,
             "text to continue; token ids, as '464 318', for a model whose tokens are not bytes");
  flags.text("--prompt-tokens", s.prompt_tokens, "token ids to continue, as '464,318', in place of --prompt");
  flags.choice(
      "--output", options.output, {"auto", "tokens"},
      "auto prints text where the model's tokens are bytes; tokens prints the sampled ids, one a line");
  flags.whole("--tokens", s.tokens, "how many tokens to sample");
  flags.whole(
      "--window", s.window,
      "the most tokens that the next one follows from (as many as the model has learned from at once)");
  flags.real("--temperature", s.temperature, "1 samples as the model says, 0 takes the likeliest token");
  flags.whole("--top-k", s.top_k, "sample from the k likeliest tokens only; 0 for all");
  flags.real("--top-p", s.top_p, "sample from the likeliest tokens that have this probability together");
  flags.whole("--seed", s.seed, "the same seed gives the same text");
  flags.size("--memory", s.memory, "limit of the whole process (what is free)");
  flags.texts("--disk", options.disk, "FOLDER or FOLDER:SIZE, for a model that is larger than memory");
  flags.whole("--threads", s.threads, "compute threads (the cores that this process may use)");
}

void run_generate(GenerateOptions& options, std::FILE* out) {
  if (options.settings.checkpoint.empty())
    fail(ErrorCode::kInvalidArgument,
         "--checkpoint is missing: name a checkpoint, an --out folder or a Hugging Face folder");
  for (const std::string& disk : options.disk) options.settings.disk.push_back(offload::parse_disk(disk));
  models::GenerateEvents events;
  const bool lines = options.output == "tokens";
  bool bytes = false;
  events.begin = [&](bool tokens_are_bytes) {
    bytes = tokens_are_bytes && !lines;
    if (bytes) {
      fmt::print(out, "{}", options.settings.prompt);
    } else if (!lines) {
      tell_on_stderr("sluice: this model's tokens are not bytes, so token ids are printed\n");
    }
  };
  events.token = [&](std::int32_t token) {
    if (bytes) {
      std::fputc(token, out);
    } else {
      fmt::print(out, "{}{}", token, lines ? '\n' : ' ');
    }
    std::fflush(out);
  };
  models::generate(options.settings, events);
  if (!lines) fmt::print(out, "\n");
}

}  // namespace sluice::cli
