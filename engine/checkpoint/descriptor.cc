#include "engine/checkpoint/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

void fail_system(const char* what, const std::string& path) {
  const int number = errno;
  const bool absent = number == ENOENT || number == ENOTDIR;
  fail(absent ? ErrorCode::kNotFound : ErrorCode::kIo, "cannot {} '{}': {}", what, path, errno_text(number));
}

Descriptor::Descriptor(const std::string& path, int flags)
    : value_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
  if (value_ < 0) fail_system("open", path);
}

Descriptor::~Descriptor() {
  if (value_ >= 0) ::close(value_);
}

Descriptor::Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

}  // namespace sluice::engine
