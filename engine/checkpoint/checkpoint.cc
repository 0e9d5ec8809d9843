#include "engine/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <utility>

#include "core/error.h"
#include "core/text_file.h"
#include "engine/checkpoint/folders.h"

namespace sluice::engine {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPart = kMiB;  // bytes held at a time of a file that is copied into a checkpoint

using Parts = std::function<std::string()>;  // one after another; an empty part is the end

Parts parts_of(const std::vector<std::span<const std::byte>>& pieces) {
  return [piece = pieces.begin(), end = pieces.end(), done = std::size_t{0}]() mutable {
    while (piece != end && done == piece->size()) ++piece, done = 0;
    if (piece == end) return std::string();
    const auto part = piece->subspan(done, std::min(piece->size() - done, kPart));
    done += part.size();
    return std::string(reinterpret_cast<const char*>(part.data()), part.size());
  };
}

Parts parts_of(const Descriptor& file, const std::string& path) {
  return [&] {
    std::string part(kPart, '\0');
    ssize_t n = -1;
    while ((n = ::read(file.get(), part.data(), part.size())) < 0)
      if (errno != EINTR) fail_system("read", path);
    part.resize(static_cast<std::size_t>(n));
    return part;
  };
}

}  // namespace

std::string optimizer_file(std::string_view state) { return fmt::format("optimizer.{}.safetensors", state); }
std::string scales_file(std::string_view state) { return optimizer_file(fmt::format("{}.scales", state)); }
bool is_scales_file(std::string_view name) { return name.ends_with(".scales.safetensors"); }

std::uint64_t bytes_needed(std::span<const std::uint64_t> file_bytes) {
  constexpr std::uint64_t kManifest = 64 * kKiB, kDigits = 16;
  std::uint64_t bytes = kManifest;
  for (const std::uint64_t n : file_bytes)
    bytes += round_up(n, kDiskBlock) + round_up(divide_up(n, kStreamBlock) * kDigits, kDiskBlock);
  return bytes;
}

void check_file_limit(std::span<const std::uint64_t> file_bytes) {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  for (const std::uint64_t bytes : file_bytes)
    if (bytes > limit.rlim_cur)
      fail(ErrorCode::kBudget,
           "a checkpoint has a file of {}, and this process may write files of {}: raise the limit ('ulimit "
           "-f')",
           format_size(bytes), format_size(limit.rlim_cur));
}

void check_room(const std::string& folder, std::uint64_t bytes) {
  std::error_code error;
  fs::path existing = fs::absolute(folder, error);
  while (!fs::exists(existing, error) && existing.has_relative_path()) existing = existing.parent_path();
  struct statvfs info = {};
  if (::statvfs(existing.c_str(), &info) != 0) fail_system("ask for the free room of", existing.string());
  const std::uint64_t free = std::uint64_t{info.f_bavail} * info.f_frsize;
  if (free < bytes)
    fail(ErrorCode::kBudget,
         "a checkpoint needs {} in '{}', and {} are free: {} are missing; free them, keep fewer checkpoints, "
         "or give "
         "another folder",
         format_size(bytes), folder, format_size(free), format_size(bytes - free));
}

std::uint64_t OwnFile::bytes() const {
  std::uint64_t bytes = 0;
  std::error_code ignored;  // the reader of the file reports it
  if (!copied_from.empty() && fs::is_regular_file(copied_from, ignored))
    bytes = fs::file_size(copied_from, ignored);
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}

CheckpointWriter::CheckpointWriter(offload::IoService& io, Options options)
    : io_(io), options_(std::move(options)) {
  check_room(options_.out, options_.bytes);
  std::error_code error;
  fs::create_directories(options_.out, error);
  if (error)
    fail(ErrorCode::kIo, "cannot make the folder '{}': {}{}", options_.out, errno_text(error.value()),
         errno_advice(error.value()));
  partial_ = path_in(options_.out, partial_name(options_.step));
  lock_ = make_locked_folder(partial_);
}

CheckpointWriter::~CheckpointWriter() {
  if (committed_) return;
  std::error_code ignored;
  // A folder that cannot be removed is a leftover, which the next run removes.
  fs::remove_all(partial_, ignored);
}

std::string CheckpointWriter::begin_file(const std::string& name) {
  if (!is_plain_file_name(name) || name == kManifestFile)
    fail(ErrorCode::kInvalidArgument, "'{}' cannot be the name of a checkpoint's file", name);
  for (const Entry& entry : files_)
    if (entry.name == name) fail(ErrorCode::kInvalidArgument, "the checkpoint has a file '{}' already", name);
  return path_in(partial_, name);
}

