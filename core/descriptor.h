#pragma once
#include <string>

namespace sluice {

// Owns an open file descriptor of a file or folder, and closes it. Errors name the path.
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
  bool close();  // returns false where the system reports an error

 private:
  int value_ = -1;
};

// Opens a file at a path that a user has given. A pipe, a device or a folder is Error(kInvalidArgument), and
// is neither waited for nor changed. With O_NOFOLLOW in `flags` so is a link, symbolic or hard: in a folder
// of several users, none of them may redirect what is written there to another file. Other errors are those
// of Descriptor.
Descriptor open_file(const std::string& path, int flags);

// Makes the checks of open_file(), for callers that then read the file by other means.
void check_file(const std::string& path);

struct NewFile {
  Descriptor file;
  std::string path;
};
// Creates a file with a random ending after `beginning`, and never opens an existing one: so nobody can have
// put a link in its place.
NewFile make_file(const std::string& beginning, int flags, unsigned rights);

std::string random_name();  // 16 hexadecimal digits

// Throws an Error for errno of the last system call: "cannot <what> '<path>': ...".
[[noreturn]] void fail_system(const char* what, const std::string& path);

}  // namespace sluice
