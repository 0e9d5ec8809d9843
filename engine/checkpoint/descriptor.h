#pragma once
#include <string>

namespace sluice::engine {

// An open file or folder of the system, closed with its owner. Errors name the path.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int opened) : value_(opened) {}  // takes ownership
  // Opens the file. Throws Error(kNotFound) where it does not exist, Error(kIo) otherwise.
  Descriptor(const std::string& path, int flags);
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return value_; }

 private:
  int value_ = -1;
};

// Throws the error of the last system call: "cannot <what> '<path>': ...".
[[noreturn]] void fail_system(const char* what, const std::string& path);

}  // namespace sluice::engine
