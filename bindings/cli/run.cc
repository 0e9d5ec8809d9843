#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <optional>

#include "bindings/cli/bench.h"
#include "bindings/cli/commands.h"
#include "bindings/cli/local_ranks.h"
#include "bindings/cli/signals.h"
#include "bindings/cli/version.h"
#include "comm/mpi_links.h"
#include "core/error.h"
#include "core/log.h"
#include "core/printable.h"
#include "kernels/targets.h"

namespace sluice::cli {
namespace {

// The flags and subcommands, with the options that they set.
struct Program {
  CLI::App app{"Sluice trains transformers that do not fit in memory, within the memory that you state.",
               "sluice"};
  TrainOptions train, plan;
  GenerateOptions generate;
  InspectOptions inspect;
  DoctorOptions doctor;
  BenchOptions bench;
  CLI::App* train_app = app.add_subcommand("train", "train a model within a memory budget");
  CLI::App* plan_app =
      app.add_subcommand("plan", "show what would go where, and how long a step takes; trains nothing");
  CLI::App* generate_app = app.add_subcommand("generate", "sample text from a checkpoint");
  CLI::App* inspect_app =
      app.add_subcommand("inspect", "show a checkpoint, tensors, metrics, a trace or tokens");
  CLI::App* doctor_app =
      app.add_subcommand("doctor", "tell what this machine offers, and what to do about what is missing");
  CLI::App* bench_app = app.add_subcommand("bench", "measure this machine, and what Sluice makes of it");
  std::string log_level = "info", errors = "text";
  // For a run that trains. It lives until an error has been reported: when a rank dies, a launcher sends
  // SIGTERM to the others while they are about to report that.
  std::optional<StopSignals> signals;
  // They live as long, since closing them may wait for ranks that are lost.
  std::unique_ptr<Ranks> ranks;

  Program() {
    app.set_version_flag("--version", fmt::format("sluice {}", kVersion));
    add_bench_commands(*bench_app);
    bind_common(app);  // first, so that --errors applies to errors in the other arguments
    bind_train(*train_app, train);
    bind_plan(*plan_app, plan);
    bind_generate(*generate_app, generate);
    bind_inspect(*inspect_app, inspect);
    bind_doctor(*doctor_app, doctor);
    bind_bench(*bench_app, bench);
  }

  // Adds the flags to the command and to all of its subcommands.
  void bind_common(CLI::App& command) {
    command.allow_extras();
    Flags flags(command);
    flags.text("--log-level", log_level, "debug, info, warn, error or off");
    flags.choice("--errors", errors, {"text", "json"},
                 "json, for programs, makes an error the last line of the standard error output");
    for (CLI::App* below : command.get_subcommands([](const CLI::App*) { return true; })) bind_common(*below);
  }
};

[[noreturn]] void refuse_command(const CLI::App& app) {
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    known.push_back(command->get_name());
  const std::vector<std::string> words = app.remaining();
  if (words.empty())
    fail(ErrorCode::kInvalidArgument, "say what to do: sluice {}; see sluice --help", fmt::join(known, ", "));
  const std::string nearest = nearest_word(words.front(), known);
  fail(ErrorCode::kInvalidArgument, "'{}' is not one of {}{}", words.front(), fmt::join(known, ", "),
       nearest.empty() ? "" : fmt::format("; the nearest is {}", nearest));
}

// Also works before the ranks have joined.
int rank_of_this_process() {
  try {
    if (const auto launcher = comm::find_mpi_launcher()) return launcher->rank;
  } catch (const Error&) {  // reported where ranks join
  }
  return LocalRanks::own_rank();
}

void dispatch(Program& program) {
  set_log_level(program.log_level);
  if (const int rank = rank_of_this_process(); rank > 0) set_log_rank(rank);
  kernels::limit_targets();
  const auto chosen = program.app.get_subcommands();
  if (chosen.size() != 1) refuse_command(program.app);
  refuse_unknown(*chosen.front());
  refuse_repeated(program.app);
  refuse_repeated(*chosen.front());
  if (chosen.front() == program.train_app) {
    const models::TrainSettings settings = finish_settings(*program.train_app, program.train);
    program.signals.emplace();
    return run_train(settings, program.train, program.ranks, stdout);
  }
  if (chosen.front() == program.plan_app)
    return run_plan(finish_settings(*program.plan_app, program.plan), program.plan, stdout);
  if (chosen.front() == program.generate_app) return run_generate(program.generate, stdout);
  if (chosen.front() == program.inspect_app) return run_inspect(program.inspect, stdout);
  if (chosen.front() == program.bench_app) return run_bench(*program.bench_app, program.bench, stdout);
  run_doctor(program.doctor, stdout);
}

std::string error_line(const std::string& style, ErrorCode code, const std::string& text) {
  if (style == "json") {
    const Json line = {{"error", name_of(code)}, {"text", text}};
    return line.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  const int rank = rank_of_this_process();
  return fmt::format("sluice: {}error: {}", rank > 0 ? fmt::format("rank {}: ", rank) : "", text);
}

// If the text cannot be written, the exit status still tells the kind of error.
int report(Program& program, ErrorCode code, const std::string& text) {
  StopSignals::begin_steps();  // a signal from here on does not end the program as if there were no error
  std::fflush(stdout);
  if (program.errors == "json") program.ranks.reset();  // which may warn, and the error is the last line
  tell_on_stderr(error_line(program.errors, code, printable(text)) + "\n");
  return exit_status(code);
}

// Occupies closed standard streams: otherwise a file that this process opens, such as a checkpoint, could get
// the stream's number and its output. Writing to the stream still fails.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0)
      (void)!::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int run(Program& program, int argc, const char* const* argv) {
  try {
    program.app.parse(argc, argv);
  } catch (const CLI::ArgumentMismatch& error) {  // "--steps: 1 required N missing"
    const std::string text = error.what();
    fail(ErrorCode::kInvalidArgument, "{} needs a value behind it; see --help",
         text.substr(0, text.find(':')));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.app.exit(error);  // --help and --version
    throw Error(ErrorCode::kInvalidArgument, error.what());
  }
  dispatch(program);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    fail(ErrorCode::kIo, "the standard output could not be written, so part of the output is lost");
  return 0;
}

}  // namespace

int run(int argc, const char* const* argv) {
  occupy_closed_streams();
  // For a closed pipe or a file-size limit the write must fail, which is reported, instead of ending the run.
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);
  Program program;
  try {
    return run(program, argc, argv);
  } catch (const Error& error) {
    return report(program, error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return report(program, ErrorCode::kBudget,
                  "the system gave no memory for a small object; free some, or state a smaller --memory");
  } catch (const std::exception& error) {
    return report(program, ErrorCode::kInternal, error.what());
  }
}

}  // namespace sluice::cli
