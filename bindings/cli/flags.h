#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "engine/plan/rates.h"

// Declared here because every file that includes the library of flags compiles a large part of it.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sluice::cli {

// Read a number from a whole text. `what` is the flag that messages name.
std::uint64_t parse_whole(std::string_view what, std::string_view text, std::uint64_t least = 0);
double parse_real(std::string_view what, std::string_view text);

// Binds the flags of one subcommand to fields. It reads every value, whether from the command line or from a
// JSON file. A value of another kind is Error(kInvalidArgument) that names the flag.
class Flags {
 public:
  explicit Flags(CLI::App& app) : app_(app) {}

  using Set = std::function<void(const Json&)>;

  // The heading in --help of the flags that follow.
  void group(std::string name) { group_ = std::move(name); }

  // A field is of the value's type, or optional. Of one that is not, --help shows what it holds.
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
  void file(const std::string& name, std::string& field, const std::string& help);          // has no flag
  void texts(const std::string& flag, std::vector<std::string>& field, const std::string& help);
  void size(const std::string& flag, std::uint64_t& field, const std::string& help);  // 0 means not given
  void toggle(const std::string& flag, bool& field, const std::string& help);

  // These hand the value to a function.
  void choice(const std::string& flag, const Set& set, const std::vector<std::string>& known,
              const std::string& help, const std::string& shown = "");
  void real(const std::string& flag, const Set& set, const std::string& help, const std::string& shown = "");
  // Adds two flags that exclude each other: --name and --no-name.
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

// Writes JSON for the standard output. Bytes of a path that are not UTF-8 are replaced.
std::string json_text(const Json& json);

// Gives flags that the command line left out their values from a JSON object, whose keys are the flags' names
// without leading dashes (save_every or save-every). An unknown key is Error(kInvalidArgument).
void apply_config(CLI::App& app, const Json& config, const std::string& source);

// Throws Error(kInvalidArgument) for a flag that takes one value and is given more than once.
void refuse_repeated(const CLI::App& app);

// Throws Error(kInvalidArgument) for unknown words, and names the nearest known flag.
void refuse_unknown(const CLI::App& app);

}  // namespace sluice::cli
