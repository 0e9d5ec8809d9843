#pragma once
#include <string>

#include "core/json.h"

namespace sluice::models {

// One config.json of a Hugging Face folder, or an object within it: what it asks for and Sluice does not do,
// and what is no value of its key, is Error(kInvalidArgument) that names source and key. The document
// outlives the reader.
class ConfigReader {
 public:
  ConfigReader(const Json& config, const std::string& source);

  bool has(const std::string& key) const;  // null counts as absent
  // Of a key that must be there, or whose absence means `otherwise`.
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

  // For what Sluice computes in one way only.
  void only(const std::string& key, bool value) const;
  void only_full_attention() const;
  void absent(const std::string& key) const;

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;
  ConfigReader inner(const std::string& key) const;  // the object that the key has

 private:
  void require(const std::string& key) const;

  const Json& config_;
  std::string source_;
};

// The shortest decimals that are the same float again, so that 1e-5 is written as people write it.
double shortest(float value);

}  // namespace sluice::models
