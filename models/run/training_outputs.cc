#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/descriptor.h"
#include "core/error.h"
#include "models/run/profile.h"
#include "models/run/rank_files.h"
#include "models/run/rank_traces.h"
#include "models/run/training_setup.h"

namespace sluice::models {
namespace {

namespace fs = std::filesystem;

struct Output {
  std::string flag, path;
};

fs::path plain(const std::string& path) {
  std::error_code ignored;
  const fs::path found = fs::weakly_canonical(fs::absolute(path), ignored);
  return found.empty() ? fs::absolute(path).lexically_normal() : found;
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return plain(a) == plain(b) || fs::equivalent(a, b, ignored);
}

bool lies_in(const std::string& path, const std::string& folder) {
  const fs::path below = plain(path).lexically_relative(plain(folder));
  return !below.empty() && *below.begin() != "..";
}

void refuse_input(const Output& output, const char* flag, const std::string& input) {
  if (same_file(output.path, input))
    fail(ErrorCode::kInvalidArgument, "{} '{}' is the file of {}, which would be lost; name another file",
         output.flag, output.path, flag);
  if (fs::is_directory(input) && lies_in(output.path, input))
    fail(ErrorCode::kInvalidArgument,
         "{} '{}' lies in the folder of {}, where it would become a part of the data; name another place",
         output.flag, output.path, flag);
}

void refuse_inputs(const Output& output, const TrainSettings& settings) {
  for (const std::string& data : settings.data) refuse_input(output, "--data", data);
  if (settings.validation) refuse_input(output, "--valid", *settings.validation);
  if (!settings.source.empty()) refuse_input(output, "--config", settings.source);
}

// Opens the file for writing, since permissions and file systems cannot be predicted. Leaves no new file.
void probe(const Output& output) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC;
  const char* path = output.path.c_str();
  const int made = ::open(path, kFlags | O_EXCL, 0644);
  const Descriptor file(made < 0 && errno == EEXIST ? ::open(path, kFlags, 0644) : made);
  if (file.get() < 0)
    fail(ErrorCode::kInvalidArgument, "{} '{}' cannot be written: {}", output.flag, output.path,
         errno_text(errno));
  if (made >= 0) ::unlink(path);
}

void refuse_to_replace(const Output& output, const char* kind, std::string_view beginning) {
  if (output.path.empty() || may_be_replaced(output.path, beginning)) return;
  fail(ErrorCode::kInvalidArgument, "'{}' is there already and is not a {}; name another file for {}",
       output.path, kind, output.flag);
}

void refuse_same(const Output& a, const Output& b) {
  if (a.path.empty() || b.path.empty() || !same_file(a.path, b.path)) return;
  fail(ErrorCode::kInvalidArgument, "{} and {} name one file, '{}'; give each its own", a.flag, b.flag,
       a.path);
}

// No other rank may write to the files of rank 0: neither its regular outputs, nor its trace after a failure.
void refuse_files_of_ranks(std::initializer_list<Output> outputs, int ranks) {
  for (int rank = 1; rank < ranks; ++rank)
    for (const Output& output : outputs)
      for (const Output& first : outputs)
        refuse_same({fmt::format("{} of rank {}", output.flag, rank), path_of_rank(output.path, rank)},
                    first);
}

}  // namespace

void check_outputs(const TrainSettings& settings) {
  const std::string trace_of_first = settings.ranks.rank == 0 ? settings.trace : "";
  const Output metrics{"--metrics", settings.metrics}, trace{"--trace", trace_of_first},
      profile{"--profile", settings.profile};
  for (const Output& output : {metrics, trace, profile}) {
    if (output.path.empty()) continue;
    refuse_inputs(output, settings);
    probe(output);
  }
  if (!metrics.path.empty() && !settings.resume) refuse_other_metrics(metrics.path);
  refuse_same(trace, metrics);
  refuse_same(profile, metrics);
  refuse_same(profile, trace);
  if (settings.ranks.rank == 0) refuse_files_of_ranks({metrics, trace, profile}, settings.ranks.size);
  refuse_to_replace(trace, "trace", kTraceBeginning);
  refuse_to_replace(profile, "profile", kProfileBeginning);
}

}  // namespace sluice::models
