#include <fmt/ranges.h>

#include <filesystem>

#include "core/error.h"
#include "core/log.h"
#include "core/system.h"
#include "core/text_file.h"
#include "models/run/recipe.h"
#include "models/run/training_run.h"

namespace sluice::models {
namespace {

constexpr int kRecordVersion = 4;

Json identity(const Setup& setup) {
  const TrainSettings& s = setup.settings;
  return {{"model", config_to_hugging_face(setup.config, s.dtype)},
          {"dtype", name_of(s.dtype)},
          {"seed", s.seed},
          {"batch", s.batch},
          {"accumulate", s.accumulate},
          {"seq", s.length},
          {"optimizer", setup.optimizer->name()},
          {"data_tokens", setup.data->tokens()},
          {"data_fingerprint", setup.data->fingerprint()},
          {"training_windows", setup.data->windows()}};
}

Json loss_scale_text(const TrainSettings& settings) {
  const LossScale scale = loss_scale_of(settings);
  return scale.is_dynamic() ? Json("dynamic") : Json(scale.value());
}

Json hyperparameters(const Setup& setup) {
  const TrainSettings& s = setup.settings;
  Json all = to_json(setup.plan.recipe);
  all.update({{"steps", s.steps},
              {"clip-value", s.clip_value},
              {"reproducible", s.plan.reproducible},
              {"loss-scale", loss_scale_text(s)}});
  if (s.grain) all["grain"] = *s.grain;
  if (s.sequence_grain) all["sequence-grain"] = *s.sequence_grain;
  all.update(setup.optimizer->settings());
  return all;
}

std::filesystem::path manifest_path(const std::string& folder) {
  return std::filesystem::path(folder) / engine::kManifestFile;
}

engine::Manifest read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder).string();
  return engine::Manifest::parse(read_text_file(path), path);
}

void check_version(const Json& record, const std::string& checkpoint) {
  if (const int version = json_field<int>(record, "version", checkpoint); version != kRecordVersion)
    fail(ErrorCode::kInvalidArgument, "'{}' has a run record of version {}, this program reads version {}",
         checkpoint, version, kRecordVersion);
}

}  // namespace

std::vector<std::string> differences(const Json& recorded, const Json& now) {
  std::vector<std::string> found;
  for (const Json& change : Json::diff(recorded.flatten(), now.flatten())) {
    const std::string key = change.at("path").get<std::string>().substr(1);
    const Json::json_pointer at(change.at("path").get<std::string>());
    const auto value = [&](const Json& from) {
      const Json flat = from.flatten();
      return flat.contains(at) ? flat.at(at).dump() : std::string("not set");
    };
    std::string name = key;
    for (std::size_t i; (i = name.find("~1")) != std::string::npos;) name.replace(i, 2, ".");
    found.push_back(fmt::format("{} was {} and is {}", name.starts_with('.') ? name.substr(1) : name,
                                value(recorded), value(now)));
  }
  return found;
}

Json run_record(const Setup& setup, const RunPosition& position) {
  return {{"version", kRecordVersion},
          {"run", position.run_id},
          {"step", position.step},
          {"skipped", position.skipped},
          {"loss_scale", position.loss_scale},
          {"validation", position.validation},
          {"next_sample", position.next_sample},
          {"identity", identity(setup)},
          {"tokens", setup.data->are_bytes() ? "bytes" : "ids"},
          {"length", setup.learned_length},
          {"hyperparameters", hyperparameters(setup)},
          {"defaults", setup.plan.recipe.defaults},
          {"cpu", cpu_model()},
          {"threads", setup.settings.threads},
          {"matrix_library", setup.tools->library->name()}};
}

Json read_run_record(const std::string& checkpoint) {
  Json record = read_manifest(checkpoint).run;
  check_version(record, checkpoint);
  return record;
}

LearnedFrom learned_from(const std::string& folder) {
  if (!std::filesystem::exists(manifest_path(folder))) return {};
  const Json run = read_manifest(folder).run;
  LearnedFrom learned;
  learned.bytes = run.contains("tokens") && run["tokens"] == "bytes";
  if (run.contains("length")) learned.length = json_field<std::uint64_t>(run, "length", folder);
  return learned;
}

void compare_run_record(const Json& recorded, const Json& now, const std::string& checkpoint) {
  check_version(recorded, checkpoint);
  const auto other = differences(json_field<Json>(recorded, "identity", checkpoint), now.at("identity"));
  if (!other.empty())
    fail(ErrorCode::kInvalidArgument,
         "'{}' is of another run: {}; give the same settings and data, or another --out", checkpoint,
         fmt::join(other, "; "));
  for (const char* key : {"cpu", "threads", "matrix_library"}) {
    const Json before = json_field<Json>(recorded, key, checkpoint);
    if (before != now.at(key))
      log().warn(
          "{} was {} and is {}: the bits that follow may differ from those of a run that was never stopped",
          key, before.dump(), now.at(key).dump());
  }
  for (const std::string& change :
       differences(json_field<Json>(recorded, "hyperparameters", checkpoint), now.at("hyperparameters")))
    log().warn("the run goes on with another setting: {}", change);
}

}  // namespace sluice::models
