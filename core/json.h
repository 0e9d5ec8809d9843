#pragma once
#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <vector>

// The template's functions are compiled in json.cc alone, once for all files.
extern template class nlohmann::basic_json<>;

namespace sluice {

using Json = nlohmann::json;

// Parses text. Throws Error(kInvalidArgument) that names the source ("config.json") with line and column, and
// where the nesting is deeper than 100, since copying such a value takes stack for every level, or a key
// stands twice in an object, since one value would be lost.
Json parse_json(std::string_view text, std::string_view source);
Json read_json_file(const std::string& path);

// Returns the known word that is nearest to the given one by edit distance, or "" where none is near.
std::string nearest_word(std::string_view word, const std::vector<std::string>& known);

// Returns a field of an object. Throws Error(kInvalidArgument) that names source and key where the field is
// missing, is of another type, or is a whole number that T cannot hold.
template <class T>
T json_field(const Json& object, const std::string& key, std::string_view source);

}  // namespace sluice

#include <type_traits>
#include <utility>

#include "core/error.h"

namespace sluice {
// Checks whole numbers, because the JSON library converts between numbers, and from bool, without an error.
template <class T>
bool json_is(const Json& value) {
  if constexpr (!std::is_integral_v<T> || std::is_same_v<T, bool>)
    return true;
  else if (value.is_number_unsigned())
    return std::in_range<T>(value.get<std::uint64_t>());
  else
    return value.is_number_integer() && std::in_range<T>(value.get<std::int64_t>());
}

template <class T>
T json_field(const Json& object, const std::string& key, std::string_view source) {
  const auto found = object.find(key);
  if (found == object.end()) fail(ErrorCode::kInvalidArgument, "{}: '{}' is missing", source, key);
  try {
    if (json_is<T>(*found)) return found->template get<T>();
  } catch (const nlohmann::json::exception&) {  // reported below
  }
  fail(ErrorCode::kInvalidArgument, "{}: '{}' has an unexpected value: {}", source, key,
       found->dump().substr(0, 80));
}
}  // namespace sluice
