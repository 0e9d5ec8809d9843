#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/descriptor.h"

// The names and locks of checkpoint folders: see docs/formats/checkpoint.md.
namespace sluice::engine {

std::string checkpoint_name(std::uint64_t step);  // "step-00000100"
std::optional<std::uint64_t> checkpoint_step(const std::string& name);
std::string partial_name(std::uint64_t step);       // ".step-00000100.partial-<random>"
std::string removed_name(const std::string& name);  // ".step-00000100.removed-<random>"
bool is_leftover_name(const std::string& name);

// Throws Error(kCorrupt | kInvalidArgument) unless it is a file of a checkpoint with as many bytes as were
// written.
void check_bytes(const std::string& path, std::uint64_t written);

// Makes a folder and locks it (flock). Throws Error(kIo | kState).
Descriptor make_locked_folder(const std::string& path);
// Deletes a leftover. Returns false, and deletes nothing, where a live process holds it.
bool remove_unheld(const std::string& path);
// Removes a folder and what is in it. Throws Error(kIo).
void remove_folder(const std::string& path);
// Renames `from` to `to` atomically; if `to` exists, exchanges them.
void exchange_or_rename(const std::string& from, const std::string& to);

}  // namespace sluice::engine
