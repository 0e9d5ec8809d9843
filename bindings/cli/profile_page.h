#pragma once
#include <string>

namespace sluice::cli {

// Writes the report of a run (docs/formats/profile.md) as one page that needs no other file. `json` comes
// from models::TrainEvents. The page is written whole or not at all. Throws Error(kIo).
void write_profile(const std::string& path, const std::string& json);

}  // namespace sluice::cli
