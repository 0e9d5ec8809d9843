#pragma once
#include <string>

namespace sluice {

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
  bool close();  // false: the system reports an error

 private:
  int value_ = -1;
};

// Opens a file that somebody has named, where anything may be. A pipe, a device or a folder is
// Error(kInvalidArgument), and is neither waited for nor changed. With O_NOFOLLOW in `flags` so is a link,
// symbolic or hard: what is written in a folder of several users must not reach a file that one of them has
// linked there. Other errors are those of Descriptor.
Descriptor open_file(const std::string& path, int flags);

// Throws what open_file() does, for who opens the file otherwise to read it.
void check_file(const std::string& path);

struct NewFile {
  Descriptor file;
  std::string path;
};
// Makes a file that is not there, whose path begins so and ends at random: nobody can have put a link in its
// place.
NewFile make_file(const std::string& beginning, int flags, unsigned rights);

std::string random_name();  // 16 hexadecimal digits

// Throws the error of the last system call: "cannot <what> '<path>': ...".
[[noreturn]] void fail_system(const char* what, const std::string& path);

}  // namespace sluice
