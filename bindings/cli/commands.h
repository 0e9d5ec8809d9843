#pragma once
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "bindings/cli/flags.h"
#include "bindings/cli/ranks.h"
#include "models/run/trainer.h"
#include "models/text/generate.h"

// The subcommands of `sluice`. Each has functions to bind its flags and to run it, which throw sluice::Error.
namespace sluice::cli {

struct TrainOptions {
  models::TrainSettings settings;
  std::vector<std::string> disk;  // FOLDER[:SIZE], as given
  std::string dtype = "f32", state = "f32", master = "f32", config, progress = "auto";
  std::array<std::optional<std::string>, engine::kParts> places;
  std::string machine;  // for `plan`: the file that describes another machine, or "" for this one
  bool json = false;
  std::optional<int> ranks;         // nothing: those that a launcher has started, or one
  std::optional<std::string> mesh;  // axes of the ranks: "pipeline=4"; or "auto"
  bool chooses_mesh() const { return mesh == "auto"; }
  std::string pipeline = "1f1b";               // the order of a pipeline's passes
  std::optional<int> hosts;                    // number of hosts that a plan's ranks are on; nothing: one
  std::uint64_t silence = 30, patience = 600;  // seconds
  std::uint64_t caller = 0;  // id of the process that started the run and waits for it, or 0
};
void bind_train(CLI::App& app, TrainOptions& options);
void bind_plan(CLI::App& app, TrainOptions& options);        // the same arguments as `train`
void bind_step_bench(CLI::App& app, TrainOptions& options);  // the subset of arguments that shape a step
// Converts options that are words (types, folders, choices) to settings.
void read_choices(const TrainOptions& options, models::TrainSettings& settings);
// Returns the settings of the flags, completed from --config. REQUIRES: `app` has been parsed.
models::TrainSettings finish_settings(CLI::App& app, TrainOptions& options);
// Leaves the run's ranks, if it has several, in `ranks`, so that an error can be reported before they are
// closed. REQUIRES: a StopSignals exists, which was made before any other thread.
void run_train(const models::TrainSettings& settings, const TrainOptions& options,
               std::unique_ptr<Ranks>& ranks, std::FILE* out);
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

// Runs the program. Returns the exit status: 0, or 2 for invalid input, 3 for too small a budget, 1 for any
// other error.
int run(int argc, const char* const* argv);

}  // namespace sluice::cli
