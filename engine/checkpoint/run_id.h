#pragma once
#include <optional>
#include <string>

namespace sluice::engine {

// A run's id identifies it: a random_name(), drawn when the run begins, which is in all of its checkpoints
// and lines of metrics. OUT/.run has it from the beginning on, before there is any checkpoint. Returns
// nullopt where the file does not exist. Throws Error(kInvalidArgument) for a file with other contents.
std::optional<std::string> read_run_id(const std::string& out);
// REQUIRES: no other run writes there (RunLock). Throws Error(kIo).
void write_run_id(const std::string& out, const std::string& id);

}  // namespace sluice::engine
