#pragma once
#include <string>

namespace sluice::cli {

// The report of a run, docs/formats/profile.md, as one page that needs nothing else. `json`: of
// models::TrainEvents. Written whole or not at all; throws Error(kIo).
void write_profile(const std::string& path, const std::string& json);

}  // namespace sluice::cli
