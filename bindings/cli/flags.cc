#include "bindings/cli/flags.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::cli {
namespace {

std::vector<std::string> flag_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  return names;
}

std::string check_choice(const std::string& flag, const std::string& given,
                         const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), given) == known.end())
    fail(ErrorCode::kInvalidArgument, "{}: '{}' is not known; use {}", flag, given, fmt::join(known, ", "));
  return given;
}

bool is_truth(const std::string& word) {
  bool value = false;
  return CLI::detail::lexical_cast(word, value);
}

std::string full_name(const CLI::App& app) {
  return (app.get_parent() == nullptr ? "" : full_name(*app.get_parent()) + " ") + app.get_name();
}

std::string suggestion(const std::string& word, const std::vector<std::string>& known, const char* before) {
  const std::string nearest = nearest_word(word, known);
  return nearest.empty() ? std::string() : fmt::format("; the nearest known one is {}{}", before, nearest);
}

std::string scalar_text(const Json& value, const std::string& key, const std::string& source) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number()) return value.dump();
  fail(ErrorCode::kInvalidArgument, "{}: '{}' has an unexpected value: {}", source, key,
       value.dump().substr(0, 80));
}

// A switch's flags --name and --no-name are one setting.
std::string opposite_of(const std::string& name) {
  return name.starts_with("no-") ? name.substr(3) : "no-" + name;
}

void give(CLI::Option& option, const Json& value, const std::string& key, const std::string& source) {
  const bool toggle = option.get_items_expected_max() == 0 || option.get_type_size_max() == 0;
  if (toggle) {
    if (!value.is_boolean()) fail(ErrorCode::kInvalidArgument, "{}: '{}' must be true or false", source, key);
    option.add_result(value.dump());
  } else if (value.is_array() && option.get_items_expected_max() > 1) {
    for (const Json& item : value) option.add_result(scalar_text(item, key, source));
    if (value.empty()) return;
  } else {
    option.add_result(scalar_text(value, key, source));
  }
  option.run_callback();
}

int parse_within(const std::string& flag, const std::string& given, int least, int most) {
  const std::uint64_t value = parse_whole(flag, given);
  if (!std::in_range<int>(value) || static_cast<int>(value) < least || static_cast<int>(value) > most)
    fail(ErrorCode::kInvalidArgument, "{}: {} was given; a number from {} to {} is needed", flag, value,
         least, most);
  return static_cast<int>(value);
}

int parse_count(const std::string& flag, const std::string& given) {
  return parse_within(flag, given, 1, 4096);
}

}  // namespace

std::uint64_t parse_whole(std::string_view what, std::string_view text, std::uint64_t least) {
  std::uint64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size() || value < least)
    fail(ErrorCode::kInvalidArgument, "{}: '{}' is not a whole number from {} on", what, text, least);
  return value;
}

double parse_real(std::string_view what, std::string_view text) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size() || !std::isfinite(value))
    fail(ErrorCode::kInvalidArgument, "{}: '{}' is not a number", what, text);
  return value;
}

void Flags::add(const std::string& flag, const std::string& value, const std::string& help,
                const std::string& shown, const std::function<void(const std::string&)>& read) {
  app_.add_option_function<std::string>(flag, read, help)
      ->group(group_)
      ->type_name(value)
      ->default_str(shown)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // refuse_repeated() reports repetitions
}

void Flags::file(const std::string& name, std::string& field, const std::string& help) {
  app_.add_option(name, field, help)->group(group_)->type_name("FILE");
}

void Flags::texts(const std::string& flag, std::vector<std::string>& field, const std::string& help) {
  app_.add_option(flag, field, help)->group(group_)->type_name("TEXT");
}

void Flags::size(const std::string& flag, std::uint64_t& field, const std::string& help) {
  add(flag, "SIZE", help, "", [&field, flag](const std::string& given) {
    try {
      field = parse_size(given);
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "{}: {}", flag, error.what());
    }
    if (field == 0) fail(ErrorCode::kInvalidArgument, "{}: a size of 0 leaves nothing to work with", flag);
  });
}

void Flags::link(const std::string& flag, std::optional<engine::Link>& field, const std::string& help) {
  add(flag, "LINK", help, "", [&field, flag](const std::string& given) {
    try {
      field = engine::parse_link(given);
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "{}: {}", flag, error.what());
    }
  });
}

