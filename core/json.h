#pragma once
#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace sluice {

using Json = nlohmann::json;

// Parses text; an error names the source ("config.json") with line and column: Error(kInvalidArgument).
Json parse_json(std::string_view text, std::string_view source);
// Reads and parses a file.
Json read_json_file(const std::string& path);

// The known word that is nearest to the given one by edit distance, or "" where none is near.
std::string nearest_word(std::string_view word, const std::vector<std::string>& known);

// A field of an object. Throws Error(kInvalidArgument) that names source and key where it is missing or of another type.
template <class T>
T json_field(const Json& object, const std::string& key, std::string_view source);

}  // namespace sluice

#include "core/error.h"

namespace sluice {
template <class T>
T json_field(const Json& object, const std::string& key, std::string_view source) {
  const auto found = object.find(key);
  if (found == object.end()) fail(ErrorCode::kInvalidArgument, "{}: '{}' is missing", source, key);
  try {
    return found->template get<T>();
  } catch (const nlohmann::json::exception&) {
    fail(ErrorCode::kInvalidArgument, "{}: '{}' has an unexpected value: {}", source, key, found->dump().substr(0, 80));
  }
}
}  // namespace sluice
