#pragma once
#include <fmt/format.h>

#include "bindings/sluice_process.h"
#include "core/json.h"
#include "testing.h"

// Functions that read the outputs of runs, for tests that compare runs.
namespace sluice::cli {

// The files with tensors of the run's checkpoint after that step.
inline std::map<std::string, std::string> tensors_of(const std::string& out, int step) {
  std::map<std::string, std::string> files;
  for (const auto& file : std::filesystem::directory_iterator(fmt::format("{}/step-{:08}", out, step)))
    if (file.path().extension() == ".safetensors")
      files[file.path().filename().string()] = file_text(file.path().string());
  EXPECT_GE(files.size(), 2u);
  return files;
}

// The lines of a metrics file.
inline std::vector<Json> rows_of(const std::string& metrics) {
  std::ifstream file(metrics);
  std::vector<Json> all;
  for (std::string line; std::getline(file, line);) all.push_back(Json::parse(line));
  return all;
}

// Returns the data of a page that --profile wrote; null where there is none.
inline Json profile_of(const std::string& page) {
  static const std::string kStart = "<script type=\"application/json\" id=\"profile\">";
  const std::string text = file_text(page);
  const std::size_t begin = text.find(kStart);
  if (begin == std::string::npos) return {};
  const std::size_t from = begin + kStart.size();
  return Json::parse(text.substr(from, text.find("</script>", from) - from));
}

inline std::vector<double> losses_of(const std::string& metrics) {
  std::vector<double> all;
  for (const Json& row : rows_of(metrics)) all.push_back(row.at("loss"));
  return all;
}

}  // namespace sluice::cli
