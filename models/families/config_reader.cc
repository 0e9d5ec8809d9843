#include "models/families/config_reader.h"

#include <cmath>
#include <limits>

#include "core/error.h"

namespace sluice::models {

ConfigReader::ConfigReader(const Json& config, const std::string& source) : config_(config), source_(source) {
  if (!config.is_object()) fail(ErrorCode::kInvalidArgument, "{}: not an object", source);
}

bool ConfigReader::has(const std::string& key) const {
  const auto found = config_.find(key);
  return found != config_.end() && !found->is_null();
}

bool ConfigReader::is_null(const std::string& key) const {
  return config_.contains(key) && config_.at(key).is_null();
}

std::size_t ConfigReader::size(const std::string& key) const {
  require(key);
  const Json& value = config_.at(key);
  if (!value.is_number_integer() || value.get<std::int64_t>() < 1)
    refuse(key, "a whole number of at least 1");
  return value.get<std::size_t>();
}

std::size_t ConfigReader::size(const std::string& key, std::size_t otherwise) const {
  return has(key) ? size(key) : otherwise;
}

double ConfigReader::number(const std::string& key) const {
  require(key);
  const Json& value = config_.at(key);
  if (!value.is_number() || !std::isfinite(value.get<double>())) refuse(key, "a number");
  return value.get<double>();
}

double ConfigReader::number(const std::string& key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}

double ConfigReader::positive(const std::string& key, double otherwise) const {
  const double value = number(key, otherwise);
  if (value <= 0) refuse(key, "a number above 0");
  return value;
}

float ConfigReader::single(const std::string& key, double otherwise) const {
  const double value = number(key, otherwise);
  if (std::abs(value) > std::numeric_limits<float>::max()) refuse(key, "within the range of f32");
  return static_cast<float>(value);
}

float ConfigReader::epsilon(const std::string& key, double otherwise) const {
  const float value = single(key, otherwise);
  if (value <= 0) refuse(key, "a number above 0, in f32 too");
  return value;
}

float ConfigReader::dropout(const std::string& key, double otherwise) const {
  const float value = single(key, otherwise);
  if (value < 0 || value >= 1) refuse(key, "a number of at least 0 and less than 1");
  return value;
}

bool ConfigReader::flag(const std::string& key, bool otherwise) const {
  if (!has(key)) return otherwise;
  if (!config_.at(key).is_boolean()) refuse(key, "true or false");
  return config_.at(key).get<bool>();
}

std::string ConfigReader::text(const std::string& key, const std::string& otherwise) const {
  if (!has(key)) return otherwise;
  if (!config_.at(key).is_string()) refuse(key, "a text");
  return config_.at(key).get<std::string>();
}

void ConfigReader::only(const std::string& key, bool value) const {
  if (flag(key, value) != value)
    refuse(key, value ? "true: Sluice has nothing else" : "false: Sluice has nothing else");
}

void ConfigReader::only_full_attention() const {
  if (!has("layer_types")) return;
  for (const Json& type : config_.at("layer_types")) {
    if (type != "full_attention") refuse("layer_types", "full_attention everywhere");
  }
}

void ConfigReader::absent(const std::string& key) const {
  if (has(key)) refuse(key, "absent: Sluice has nothing of the kind");
}

void ConfigReader::refuse(const std::string& key, const std::string& expected) const {
  fail(ErrorCode::kInvalidArgument, "{}: '{}' is {}; it must be {}", source_, key,
       config_.contains(key) ? config_.at(key).dump().substr(0, 80) : "missing", expected);
}

ConfigReader ConfigReader::inner(const std::string& key) const {
  return {config_.at(key), source_ + ": " + key};
}

void ConfigReader::require(const std::string& key) const {
  if (has(key)) return;
  std::vector<std::string> keys;
  for (const auto& item : config_.items()) keys.push_back(item.key());
  const std::string nearest = nearest_word(key, keys);
  fail(ErrorCode::kInvalidArgument, "{}: '{}' is missing{}", source_, key,
       nearest.empty() ? "" : "; is '" + nearest + "' meant?");
}

double shortest(float value) { return std::stod(fmt::format("{}", value)); }

}  // namespace sluice::models
