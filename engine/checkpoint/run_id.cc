#include "engine/checkpoint/run_id.h"

#include <filesystem>

#include "core/json.h"
#include "core/text_file.h"

namespace sluice::engine {
namespace {

constexpr int kRunVersion = 1;

}  // namespace

std::optional<std::string> read_run_id(const std::string& out) {
  const std::string path = path_in(out, ".run");
  if (!std::filesystem::exists(path)) return std::nullopt;
  const Json json = read_json_file(path);
  if (!json.is_object() || json_field<int>(json, "version", path) != kRunVersion)
    fail(ErrorCode::kInvalidArgument, "'{}' is no run's id of version {}", path, kRunVersion);
  return json_field<std::string>(json, "run", path);
}

void write_run_id(const std::string& out, const std::string& id) {
  // A run that was killed while it wrote may have left a temporary file.
  for (const auto& entry : std::filesystem::directory_iterator(out))
    if (entry.path().filename().string().starts_with(".run.tmp-")) std::filesystem::remove(entry.path());
  write_text_file(path_in(out, ".run"), Json{{"version", kRunVersion}, {"run", id}}.dump() + "\n");
}

}  // namespace sluice::engine
