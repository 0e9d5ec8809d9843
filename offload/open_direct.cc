#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "core/bytes.h"
#include "core/descriptor.h"
#include "core/error.h"
#include "offload/disk_file.h"
#include "offload/records.h"

namespace sluice::offload {
namespace {

constexpr int kDirect = O_DIRECT | O_CLOEXEC;

int open_retrying(const std::string& path, int flags, mode_t rights) {
  int number = 0;
  do number = ::open(path.c_str(), flags, rights);
  while (number < 0 && errno == EINTR);
  return number;
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// The name that messages give a file without a name.
std::string name_of_unnamed(const std::string& folder) {
  return fmt::format("the file without a name in '{}'", folder);
}

[[noreturn]] void fail_without_direct(const std::string& folder) {
  fail(ErrorCode::kInvalidArgument,
       "the file system of the folder '{}' does not offer O_DIRECT (reads and writes past the page cache, "
       "whose memory Sluice could not account for): name a folder on a local disk with ext4, xfs or btrfs",
       folder);
}

[[noreturn]] void fail_to_open(const std::string& path, const std::string& folder, int error_number) {
  switch (error_number) {
    case ENOENT:
      fail(ErrorCode::kNotFound, "'{}' does not exist: create it or name another", path);
    case EINVAL:
      fail_without_direct(folder);
    case EEXIST:
      fail(ErrorCode::kInvalidArgument,
           "'{}' exists already, and would have been overwritten: remove it or name another", path);
    case ENOTDIR:
      fail(ErrorCode::kInvalidArgument, "a part of '{}' is not a folder: {}", path, errno_text(ENOTDIR));
    case EACCES:
    case EPERM:
    case EROFS:
      fail(ErrorCode::kInvalidArgument, "this user may not open '{}': {}: change its rights or name another",
           path, errno_text(error_number));
    default:
      fail(ErrorCode::kIo, "'{}' cannot be opened: {}{}", path, errno_text(error_number),
           errno_advice(error_number));
  }
}

// Some file systems accept O_DIRECT and refuse the first transfer, so one transfer is tried before a run
// begins.
void probe_direct(const OpenedFile& file, bool is_new) {
  alignas(kDiskBlock) static constexpr std::array<std::byte, kDiskBlock> zeros{};
  alignas(kDiskBlock) std::array<std::byte, kDiskBlock> read_back;
  const int number = file.descriptor.get();
  const ssize_t moved = is_new ? ::pwrite(number, zeros.data(), zeros.size(), 0)
                               : ::pread(number, read_back.data(), read_back.size(), 0);
  if (moved < 0 && errno == EINVAL) fail_without_direct(file.folder);
  if (moved < 0)
    fail(ErrorCode::kIo, "{}: the first transfer failed: {}{}", file.name, errno_text(errno),
         errno_advice(errno));
  if (is_new && ::ftruncate(number, 0) != 0)
    fail(ErrorCode::kIo, "{}: cannot be cut to 0 bytes: {}", file.name, errno_text(errno));
}

void check_folder(const std::string& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) {
    if (errno == ENOENT)
      fail(ErrorCode::kNotFound, "the folder '{}' does not exist: create it (mkdir -p) or name another",
           folder);
    fail_to_open(folder, folder, errno);
  }
  if (!S_ISDIR(status.st_mode))
    fail(ErrorCode::kInvalidArgument, "'{}' is not a folder: name a folder", folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    fail(ErrorCode::kInvalidArgument,
         "the folder '{}' is not writable: {}: change its rights or name another", folder, errno_text(errno));
}

OpenedFile open_unnamed(const std::string& folder) {
  check_folder(folder);
  const int number = open_retrying(folder, O_TMPFILE | O_EXCL | O_RDWR | kDirect, 0600);
  if (number >= 0) return {Descriptor(number), name_of_unnamed(folder), folder};
  if (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT) return open_and_unlink(folder);
  fail_to_open(folder, folder, errno);
}

OpenedFile open_existing(const std::string& path, OpenMode mode) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_to_open(path, folder_of(path), errno);
  if (!S_ISREG(status.st_mode)) check_file(path);
  // O_NONBLOCK: the path may have become a pipe since, whose open would block.
  const int access = mode == OpenMode::kRead ? O_RDONLY : O_RDWR;
  const int number = open_retrying(path, access | O_NONBLOCK | kDirect, 0);
  if (number < 0) fail_to_open(path, folder_of(path), errno);
  return {Descriptor(number), path, folder_of(path)};
}

OpenedFile open_new(const std::string& path) {
  check_folder(folder_of(path));
  const int number = open_retrying(path, O_CREAT | O_EXCL | O_RDWR | kDirect, 0666);
  if (number >= 0) return {Descriptor(number), path, folder_of(path)};
  const int error_number = errno;
  // Linux creates the file before it refuses O_DIRECT.
  if (error_number == EINVAL) ::unlink(path.c_str());
  fail_to_open(path, folder_of(path), error_number);
}

}  // namespace

OpenedFile open_and_unlink(const std::string& folder) {
  const std::string path = fmt::format("{}/.sluice-swap-{}", folder, random_name());
  const int number = open_retrying(path, O_CREAT | O_EXCL | O_RDWR | kDirect, 0600);
  const int error_number = errno;
  if (number >= 0 || error_number == EINVAL) ::unlink(path.c_str());
  if (number < 0) fail_to_open(path, folder, error_number);
  return {Descriptor(number), name_of_unnamed(folder), folder};
}

OpenedFile open_direct(const std::string& path, OpenMode mode) {
  const bool is_new = mode == OpenMode::kCreate || mode == OpenMode::kUnnamed;
  OpenedFile file = mode == OpenMode::kUnnamed  ? open_unnamed(path)
                    : mode == OpenMode::kCreate ? open_new(path)
                                                : open_existing(path, mode);
  try {
    probe_direct(file, is_new);
  } catch (...) {
    if (mode == OpenMode::kCreate) ::unlink(path.c_str());
    throw;
  }
  return file;
}

std::uint64_t free_disk_bytes(const std::string& folder) {
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) != 0)
    fail(ErrorCode::kIo, "the free space of '{}' cannot be read: {}", folder, errno_text(errno));
  return std::uint64_t{status.f_bavail} * status.f_frsize;
}

}  // namespace sluice::offload
