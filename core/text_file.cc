#include "core/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "core/error.h"

namespace sluice {
namespace {

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags) : value_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  bool close() {
    const int closing = std::exchange(value_, -1);
    return closing < 0 || ::close(closing) == 0;
  }

 private:
  int value_;
};

[[noreturn]] void fail_io(const char* what, const std::string& path) {
  fail(errno == ENOENT || errno == ENOTDIR ? ErrorCode::kNotFound : ErrorCode::kIo, "cannot {} '{}': {}",
       what, path, errno_text(errno));
}

void write_all(int descriptor, const std::string& text, const std::string& path) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(descriptor, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_io("write", path);
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace

std::string read_text_file(const std::string& path, std::size_t limit) {
  const Descriptor file(path, O_RDONLY);
  struct stat info = {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) fail_io("read", path);
  if (!S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode) && !S_ISCHR(info.st_mode))
    fail(ErrorCode::kInvalidArgument, "'{}' is not a file", path);
  std::string text;
  char buffer[16384];
  while (true) {
    const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("read", path);
    if (n == 0) return text;
    text.append(buffer, static_cast<std::size_t>(n));
    if (text.size() > limit)
      fail(ErrorCode::kInvalidArgument, "'{}' is longer than {} bytes, more than is expected here", path,
           limit);
  }
}

void write_text_file(const std::string& path, const std::string& text) {
  bool given = false;
  write_text_file(path, [&] { return std::exchange(given, true) ? std::string() : text; });
}

void write_text_file(const std::string& path, const std::function<std::string()>& next) {
  const std::string sibling = path + ".tmp-" + std::to_string(::getpid());
  {
    Descriptor file(sibling, O_WRONLY | O_CREAT | O_TRUNC);
    if (file.get() < 0) fail_io("create", sibling);
    try {
      for (std::string part = next(); !part.empty(); part = next()) write_all(file.get(), part, sibling);
      if (::fsync(file.get()) != 0 || !file.close()) fail_io("sync", sibling);
      if (::rename(sibling.c_str(), path.c_str()) != 0) fail_io("rename to", path);
    } catch (...) {
      ::unlink(sibling.c_str());
      throw;
    }
  }
  const auto folder = std::filesystem::path(path).parent_path();
  sync_folder(folder.empty() ? "." : folder.string());
}

void sync_folder(const std::string& folder) {
  const Descriptor file(folder, O_RDONLY | O_DIRECTORY);
  if (file.get() < 0 || ::fsync(file.get()) != 0) fail_io("sync folder", folder);
}

}  // namespace sluice
