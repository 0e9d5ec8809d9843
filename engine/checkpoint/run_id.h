#pragma once
#include <optional>
#include <string>

namespace sluice::engine {

// Tells runs apart: 16 hexadecimal digits, drawn when a run begins, which all of its checkpoints and lines of
// metrics have.
std::string new_run_id();

// OUT/.run holds the id of a run from its beginning on, before there is any checkpoint. Returns nothing where
// the file does not exist. Throws Error(kInvalidArgument) for a file with other contents.
std::optional<std::string> read_run_id(const std::string& out);
// REQUIRES: no other run writes there (RunLock). Throws Error(kIo).
void write_run_id(const std::string& out, const std::string& id);

}  // namespace sluice::engine
