#include "core/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"

namespace sluice {
namespace {

void write_all(int descriptor, const std::string& text, const std::string& path) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(descriptor, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_system("write", path);
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace

std::string path_in(const std::string& folder, std::string_view name) {
  return (std::filesystem::path(folder) / name).string();
}

std::string read_text_file(const std::string& path, std::size_t limit) {
  const Descriptor file = open_file(path, O_RDONLY);
  std::string text;
  char buffer[16384];
  while (true) {
    const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system("read", path);
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
  auto [file, sibling] = make_file(path + ".tmp-", O_WRONLY, 0644);
  try {
    for (std::string part = next(); !part.empty(); part = next()) write_all(file.get(), part, sibling);
    if (::fsync(file.get()) != 0 || !file.close()) fail_system("sync", sibling);
    if (::rename(sibling.c_str(), path.c_str()) != 0) fail_system("rename to", path);
  } catch (...) {
    ::unlink(sibling.c_str());
    throw;
  }
  const auto folder = std::filesystem::path(path).parent_path();
  sync_folder(folder.empty() ? "." : folder.string());
}

void sync_folder(const std::string& folder) {
  const Descriptor file(folder, O_RDONLY | O_DIRECTORY);
  if (::fsync(file.get()) != 0) fail_system("sync folder", folder);
}

}  // namespace sluice
