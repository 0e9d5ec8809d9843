#include "core/json.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/text_file.h"

template class nlohmann::basic_json<>;

namespace sluice {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
    }
  }
  return row[b.size()];
}

// Returns what a message of the parser says of the text, without the parser's names for the error and for its
// place, and without the text itself, which may be anything.
std::string_view defect_of(std::string_view message) {
  message = message.substr(0, message.find("; last read"));
  for (const std::string_view before : {"] ", "syntax error while parsing ", " - "})
    if (const std::size_t at = message.find(before); at != std::string_view::npos)
      message.remove_prefix(at + before.size());
  return message;
}

}  // namespace

Json parse_json(std::string_view text, std::string_view source) {
  constexpr int kDeepest = 100;
  std::vector<std::set<std::string>> keys;  // of each open object
  const auto check = [&](int depth, Json::parse_event_t event, const Json& value) {
    if (depth > kDeepest)
      fail(ErrorCode::kInvalidArgument, "{} is nested deeper than {} levels", source, kDeepest);
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key)
      if (const auto& key = value.get_ref<const std::string&>(); !keys.back().insert(key).second)
        fail(ErrorCode::kInvalidArgument, "{}: the key '{}' is there twice in one object", source, key);
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    const std::string_view before = text.substr(0, error.byte == 0 ? 0 : error.byte - 1);
    fail(ErrorCode::kInvalidArgument, "{} is not valid JSON: line {}, column {}: {}", source,
         1 + std::ranges::count(before, '\n'), before.size() - (before.rfind('\n') + 1) + 1,
         defect_of(error.what()));
  } catch (const Json::exception& error) {
    fail(ErrorCode::kInvalidArgument, "{} is not valid JSON: {}", source, defect_of(error.what()));
  }
}

Json read_json_file(const std::string& path) { return parse_json(read_text_file(path), path); }

std::string nearest_word(std::string_view word, const std::vector<std::string>& known) {
  std::string best;
  std::size_t distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : known)
    if (const std::size_t d = edit_distance(word, candidate); d < distance) {
      distance = d;
      best = candidate;
    }
  return best;
}

}  // namespace sluice
