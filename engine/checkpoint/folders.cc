#include "engine/checkpoint/folders.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <string_view>

#include "core/error.h"
#include "core/log.h"
#include "core/text_file.h"
#include "engine/checkpoint/checkpoint.h"

namespace sluice::engine {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::size_t kStepDigits = 8;

bool lock_now(const Descriptor& file, const std::string& path) {
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return true;
  if (errno != EWOULDBLOCK) fail_system("lock", path);
  return false;
}

bool same_file(const Descriptor& file, const std::string& path) {
  struct stat open = {}, named = {};
  return ::fstat(file.get(), &open) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open.st_ino == named.st_ino && open.st_dev == named.st_dev;
}

std::vector<std::string> folders_in(const std::string& out) {
  std::vector<std::string> names;
  std::error_code error;
  if (!fs::exists(out, error) && !error) return names;
  fs::directory_iterator entries(out, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    std::error_code ignored;
    if (entries->is_directory(ignored)) names.push_back(entries->path().filename().string());
  }
  if (error) fail(ErrorCode::kIo, "cannot read the folder '{}': {}", out, error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// Why a folder with a checkpoint's name is not one; empty where it is, with its manifest stored.
std::string defect(const std::string& folder, std::uint64_t step, Manifest& manifest) {
  try {
    const std::string path = path_in(folder, kManifestFile);
    manifest = Manifest::parse(read_text_file(path), path);
    if (manifest.step != step) return fmt::format("its manifest is that of step {}", manifest.step);
    for (const CheckpointFile& file : manifest.files) check_bytes(path_in(folder, file.name), file.sum.bytes);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

void check_bytes(const std::string& path, std::uint64_t written) {
  std::error_code error, ignored;
  const std::uint64_t found = fs::file_size(path, error);
  if (error && fs::exists(path, ignored)) check_file(path);  // it may be a pipe, or a folder
  if (error) fail(ErrorCode::kCorrupt, "'{}' cannot be read: {}", path, error.message());
  if (found != written)
    fail(ErrorCode::kCorrupt, "'{}' has {} bytes, and {} were written", path, found, written);
}

std::string checkpoint_name(std::uint64_t step) {
  return fmt::format("{}{:0{}}", kPrefix, step, kStepDigits);
}

std::optional<std::uint64_t> checkpoint_step(const std::string& name) {
  if (!std::string_view(name).starts_with(kPrefix)) return std::nullopt;
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (error != std::errc() || name != checkpoint_name(step)) return std::nullopt;
  return step;
}

std::string partial_name(std::uint64_t step) {
  return fmt::format(".{}.partial-{}", checkpoint_name(step), random_name());
}

std::string removed_name(const std::string& name) {
  return fmt::format(".{}.removed-{}", name, random_name());
}

bool is_leftover_name(const std::string& name) {
  if (name.empty() || name.front() != '.') return false;
  const std::size_t dot = name.find('.', 1);
  if (dot == std::string::npos || !checkpoint_step(name.substr(1, dot - 1))) return false;
  const std::string_view rest = std::string_view(name).substr(dot);
  return rest.starts_with(".partial-") || rest.starts_with(".removed-");
}

Descriptor make_locked_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) != 0) fail_system("make the folder", path);
  Descriptor lock(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  // Between the two calls above, another process may have taken the folder for a leftover.
  if (!lock_now(lock, path) || !same_file(lock, path))
    fail(ErrorCode::kState, "'{}' was taken by another process", path);
  return lock;
}

bool remove_unheld(const std::string& path) {
  const Descriptor lock(path, O_RDONLY | O_DIRECTORY);
  if (!lock_now(lock, path)) return false;
  remove_folder(path);
  return true;
}

void remove_folder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail(ErrorCode::kIo, "cannot remove '{}': {}", path, error.message());
}

void exchange_or_rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return;
  if (errno != EEXIST && errno != ENOTEMPTY) fail_system("rename to", to);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
    fail_system("replace", to);
}

// Returns false where another run that has just ended has removed the folder or the file meanwhile.
bool RunLock::try_lock() {
  std::error_code error;
  fs::create_directories(out_, error);
  if (error)
    fail(ErrorCode::kIo, "cannot make the folder '{}': {}{}", out_, errno_text(error.value()),
         errno_advice(error.value()));
  try {
    file_ = open_file(path_, O_RDWR | O_CREAT | O_NOFOLLOW);
  } catch (const Error& failure) {
    if (failure.code() == ErrorCode::kNotFound) return false;
    throw;
  }
  if (lock_now(file_, path_)) return same_file(file_, path_);
  std::string owner = read_text_file(path_, 64);
  while (!owner.empty() && owner.back() == '\n') owner.pop_back();
  fail(ErrorCode::kInvalidArgument,
       "'{}' is used by another run (process {}); wait for it, or give another folder", out_,
       owner.empty() ? "unknown" : owner);
}

RunLock::RunLock(const std::string& out) : out_(out), path_(path_in(out, ".lock")) {
  for (fs::path at = fs::absolute(out); !fs::exists(at) && at != at.parent_path(); at = at.parent_path())
    made_.push_back(at.string());
  constexpr int kTries = 100;
  for (int tries = 1; !try_lock(); ++tries)
    if (tries == kTries) fail(ErrorCode::kIo, "'{}' is taken away again and again by other runs", path_);
  const std::string text = std::to_string(::getpid()) + "\n";
  if (::ftruncate(file_.get(), 0) == 0 && ::pwrite(file_.get(), text.data(), text.size(), 0) >= 0) return;
  const int error_number = errno;
  release();
  errno = error_number;
  fail_system("write into the folder", out_);
}

RunLock::~RunLock() { release(); }

// The file is removed while it is locked: a process that opened it before finds that the path no longer names
// it.
void RunLock::release() {
  ::unlink(path_.c_str());
  for (const std::string& folder : made_)
    if (::rmdir(folder.c_str()) != 0 && errno != ENOENT) break;
}

CheckpointList list_checkpoints(const std::string& out) {
  CheckpointList list;
  for (const std::string& name : folders_in(out)) {
    const auto step = checkpoint_step(name);
    if (!step) continue;
    const std::string path = path_in(out, name);
    Manifest manifest;
    const std::string reason = defect(path, *step, manifest);
    if (reason.empty())
      list.whole.push_back({*step, path, std::move(manifest.run)});
    else
      list.broken.push_back({path, reason});
  }
  std::sort(list.whole.begin(), list.whole.end(),
            [](const auto& a, const auto& b) { return a.step < b.step; });
  return list;
}

std::optional<std::string> newest_checkpoint(const std::string& out) {
  const CheckpointList list = list_checkpoints(out);
  for (const auto& broken : list.broken) {
    const auto step = checkpoint_step(fs::path(broken.path).filename().string());
    const bool is_newest = !list.whole.empty() && step > list.whole.back().step;
    log().warn("'{}' is not a whole checkpoint: {}{}", broken.path, broken.reason,
               is_newest ? fmt::format("; '{}' is taken", list.whole.back().path) : "");
  }
  if (!list.whole.empty()) return list.whole.back().path;
  if (list.broken.empty()) return std::nullopt;
  fail(ErrorCode::kCorrupt,
       "'{}' holds no whole checkpoint to go on from; move those that the warnings name away to begin at the "
       "start, or name another folder",
       out);
}

void fail_damaged(const Error& damage, const std::string& folder) {
  fs::path path = folder;
  if (!path.has_filename()) path = path.parent_path();
  const auto step = checkpoint_step(path.filename().string());
  const std::string out = path.has_parent_path() ? path.parent_path().string() : ".";
  std::string before;
  for (const auto& whole : list_checkpoints(out).whole)
    if (whole.step < step) before = whole.path;
  if (before.empty()) fail(ErrorCode::kCorrupt, "{}", damage.what());
  fail(ErrorCode::kCorrupt, "{}; move '{}' away to go on from the checkpoint before it, '{}'", damage.what(),
       path.string(), before);
}

std::vector<std::string> remove_leftovers(const std::string& out) {
  std::vector<std::string> removed;
  for (const std::string& name : folders_in(out))
    if (is_leftover_name(name) && remove_unheld(path_in(out, name))) removed.push_back(name);
  return removed;
}

std::vector<std::string> prune(const std::string& out, std::size_t keep,
                               std::optional<std::uint64_t> spared) {
  if (keep == 0) fail(ErrorCode::kInvalidArgument, "at least one checkpoint must be kept in '{}'", out);
  const auto whole = list_checkpoints(out).whole;
  std::vector<std::string> gone;
  for (std::size_t i = 0; i + keep < whole.size(); ++i) {
    if (whole[i].step == spared) continue;
    const std::string hidden = path_in(out, removed_name(checkpoint_name(whole[i].step)));
    if (::rename(whole[i].path.c_str(), hidden.c_str()) != 0) fail_system("rename", whole[i].path);
    sync_folder(out);
    remove_folder(hidden);
    gone.push_back(whole[i].path);
  }
  return gone;
}

}  // namespace sluice::engine
