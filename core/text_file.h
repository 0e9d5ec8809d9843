#pragma once
#include <cstddef>
#include <functional>
#include <string>

namespace sluice {

// Small files of text (JSON, mostly). Every error names the path.

// Throws Error(kNotFound) where there is no such file, Error(kIo) where it cannot be read, and
// Error(kInvalidArgument) where it is longer than limit bytes.
std::string read_text_file(const std::string& path, std::size_t limit = std::size_t{64} << 20);

// Whole or not at all: a temporary sibling is written, synced, renamed over path, and the folder is synced.
void write_text_file(const std::string& path, const std::string& text);
// The same for text that comes in pieces: next() gives the next one, an empty one at the end.
void write_text_file(const std::string& path, const std::function<std::string()>& next);

// Makes renames and removals in a folder durable. Throws Error(kIo).
void sync_folder(const std::string& folder);

}  // namespace sluice
