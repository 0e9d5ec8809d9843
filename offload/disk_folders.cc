#include "offload/disk_folders.h"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <map>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::offload {
namespace {

constexpr std::uint64_t kKnowledgeSample = 64 * kMiB;

struct stat status_of(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0)
    fail(ErrorCode::kNotFound, "the disk folder '{}' cannot be used: {}; make it, or name another", path,
         errno_text(errno));
  if (!S_ISDIR(info.st_mode)) fail(ErrorCode::kInvalidArgument, "the disk folder '{}' is not a folder", path);
  return info;
}

std::filesystem::path existing_parent(const std::string& path) {
  std::filesystem::path at = std::filesystem::absolute(path);
  while (!at.empty() && at != at.parent_path() && !std::filesystem::exists(at)) at = at.parent_path();
  return at;
}

// Space on one file system, which may have several folders.
struct Promised {
  std::uint64_t stated = 0;    // for folders with a stated limit
  std::uint64_t reserved = 0;  // for checkpoints
  std::uint64_t whole = 0;     // the number of folders that share the rest
};

void promise(const DiskFolder& folder, Promised& promised) {
  check_disk_folder(folder.path);
  if (folder.limit == kWholeDisk) {
    ++promised.whole;
    return;
  }
  const std::uint64_t room = free_disk_bytes(folder.path), left = room - std::min(room, promised.stated);
  if (folder.limit > left)
    fail(ErrorCode::kBudget,
         "the disk folder '{}' was given {}, and {} are free there{}: {} are missing; free some, state less, "
         "or name another (sluice plan --machine FILE plans for a disk that is not here)",
         folder.path, format_size(folder.limit), format_size(room),
         promised.stated == 0 ? ""
                              : fmt::format(", of which other folders of the same file system were given {}",
                                            format_size(promised.stated)),
         format_size(folder.limit - left));
  promised.stated += folder.limit;
}

constexpr std::uint64_t kLeastDisk = kMiB;  // for a folder: one block of records

}  // namespace

DiskFolder parse_disk(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  const bool sized = colon != std::string::npos && colon + 1 < text.size() &&
                     std::isdigit(static_cast<unsigned char>(text[colon + 1])) != 0 &&
                     text.find('/', colon) == std::string::npos;
  const std::string path = sized ? text.substr(0, colon) : text;
  if (path.empty() || (!sized && text.back() == ':'))
    fail(ErrorCode::kInvalidArgument,
         "the disk is '{}', which is not FOLDER or FOLDER:SIZE, such as /scratch:20GiB", text);
  if (!sized) return {path, kWholeDisk};
  try {
    const std::uint64_t size = parse_size(text.substr(colon + 1));
    if (size > 0) return {path, size};
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "the disk is '{}': {}", text, error.what());
  }
  fail(ErrorCode::kInvalidArgument, "the disk '{}' lends nothing; leave it out, or state a size", text);
}

void resolve_disk(std::vector<DiskFolder>& disk, const std::string& out, std::uint64_t reserved,
                  int sharers) {
  std::map<dev_t, Promised> systems;
  if (!out.empty()) systems[status_of(existing_parent(out).string()).st_dev].reserved = reserved;
  for (const DiskFolder& folder : disk) promise(folder, systems[status_of(folder.path).st_dev]);
  for (DiskFolder& folder : disk) {
    const bool whole = folder.limit == kWholeDisk;
    const Promised& promised = systems[status_of(folder.path).st_dev];
    const std::uint64_t room = free_disk_bytes(folder.path);
    if (whole)
      folder.limit = (room - std::min(room, promised.reserved + promised.stated)) / 20 * 19 / promised.whole /
                     static_cast<std::uint64_t>(sharers);
    if (folder.limit < kLeastDisk)
      fail(whole ? ErrorCode::kBudget : ErrorCode::kInvalidArgument,
           "the disk folder '{}' can lend {}{}; {} are the least that is of use", folder.path,
           format_size(folder.limit), whole ? " beside what checkpoints need there" : " as stated",
           format_size(kLeastDisk));
  }
}

std::uint64_t usable_disk(const std::vector<DiskFolder>& disk) {
  std::uint64_t least = disk.empty() ? 0 : kWholeDisk;
  for (const DiskFolder& folder : disk) least = std::min(least, folder.limit);
  return least * disk.size();
}

std::uint64_t bytes_to_measure(const DiskFolder& folder, std::uint64_t most) {
  return std::min(most, folder.limit / kDiskBlock * kDiskBlock);
}

std::vector<DiskKnowledge> know_disks(const std::vector<DiskFolder>& disk) {
  std::vector<DiskKnowledge> disks;
  for (const DiskFolder& folder : disk)
    disks.push_back(know_disk(folder.path, bytes_to_measure(folder, kKnowledgeSample)));
  return disks;
}

}  // namespace sluice::offload
