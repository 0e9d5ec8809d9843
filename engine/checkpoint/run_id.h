#pragma once
#include <optional>
#include <string>

namespace sluice::engine {

// Tells runs apart: 16 hexadecimal digits, drawn when a run begins, that all of its checkpoints and lines of
// metrics carry.
std::string new_run_id();

// OUT/.run holds the id of a run from its beginning on, before there is any checkpoint. Nothing where there
// is none. Throws Error(kInvalidArgument) for a file of something else.
std::optional<std::string> read_run_id(const std::string& out);
// REQUIRES: no other run writes there (RunLock). Throws Error(kIo).
void write_run_id(const std::string& out, const std::string& id);

}  // namespace sluice::engine
