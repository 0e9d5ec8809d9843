#include "models/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "core/error.h"
#include "core/json.h"

namespace sluice::models {
namespace {

constexpr int kVersion = 1;

// The length of the part that stays: whole lines of steps up to `last_step`.
std::uint64_t length_up_to(const std::string& path, std::uint64_t last_step) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t length = 0;
  for (std::string line; std::getline(file, line);) {
    const Json row = Json::parse(line, nullptr, false);
    const bool valid = row.is_object() && row.contains("step") && row["step"].is_number_unsigned();
    // A killed run may leave the start of a line behind whole ones, or as all there is.
    const bool cut_short = file.eof() && line.starts_with("{\"");
    if (!valid && !cut_short)
      fail(ErrorCode::kInvalidArgument,
           "'{}' holds something else than the metrics of a run (at byte {}); name another file", path,
           length);
    if (!valid || file.eof() || row["step"].get<std::uint64_t>() > last_step) break;
    length += line.size() + 1;
  }
  return length;
}

Json to_json(const StepReport& r) {
  Json row = {{"version", kVersion},
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
              {"wait_seconds", r.wait_seconds},
              {"optimizer_seconds", r.optimizer_seconds}};
  if (r.validation_loss) row["validation_loss"] = *r.validation_loss;
  return row;
}

}  // namespace

MetricsFile::MetricsFile(const std::string& path, std::optional<std::uint64_t> resumed_step) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(ErrorCode::kIo, "cannot write metrics to '{}': {}", path, errno_text(errno));
  try {
    const off_t end = ::lseek(descriptor_, 0, SEEK_END);
    if (end > 0 && !resumed_step)
      fail(ErrorCode::kInvalidArgument,
           "the metrics file '{}' is there already; name another, remove it, or go on with that run by "
           "--resume",
           path);
    if (end > 0) {
      const std::uint64_t length = length_up_to(path, *resumed_step);
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
  const std::string line = to_json(report).dump() + "\n";
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t n = ::write(descriptor_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(ErrorCode::kIo, "cannot write metrics to '{}': {}", path_, errno_text(errno));
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace sluice::models
