#pragma once
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "bindings/cli/flags.h"
#include "models/run/trainer.h"
#include "models/text/generate.h"

// The subcommands of `sluice`: each binds its flags to its options, and runs. All throw sluice::Error.
namespace sluice::cli {

struct TrainOptions {
  models::TrainSettings settings;
  std::vector<std::string> disk;  // FOLDER[:SIZE], as written
  std::string dtype = "f32", state = "f32", master = "f32", config, progress = "auto";
  std::array<std::optional<std::string>, engine::kParts> places;
  std::string machine;  // of plan: the file of another one; empty: this one
  bool json = false;
  std::uint64_t caller = 0;  // the process that started this one for the run's sake; 0: none
};
void bind_train(CLI::App& app, TrainOptions& options);
void bind_plan(CLI::App& app, TrainOptions& options);        // the same arguments
void bind_step_bench(CLI::App& app, TrainOptions& options);  // those of them that shape a step
// What is not yet a setting becomes one: words for types, folders and choices.
void read_choices(const TrainOptions& options, models::TrainSettings& settings);
// What the flags, and the file of --config below them, say. `app` has been parsed.
models::TrainSettings finish_settings(CLI::App& app, TrainOptions& options);
offload::DiskFolder parse_disk(const std::string& text);
void run_train(const models::TrainSettings& settings, const TrainOptions& options, std::FILE* out);
void run_plan(const models::TrainSettings& settings, const TrainOptions& options, std::FILE* out);

struct GenerateOptions {
  models::GenerateSettings settings;
  std::vector<std::string> disk;
  std::string output = "auto";
};
void bind_generate(CLI::App& app, GenerateOptions& options);
void run_generate(GenerateOptions& options, std::FILE* out);

struct InspectOptions {
  std::string path;
  bool json = false, verify = false, values = false;
};
void bind_inspect(CLI::App& app, InspectOptions& options);
void run_inspect(const InspectOptions& options, std::FILE* out);

struct DoctorOptions {
  std::vector<std::string> disk;
  bool json = false;
};
void bind_doctor(CLI::App& app, DoctorOptions& options);
void run_doctor(const DoctorOptions& options, std::FILE* out);

// The whole program; returns its exit status: 0, 2 for bad input, 3 for what does not fit, 1 for anything
// else.
int run(int argc, const char* const* argv);

}  // namespace sluice::cli
