#include "core/descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <utility>

#include "core/error.h"

namespace sluice {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a named pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

[[noreturn]] void refuse(const std::string& path, const char* kind) {
  fail(ErrorCode::kInvalidArgument, "'{}' is not a file, but {}; name a regular file", path, kind);
}

}  // namespace

void fail_system(const char* what, const std::string& path) {
  const int number = errno;
  const bool absent = number == ENOENT || number == ENOTDIR;
  fail(absent ? ErrorCode::kNotFound : ErrorCode::kIo, "cannot {} '{}': {}{}", what, path, errno_text(number),
       errno_advice(number));
}

Descriptor::Descriptor(const std::string& path, int flags)
    : value_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
  if (value_ < 0) fail_system("open", path);
}

Descriptor::~Descriptor() { close(); }

Descriptor::Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

bool Descriptor::close() {
  const int closing = std::exchange(value_, -1);
  return closing < 0 || ::close(closing) == 0;
}

Descriptor open_file(const std::string& path, int flags) {
  // A blocking open of a named pipe without a writer would never return. For files O_NONBLOCK has no effect.
  Descriptor file(::open(path.c_str(), flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0644));
  const bool follow = (flags & O_NOFOLLOW) == 0;
  if (file.get() < 0 && errno == ELOOP && !follow)
    fail(ErrorCode::kInvalidArgument, "'{}' is a link to another file, which is not followed; remove it",
         path);
  if (file.get() < 0 && errno == EISDIR) refuse(path, "a folder");
  if (file.get() < 0 && errno == ENXIO) refuse(path, "a pipe, socket or device");
  struct stat info = {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) fail_system("open", path);
  if (!S_ISREG(info.st_mode)) refuse(path, kind_of(info.st_mode));
  if (!follow && info.st_nlink > 1)
    fail(ErrorCode::kInvalidArgument,
         "'{}' has another name, too, and would be changed under both; remove it", path);
  return file;
}

void check_file(const std::string& path) { open_file(path, O_RDONLY); }

NewFile make_file(const std::string& beginning, int flags, unsigned rights) {
  std::string path = beginning + random_name();
  Descriptor file(::open(path.c_str(), flags | O_CREAT | O_EXCL | O_CLOEXEC, rights));
  if (file.get() < 0) fail_system("create", path);
  return {std::move(file), std::move(path)};
}

std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace sluice
