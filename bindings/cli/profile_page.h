#pragma once
#include <string>

namespace sluice::cli {

// Writes the report of a run (docs/formats/profile.md) as one self-contained page, whole or not at all.
// `json` comes from models::TrainEvents. Throws Error(kIo).
void write_profile(const std::string& path, const std::string& json);

}  // namespace sluice::cli
