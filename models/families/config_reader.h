#pragma once
#include <string>

#include "core/json.h"

namespace sluice::models {

// Reads a config.json of a Hugging Face folder, or an object in it, which outlives the reader. Throws
// Error(kInvalidArgument), with the key, for an invalid value and for a request that Sluice does not support.
class ConfigReader {
 public:
  ConfigReader(const Json& config, const std::string& source);

  bool has(const std::string& key) const;      // null counts as absent
  bool is_null(const std::string& key) const;  // and not absent
  // Each function returns the value of a key. Without `otherwise` the key is required; else it is the
  // default.
  std::size_t size(const std::string& key) const;  // at least 1
  std::size_t size(const std::string& key, std::size_t otherwise) const;
  double number(const std::string& key) const;  // finite
  double number(const std::string& key, double otherwise) const;
  double positive(const std::string& key, double otherwise) const;
  float single(const std::string& key, double otherwise) const;
  float epsilon(const std::string& key, double otherwise) const;
  float dropout(const std::string& key, double otherwise) const;
  bool flag(const std::string& key, bool otherwise) const;
  std::string text(const std::string& key, const std::string& otherwise) const;

  // These functions refuse any value but the one that Sluice supports.
  void only(const std::string& key, bool value) const;
  void only_full_attention() const;
  void absent(const std::string& key) const;

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;
  ConfigReader inner(const std::string& key) const;  // a reader for the object at that key

 private:
  void require(const std::string& key) const;

  const Json& config_;
  std::string source_;
};

// Returns the shortest decimal that converts to the same float, so that 1e-5 is written as people write it.
double shortest(float value);

}  // namespace sluice::models