void Flags::whole(const std::string& flag, int& field, const std::string& help) {
  add(flag, "N", help, "", [&field, flag](const std::string& given) { field = parse_count(flag, given); });
}
void Flags::whole(const std::string& flag, std::optional<int>& field, const std::string& help) {
  add(flag, "N", help, "", [&field, flag](const std::string& given) { field = parse_count(flag, given); });
}

void Flags::index(const std::string& flag, int& field, const std::string& help) {
  add(flag, "N", help, shown(field),
      [&field, flag](const std::string& given) { field = parse_within(flag, given, 0, 4095); });
}

void Flags::seconds(const std::string& flag, std::uint64_t& field, const std::string& help) {
  constexpr int kMost = 1'000'000'000;
  add(flag, "N", help, shown(field), [&field, flag](const std::string& given) {
    field = static_cast<std::uint64_t>(parse_within(flag, given, 1, kMost));
  });
}

void Flags::toggle(const std::string& flag, bool& field, const std::string& help) {
  app_.add_flag(flag, field, help)->group(group_);
}

void Flags::choice(const std::string& flag, const Set& set, const std::vector<std::string>& known,
                   const std::string& help, const std::string& shown) {
  add(flag, fmt::format("{}", fmt::join(known, "|")), help, shown,
      [set, flag, known](const std::string& given) { set(check_choice(flag, given, known)); });
}

void Flags::real(const std::string& flag, const Set& set, const std::string& help, const std::string& shown) {
  add(flag, "X", help, shown, [set, flag](const std::string& given) { set(parse_real(flag, given)); });
}

void Flags::toggles(const std::string& name, const Set& set, const std::string& help) {
  const std::string on = "--" + name, off = "--no-" + name;
  const auto given = std::make_shared<bool>(false);
  const auto add_one = [&](const std::string& flag, bool value, const std::string& text) {
    const auto read = [=](std::int64_t count) {  // -1 stands for --flag=false
      if (std::exchange(*given, true))
        fail(ErrorCode::kInvalidArgument, "{} and {} are given; leave one out", on, off);
      set(value == (count > 0));
    };
    app_.add_flag_function(flag, read, text)
        ->group(group_)
        ->check([flag](const std::string& word) { return is_truth(word) ? "" : flag + ": " + word; })
        ->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  };
  add_one(on, true, help);
  add_one(off, false, "turn " + on + " off");
}

std::string json_text(const Json& json) { return json.dump(2, ' ', true, Json::error_handler_t::replace); }

void apply_config(CLI::App& app, const Json& config, const std::string& source) {
  if (!config.is_object())
    fail(ErrorCode::kInvalidArgument, "{}: a JSON object of settings is needed", source);
  std::vector<std::string> known = flag_names(app);
  std::erase_if(known, [](const std::string& name) {
    return name == "config" || name == "help" || name == "log-level" || name == "errors";
  });
  std::set<std::string> stated;  // flags on the command line take precedence
  for (const std::string& name : known)
    if (app.get_option("--" + name)->count() > 0) stated.insert({name, opposite_of(name)});
  std::map<std::string, std::string> given;  // by setting: the key as written
  for (const auto& [key, value] : config.items()) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    if (const auto [same, is_new] = given.emplace(name, key); !is_new)
      fail(ErrorCode::kInvalidArgument, "{}: '{}' and '{}' are one setting; give it once", source,
           same->second, key);
    if (std::find(known.begin(), known.end(), name) == known.end())
      fail(ErrorCode::kInvalidArgument, "{}: unknown key '{}'{}", source, key, suggestion(name, known, ""));
    if (!stated.contains(name)) give(*app.get_option("--" + name), value, key, source);
  }
}

void refuse_repeated(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options())
    if (option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast && option->count() > 1)
      fail(ErrorCode::kInvalidArgument, "{} is given {} times ({}); give it once", option->get_name(),
           option->count(), fmt::join(option->results(), ", "));
}

void refuse_unknown(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining();
  if (words.empty()) return;
  const std::string command = full_name(app);
  const auto flag =
      std::find_if(words.begin(), words.end(), [](const std::string& w) { return w.starts_with("-"); });
  if (flag == words.end())
    fail(ErrorCode::kInvalidArgument, "{}: '{}' was not expected here; see {} --help", command, words.front(),
         command);
  const std::string name = flag->substr(std::min(flag->find_first_not_of('-'), flag->size()));
  fail(ErrorCode::kInvalidArgument, "{}: unknown flag {}{}", command, *flag,
       suggestion(name.substr(0, name.find('=')), flag_names(app), "--"));
}

}  // namespace sluice::cli
