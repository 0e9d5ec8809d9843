#include "models/data/tokens.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"
#include "models/data/token_files.h"

namespace sluice::models {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::size_t kReadBytes = 16 * 1024;  // per system call

std::uint32_t token_at(const std::byte* at, unsigned width) {
  std::uint32_t token = 0;
  std::memcpy(&token, at, width);
  return token;
}

class FileTokens : public TokenSource {
 public:
  FileTokens(std::vector<TokenFile> files, std::string name)
      : files_(std::move(files)), name_(std::move(name)) {
    for (const TokenFile& file : files_) ends_.push_back(total() + file.count);
  }

  std::uint64_t total() const override { return ends_.empty() ? 0 : ends_.back(); }
  std::optional<std::uint64_t> vocabulary() const override {
    return is_text() ? std::optional<std::uint64_t>(kByteVocabulary) : std::nullopt;
  }
  const std::string& name() const override { return name_; }

  void set_vocabulary(std::uint64_t size) override {
    if (is_text() && size < kByteVocabulary)
      fail(ErrorCode::kInvalidArgument,
           "'{}' is text, whose tokens are its {} bytes, and the model has a vocabulary of {}; give token "
           "files (.bin) made with the model's tokenizer, or a model with a vocabulary of at least {}",
           name_, kByteVocabulary, size, kByteVocabulary);
    limit_ = std::min(size, kLargest);
  }

  void read(std::uint64_t first, std::span<std::int32_t> out) override {
    if (first > total() || out.size() > total() - first)
      fail(ErrorCode::kInvalidArgument, "{} tokens from {} were asked of '{}', which has {}", out.size(),
           first, name_, total());
    while (!out.empty()) {
      const auto index =
          static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
      const std::size_t count =
          std::min<std::uint64_t>({out.size(), ends_[index] - first, kReadBytes / files_[index].width});
      read_some(index, first - (ends_[index] - files_[index].count), out.first(count));
      first += count;
      out = out.subspan(count);
    }
  }

 private:
  static constexpr std::uint64_t kLargest = std::uint64_t{1} << 31;

  bool is_text() const { return files_.front().width == 1; }

  void open(std::size_t index) {
    if (open_ == index) return;
    open_ = kNone;
    descriptor_ = open_file(files_[index].path, O_RDONLY);
    // Windows are read in random order: the kernel's read-ahead would only fill memory.
    ::posix_fadvise(descriptor_.get(), 0, 0, POSIX_FADV_RANDOM);
    open_ = index;
  }

  // Reads tokens of one file. REQUIRES: they take at most kReadBytes
  void read_some(std::size_t index, std::uint64_t first, std::span<std::int32_t> out) {
    open(index);
    const TokenFile& file = files_[index];
    std::array<std::byte, kReadBytes> bytes;
    const std::size_t wanted = out.size() * file.width;
    for (std::size_t done = 0; done < wanted;) {
      const auto offset = static_cast<off_t>(file.header + first * file.width + done);
      const ssize_t n = ::pread(descriptor_.get(), bytes.data() + done, wanted - done, offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_system("read", file.path);
      if (n == 0)
        fail(ErrorCode::kIo, "'{}' ends at byte {}: it became shorter since the run began", file.path,
             offset);
      done += static_cast<std::size_t>(n);
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::uint32_t token = token_at(bytes.data() + i * file.width, file.width);
      if (token >= limit_)
        fail(ErrorCode::kInvalidArgument, "'{}' holds token {} at position {}, and the vocabulary has {}",
             file.path, token, first + i, limit_);
      out[i] = static_cast<std::int32_t>(token);
    }
  }

  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::vector<TokenFile> files_;
  std::vector<std::uint64_t> ends_;  // by file: the number of tokens before its end
  std::string name_;
  std::uint64_t limit_ = kLargest;
  Descriptor descriptor_;
  std::size_t open_ = kNone;
};

}  // namespace

std::unique_ptr<TokenSource> open_tokens(const std::vector<std::string>& paths) {
  if (paths.empty()) fail(ErrorCode::kInvalidArgument, "no path of text or tokens was given");
  std::vector<TokenFile> files;
  for (const std::string& path : paths) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
      const std::vector<TokenFile> folder = find_text_folder(path);
      files.insert(files.end(), folder.begin(), folder.end());
    } else {
      files.push_back(is_token_file_name(path) ? find_token_file(path) : find_text_file(path));
    }
  }
  for (const TokenFile& file : files)
    if ((file.width == 1) != (files.front().width == 1))
      fail(ErrorCode::kInvalidArgument, "'{}' and '{}' cannot be mixed: one is text, the other holds tokens",
           files.front().path, file.path);
  std::string name =
      paths.size() == 1 ? paths.front() : fmt::format("{} and {} more", paths.front(), paths.size() - 1);
  return std::make_unique<FileTokens>(std::move(files), std::move(name));
}

}  // namespace sluice::models
