#pragma once
#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <vector>

// Instantiated only in json.cc, to save compile time.
extern template class nlohmann::basic_json<>;

namespace sluice {

using Json = nlohmann::json;

// Parses JSON. Throws Error(kInvalidArgument), with the name of the source ("config.json"), line and column,
// for invalid text, for nesting deeper than 100 (copying a value takes stack for each level), and for a key
// that occurs twice in an object (one value would be lost).
Json parse_json(std::string_view text, std::string_view source);
Json read_json_file(const std::string& path);

// Returns the known word nearest to the given one by edit distance, or "" where none is near.
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
