#include <filesystem>

#include "bindings/cli/commands.h"
#include "bindings/cli/inspect.h"
#include "core/descriptor.h"
#include "core/error.h"
#include "core/printable.h"
#include "engine/checkpoint/checkpoint.h"

namespace sluice::cli {
namespace {

Report inspect_hugging_face(const std::filesystem::path& folder, bool values) {
  Report report;
  report.json = {{"kind", "folder"}, {"path", folder.string()}, {"files", Json::array()}};
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    Report file = inspect_tensors(entry.path().string(), values);
    report.text += fmt::format("{}\n{}", entry.path().string(), file.text);
    report.json["files"].push_back(std::move(file.json));
  }
  return report;
}

bool holds_tensors(const std::filesystem::path& folder) {
  return std::filesystem::exists(folder / engine::kModelFile) ||
         std::filesystem::exists(folder / "model.safetensors.index.json");
}

Report inspect_folder(const std::filesystem::path& folder, const InspectOptions& options) {
  if (std::filesystem::exists(folder / engine::kManifestFile))
    return inspect_checkpoint(folder.string(), options.verify);
  if (holds_tensors(folder)) return inspect_hugging_face(folder, options.values);
  return inspect_run(folder.string(), options.verify);
}

Report inspect(const InspectOptions& options) {
  const std::filesystem::path path(options.path);
  if (!std::filesystem::exists(path)) fail(ErrorCode::kNotFound, "'{}' does not exist", options.path);
  if (std::filesystem::is_directory(path)) return inspect_folder(path, options);
  check_file(options.path);
  const std::string extension = path.extension().string();
  if (path.filename() == engine::kManifestFile)
    return inspect_checkpoint(std::filesystem::absolute(path).parent_path().string(), options.verify);
  if (extension == ".safetensors") return inspect_tensors(options.path, options.values);
  if (extension == ".jsonl") return inspect_metrics(options.path);
  if (extension == ".json") return inspect_trace(options.path);
  if (extension == ".bin") return inspect_tokens(options.path);
  fail(ErrorCode::kInvalidArgument,
       "'{}' is of no kind that this command shows; it can be a checkpoint or --out folder, "
       "manifest.json, *.safetensors, metrics *.jsonl, a trace *.json, tokens *.bin",
       options.path);
}

}  // namespace

void bind_inspect(CLI::App& app, InspectOptions& options) {
  Flags flags(app);
  flags.file("file", options.path,
             "a checkpoint, an --out folder, *.safetensors, metrics, a trace or tokens");
  flags.toggle("--verify", options.verify,
               "read every byte of a checkpoint, or of all checkpoints in a folder, and compare checksums");
  flags.toggle("--values", options.values, "show the least and the greatest value of each tensor");
  flags.toggle("--json", options.json, "print JSON");
}

void run_inspect(const InspectOptions& options, std::FILE* out) {
  if (options.path.empty()) fail(ErrorCode::kInvalidArgument, "say what to inspect: sluice inspect FILE");
  const Report report = inspect(options);
  fmt::print(out, "{}", options.json ? json_text(report.json) + "\n" : printable(report.text, Lines::kKeep));
}

}  // namespace sluice::cli
