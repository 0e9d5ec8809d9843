#include "models/data/token_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/descriptor.h"
#include "core/error.h"

namespace sluice::models {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kTextProbe = 4096;

struct Start {
  std::uint64_t size = 0;        // of the file
  std::vector<std::byte> bytes;  // the beginning of the file
};

Start read_start(const std::string& path, std::size_t limit) {
  const Descriptor file = open_file(path, O_RDONLY);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) fail_system("read", path);
  Start start{static_cast<std::uint64_t>(info.st_size), std::vector<std::byte>(limit)};
  std::size_t done = 0;
  while (done < limit) {
    const ssize_t n = ::pread(file.get(), start.bytes.data() + done, limit - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system("read", path);
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  start.bytes.resize(done);
  return start;
}

bool has_nul(const Start& start) {
  return std::find(start.bytes.begin(), start.bytes.end(), std::byte{0}) != start.bytes.end();
}

// A file of llm.c begins with 256 int32.
struct LlmcFormat {
  std::uint32_t magic, version;
  unsigned width;
};
constexpr LlmcFormat kLlmcFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr std::size_t kLlmcHeader = 256 * sizeof(std::int32_t);

TokenFile llmc_file(const std::string& path, const Start& start, const LlmcFormat& format) {
  if (start.bytes.size() < kLlmcHeader)
    fail(ErrorCode::kInvalidArgument,
         "'{}' begins as a token file of llm.c, and has {} bytes, fewer than its header of {}", path,
         start.size, kLlmcHeader);
  std::array<std::uint32_t, 3> fields = {};
  std::memcpy(fields.data(), start.bytes.data(), sizeof fields);
  if (fields[1] != format.version)
    fail(ErrorCode::kInvalidArgument,
         "'{}' is a token file of llm.c with magic {} and version {}; version {} is known", path,
         format.magic, fields[1], format.version);
  const std::uint64_t count = fields[2];
  if (start.size != kLlmcHeader + count * format.width)
    fail(ErrorCode::kInvalidArgument,
         "'{}' states {} tokens of {} bytes, which with its header make {} bytes, and has {}", path, count,
         format.width, kLlmcHeader + count * format.width, start.size);
  if (count == 0) fail(ErrorCode::kInvalidArgument, "'{}' holds no tokens", path);
  return {path, kLlmcHeader, count, format.width};
}

// Returns the sorted paths of the files below a folder. Hidden entries are skipped and counted.
std::vector<std::string> list_files(const std::string& folder, std::uint64_t* hidden) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().filename().native().starts_with('.')) {
      if (entry->is_directory(ignored))
        entry.disable_recursion_pending();
      else
        ++*hidden;
    } else if (entry->is_regular_file(ignored)) {
      paths.push_back(entry->path().string());
    }
  }
  if (error) fail(ErrorCode::kIo, "cannot read the folder '{}': {}", folder, error.message());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

bool is_token_file_name(const std::string& path) { return fs::path(path).extension() == ".bin"; }

TokenFile find_token_file(const std::string& path) {
  const Start start = read_start(path, kLlmcHeader);
  if (start.size == 0) fail(ErrorCode::kInvalidArgument, "'{}' is empty", path);
  std::uint32_t magic = 0;
  if (start.bytes.size() >= sizeof magic) std::memcpy(&magic, start.bytes.data(), sizeof magic);
  for (const LlmcFormat& format : kLlmcFormats)
    if (magic == format.magic) return llmc_file(path, start, format);
  if (start.size % 2 != 0)
    fail(ErrorCode::kInvalidArgument,
         "'{}' is no token file: it has no header of llm.c, and {} bytes are no whole number "
         "of 16-bit tokens",
         path, start.size);
  return {path, 0, start.size / 2, 2};
}

TokenFile find_text_file(const std::string& path) {
  const Start start = read_start(path, kTextProbe);
  if (start.size == 0) fail(ErrorCode::kInvalidArgument, "'{}' is empty", path);
  if (has_nul(start))
    fail(ErrorCode::kInvalidArgument,
         "'{}' is no text: it has a zero byte in its first {} bytes; token files end in .bin", path,
         kTextProbe);
  return {path, 0, start.size, 1};
}

std::vector<TokenFile> find_text_folder(const std::string& path) {
  std::vector<TokenFile> files;
  std::uint64_t skipped = 0;
  for (const std::string& file : list_files(path, &skipped)) {
    const Start start = read_start(file, kTextProbe);
    if (start.size == 0 || has_nul(start))
      ++skipped;
    else
      files.push_back({file, 0, start.size, 1});
  }
  if (files.empty())
    fail(ErrorCode::kInvalidArgument,
         "the folder '{}' holds no text ({} files were skipped: hidden, empty, or with zero "
         "bytes); token files (.bin) are named one by one",
         path, skipped);
  return files;
}

}  // namespace sluice::models
