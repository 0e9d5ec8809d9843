#include "bindings/cli/commands.h"
#include "bindings/cli/doctor.h"
#include "core/error.h"

namespace sluice::cli {

void bind_doctor(CLI::App& app, DoctorOptions& options) {
  Flags flags(app);
  flags.texts("--disk", options.disk,
              "folder whose speed is measured with a file of 256 MiB; may be given again");
  flags.toggle("--json", options.json, "print JSON, which sluice plan --machine reads");
}

void run_doctor(const DoctorOptions& options, std::FILE* out) {
  Json rows = Json::array();
  bool whole = true;
  std::string refused;
  const Examination examination = examine(options.disk);
  for (const Finding& finding : examination.findings) {
    whole = whole && finding.remedy.empty();
    if (finding.refused && refused.empty()) refused = finding.remedy;
    rows.push_back({{"name", finding.name},
                    {"found", finding.text},
                    {"remedy", finding.remedy},
                    {"value", finding.value}});
    if (options.json) continue;
    fmt::print(out, "{} {:<20} {}\n", finding.remedy.empty() ? "  " : "! ", finding.name, finding.text);
    if (!finding.remedy.empty()) fmt::print(out, "  {:<20} -> {}\n", "", finding.remedy);
  }
  if (options.json) {
    Json document = examination.machine ? engine::to_json(*examination.machine) : Json::object();
    document["findings"] = rows;
    fmt::print(out, "{}\n", json_text(document));
  } else if (whole) {
    fmt::print(out, "nothing is missing\n");
  }
  if (!refused.empty()) fail(ErrorCode::kInvalidArgument, "--disk: {}", refused);
}

}  // namespace sluice::cli
