#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace sluice {

// Reads and writes small text files (mostly JSON). Every error names the path.

// Throws Error(kNotFound) where there is no such file, Error(kIo) where it cannot be read, and
// Error(kInvalidArgument) where it is a pipe, a device or a folder, or longer than limit bytes.
std::string read_text_file(const std::string& path, std::size_t limit = std::size_t{64} << 20);

// Writes the file whole or not at all: a temporary sibling of a random name is written, synced and renamed
// over path, and the folder is synced. Throws Error(kNotFound) where the folder does not exist, else
// Error(kIo).
void write_text_file(const std::string& path, const std::string& text);
// Writes text that next() returns in parts; an empty part ends it.
void write_text_file(const std::string& path, const std::function<std::string()>& next);

// Joins a folder and a name to a path.
std::string path_in(const std::string& folder, std::string_view name);

// Makes renames and removals in a folder durable. Throws Error(kIo).
void sync_folder(const std::string& folder);

}  // namespace sluice
