#pragma once
#include "testing.h"

namespace sluice {

// A variable of the environment, of this process and of those that it starts, while this lives. Without a
// value it is not set.
class Variable {
 public:
  Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
    if (std::getenv(name) != nullptr) before_ = std::getenv(name);
    set(value);
  }
  ~Variable() { set(before_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const std::optional<std::string>& value) const {
    value ? ::setenv(name_, value->c_str(), 1) : ::unsetenv(name_);
  }
  const char* const name_;
  std::optional<std::string> before_;
};

}  // namespace sluice
