#pragma once
#include <map>
#include <string>

namespace sluice::engine {

// Returns the path of the file that holds each tensor, by the tensors' names, as a
// model.safetensors.index.json says. Throws Error(kNotFound) where such a file does not exist, and
// Error(kCorrupt) where the index is none, or names a file outside its folder.
std::map<std::string, std::string> read_safetensors_index(const std::string& index);

}  // namespace sluice::engine
