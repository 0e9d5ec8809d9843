#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "engine/plan/rates.h"

// Forward declarations, because including CLI11 compiles a large part of it in every file.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sluice::cli {

// Parse a number that is the whole text. `what` is the flag for error messages.
std::uint64_t parse_whole(std::string_view what, std::string_view text, std::uint64_t least = 0);
double parse_real(std::string_view what, std::string_view text);

// Binds the flags of one subcommand to fields. It parses values from the command line and from a JSON file
// alike. A value of the wrong type is Error(kInvalidArgument), with the flag's name.
class Flags {
 public:
  explicit Flags(CLI::App& app) : app_(app) {}

  using Set = std::function<void(const Json&)>;

  // Sets the heading in --help of the flags added next.
  void group(std::string name) { group_ = std::move(name); }

  // A field has the value's type, or is an optional of it. --help shows the default of a field that is not
  // optional.
  template <class Field>
  void text(const std::string& flag, Field& field, const std::string& help) {
    add(flag, "TEXT", help, "", [&field](const std::string& given) { field = given; });
  }
  template <class Field>
  void choice(const std::string& flag, Field& field, const std::vector<std::string>& known,
              const std::string& help) {
    choice(flag, Set([&field](const Json& value) { field = value.get<std::string>(); }), known, help,
           shown(field));
  }
  template <class Field>
  void whole(const std::string& flag, Field& field, const std::string& help, std::uint64_t least = 0) {
    add(flag, "N", help, shown(field),
        [&, flag, least](const std::string& given) { field = parse_whole(flag, given, least); });
  }
  template <class Field>
  void real(const std::string& flag, Field& field, const std::string& help) {
    real(flag, Set([&field](const Json& value) { field = value.get<double>(); }), help, shown(field));
  }
  void link(const std::string& flag, std::optional<engine::Link>& field, const std::string& help);
  void whole(const std::string& flag, int& field, const std::string& help);                 // from 1 to 4096
  void whole(const std::string& flag, std::optional<int>& field, const std::string& help);  // the same
  void index(const std::string& flag, int& field, const std::string& help);                 // from 0 to 4095
  void seconds(const std::string& flag, std::uint64_t& field, const std::string& help);     // from 1 to 10^9
  void file(const std::string& name, std::string& field, const std::string& help);  // a positional argument
  void texts(const std::string& flag, std::vector<std::string>& field, const std::string& help);
  void size(const std::string& flag, std::uint64_t& field, const std::string& help);  // 0 means not given
  void toggle(const std::string& flag, bool& field, const std::string& help);

  // Pass the value to a function.
  void choice(const std::string& flag, const Set& set, const std::vector<std::string>& known,
              const std::string& help, const std::string& shown = "");
  void real(const std::string& flag, const Set& set, const std::string& help, const std::string& shown = "");
  // Adds a pair of mutually exclusive flags: --name and --no-name.
  void toggles(const std::string& name, const Set& set, const std::string& help);

 private:
  template <class Value>
  static std::string shown(const Value& value) {
    return fmt::format("{}", value);
  }
  template <class Value>
  static std::string shown(const std::optional<Value>&) {
    return {};
  }
  void add(const std::string& flag, const std::string& value, const std::string& help,
           const std::string& shown, const std::function<void(const std::string&)>& read);

  CLI::App& app_;
  std::string group_ = "Options";
};

// Serializes JSON for standard output. Bytes that are not UTF-8 (in paths) are replaced.
std::string json_text(const Json& json);

// Sets flags that are not on the command line from a JSON object, whose keys are the flags' names without
// leading dashes (save_every or save-every). An unknown key is Error(kInvalidArgument).
void apply_config(CLI::App& app, const Json& config, const std::string& source);

// Throws Error(kInvalidArgument) where a flag with one value occurs more than once.
void refuse_repeated(const CLI::App& app);

// Throws Error(kInvalidArgument) for unknown words, with the nearest known flag.
void refuse_unknown(const CLI::App& app);

}  // namespace sluice::cli