void CheckpointWriter::add_file(const OwnFile& file) {
  if (!file.copied_from.empty()) {
    const Descriptor source = open_file(file.copied_from, O_RDONLY);
    return write_text_file(begin_file(file.name), parts_of(source, file.copied_from));
  }
  const Parts next = parts_of(file.pieces);
  FileSummer summer;
  write_text_file(begin_file(file.name), [&] {
    std::string part = next();
    summer.add(std::as_bytes(std::span(part)));
    return part;
  });
  files_.push_back({file.name, summer.finish(), true, nullptr});
}

void CheckpointWriter::add_tensor_file(const std::string& name, std::uint64_t bytes) {
  const std::string path = begin_file(name);
  std::unique_ptr<offload::File> file = io_.open(path, offload::OpenMode::kCreate);
  file->allocate(round_up(bytes, kDiskBlock));
  files_.push_back({name, {}, false, std::move(file)});
}

// Cuts the padding: the last block was written as whole disk blocks.
void CheckpointWriter::finish_tensor_file(const std::string& name, FileSum sum) {
  const std::string path = path_in(partial_, name);
  Entry& entry = *std::ranges::find(files_, name, &Entry::name);
  const Descriptor file = open_file(path, O_WRONLY);
  if (::ftruncate(file.get(), static_cast<off_t>(sum.bytes)) != 0) fail_system("finish", path);
  entry.sum = std::move(sum);
  entry.is_finished = true;
}

// Nothing counts before the rename, so the syncs may have any order. The manifest's comes first: it also
// writes what the file system must note about the files, whose own syncs then find little left.
std::string CheckpointWriter::commit(const Json& run) {
  Manifest manifest;
  manifest.step = options_.step;
  manifest.run = run;
  for (const Entry& entry : files_) {
    ensure(entry.is_finished, "'{}' is committed before it is finished", entry.name);
    manifest.files.push_back({entry.name, entry.sum});
  }
  write_text_file(path_in(partial_, kManifestFile), manifest.to_text());
  for (const Entry& entry : files_)
    if (entry.tensors != nullptr) entry.tensors->sync();
  sync_folder(partial_);
  const std::string folder = path_in(options_.out, checkpoint_name(options_.step));
  exchange_or_rename(partial_, folder);
  committed_ = true;
  sync_folder(options_.out);
  // The folder has the replaced checkpoint of the same step now.
  if (fs::exists(partial_)) remove_folder(partial_);
  lock_ = {};
  return folder;
}

CheckpointReader::CheckpointReader(offload::IoService& io, const std::string& folder, ReadAhead& ahead)
    : io_(io), ahead_(ahead), folder_(folder) {
  const std::string path = path_in(folder, kManifestFile);
  manifest_ = Manifest::parse(read_text_file(path), path);
  for (const CheckpointFile& file : manifest_.files) check_bytes(path_of(file), file.sum.bytes);
}

const CheckpointFile* CheckpointReader::find(std::string_view name) const {
  for (const CheckpointFile& file : manifest_.files)
    if (file.name == name) return &file;
  return nullptr;
}

const CheckpointFile& CheckpointReader::file(std::string_view name) const {
  if (const CheckpointFile* found = find(name)) return *found;
  fail(ErrorCode::kNotFound, "the checkpoint '{}' has no file '{}'", folder_, name);
}

std::string CheckpointReader::path_of(const CheckpointFile& file) const {
  return path_in(folder_, file.name);
}

std::unique_ptr<SafetensorsReader> CheckpointReader::open_tensors(std::string_view name) const {
  const CheckpointFile& found = file(name);
  return std::make_unique<SafetensorsReader>(io_, path_of(found), ahead_, found.sum);
}

std::optional<std::string> CheckpointReader::verified(std::string_view name) const {
  const CheckpointFile* const found = find(name);
  if (found == nullptr) return std::nullopt;
  verify(*found);
  return path_of(*found);
}

void CheckpointReader::verify() const {
  for (const CheckpointFile& listed : manifest_.files) verify(listed);
}

void CheckpointReader::verify(const CheckpointFile& file) const {
  std::vector<std::byte> piece(256 * kKiB);
  BlockFile blocks(io_, path_of(file), file.sum);
  try {
    for (std::uint64_t offset = 0; offset < blocks.size(); offset += piece.size())
      ahead_.read(blocks, offset,
                  std::span(piece).first(std::min<std::uint64_t>(piece.size(), blocks.size() - offset)));
  } catch (...) {
    ahead_.forget(blocks);
    throw;
  }
  ahead_.forget(blocks);
}

}  // namespace sluice::engine
