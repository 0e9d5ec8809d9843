#include "models/run/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "models/run/rank_files.h"

namespace sluice::models {
namespace {

namespace fs = std::filesystem;

constexpr int kVersion = 5;

// Returns the beginning of every line of a run.
std::string start_of(const std::string& run) {
  return fmt::format("{{\"version\":{},\"run\":\"{}\",", kVersion, run);
}

[[noreturn]] void refuse_content(const std::string& path, const char* what, std::uint64_t offset) {
  fail(ErrorCode::kInvalidArgument, "'{}' holds {} (at byte {}); name another file for --metrics", path, what,
       offset);
}

// Returns the step of a complete line, which must be this run's.
std::uint64_t step_of(const std::string& line, const std::string& run, const std::string& path,
                      std::uint64_t offset) {
  const Json row = Json::parse(line, nullptr, false);
  if (!row.is_object() || !row.contains("step") || !row["step"].is_number_unsigned())
    refuse_content(path, "something else than the metrics of a run", offset);
  if (!row.contains("run") || row["run"] != run) refuse_content(path, "the metrics of another run", offset);
  return row["step"].get<std::uint64_t>();
}

// Returns the length of the complete lines of steps up to `last_step`. Throws where any line is not this
// run's.
std::uint64_t length_up_to(const std::string& path, const std::string& run, std::uint64_t last_step) {
  std::ifstream file(path, std::ios::binary);
  const std::string start = start_of(run);
  std::uint64_t length = 0, offset = 0;
  bool stays = true;
  for (std::string line; std::getline(file, line); offset += line.size() + 1) {
    // A killed run may leave the beginning of a line at the end of the file.
    const std::size_t common = std::min(start.size(), line.size());
    if (file.eof() && line.compare(0, common, start, 0, common) == 0) break;
    stays = step_of(line, run, path, offset) <= last_step && stays && !file.eof();
    if (stays) length = offset + line.size() + 1;
  }
  if (!file.eof()) fail(ErrorCode::kIo, "'{}' cannot be read to its end, so that it is left as it is", path);
  return length;
}

nlohmann::ordered_json to_json(const StepReport& r, const std::string& run) {
  nlohmann::ordered_json row = {{"version", kVersion},
                                {"run", run},
                                {"step", r.step},
                                {"loss", r.loss},
                                {"learning_rate", r.learning_rate},
                                {"gradient_norm", r.gradient_norm},
                                {"seconds", r.seconds},
                                {"tokens_per_second", r.tokens_per_second},
                                {"memory", r.memory},
                                {"peak_memory", r.peak_memory},
                                {"predicted_peak", r.predicted_peak},
                                {"budget", r.budget},
                                {"disk_read", r.disk_read},
                                {"disk_written", r.disk_written},
                                {"received", r.received},
                                {"received_from_hosts", r.received_from_hosts},
                                {"read_wait_seconds", r.read_wait_seconds},
                                {"write_wait_seconds", r.write_wait_seconds},
                                {"rank_wait_seconds", r.rank_wait_seconds},
                                {"optimizer_seconds", r.optimizer_seconds}};
  if (r.loss_scale) {
    row["loss_scale"] = *r.loss_scale;
    row["skipped"] = r.skipped;
  }
  if (r.validation_loss) row["validation_loss"] = *r.validation_loss;
  return row;
}

void cut(const std::string& path, int rank, const std::string& run, std::uint64_t last_step) {
  const std::uint64_t length = length_up_to(path, run, last_step);
  if (length == fs::file_size(path)) return;
  fs::resize_file(path, length);
  log().info("the metrics of rank {}, which takes no part now, end at step {}: '{}'", rank, last_step, path);
}

}  // namespace

void cut_metrics_of_absent_ranks(const std::string& first, int ranks, const std::string& run,
                                 std::uint64_t resumed_step) {
  for (const auto& [rank, file] : files_of_absent_ranks(first, ranks)) {
    try {
      cut(file, rank, run, resumed_step);
    } catch (const std::exception& error) {
      log().warn("the metrics of rank {}, which takes no part now, stay as they are: {}", rank, error.what());
    }
  }
}

void refuse_other_metrics(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored) || fs::file_size(path, ignored) == 0) return;
  fail(ErrorCode::kInvalidArgument,
       "the metrics file '{}' is there already; name another, remove it, or go on with that run by --resume",
       path);
}

MetricsFile::MetricsFile(const std::string& path, const std::string& run,
                         std::optional<std::uint64_t> resumed_step)
    : path_(path), run_(run) {
  if (!resumed_step) refuse_other_metrics(path);
  // With O_NONBLOCK opening a named pipe without a reader fails (ENXIO) instead of waiting for ever. Writes
  // wait for a slow reader, and fail once the reader has gone (EPIPE).
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(ErrorCode::kIo, "cannot write metrics to '{}': {}", path, errno_text(errno));
  ::fcntl(descriptor_, F_SETFL, O_WRONLY | O_APPEND);
  try {
    if (resumed_step && ::lseek(descriptor_, 0, SEEK_END) > 0) {
      const std::uint64_t length = length_up_to(path, run, *resumed_step);
      if (::ftruncate(descriptor_, static_cast<off_t>(length)) != 0)
        fail(ErrorCode::kIo, "cannot shorten '{}': {}", path, errno_text(errno));
    }
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

MetricsFile::~MetricsFile() { ::close(descriptor_); }

void MetricsFile::add(const StepReport& report) {
  const std::string line = to_json(report, run_).dump() + "\n";
  const off_t before = ::lseek(descriptor_, 0, SEEK_END);
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t n = ::write(descriptor_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const std::string reason = errno_text(errno);
      (void)!::ftruncate(descriptor_, before);
      fail(ErrorCode::kIo, "cannot write metrics to '{}': {}", path_, reason);
    }
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace sluice::models
