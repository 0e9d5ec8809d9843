#include "models/run/rank_files.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

namespace sluice::models {
namespace {

namespace fs = std::filesystem;

// Returns the rank that a file beside `first` (rank 0's) belongs to; nothing where it is no rank's.
std::optional<int> rank_of(const fs::path& file, const fs::path& first) {
  const std::string name = file.filename(), begin = first.stem().string() + ".rank", end = first.extension();
  if (!name.starts_with(begin) || !name.ends_with(end) || name.size() <= begin.size() + end.size()) return {};
  const std::string number = name.substr(begin.size(), name.size() - begin.size() - end.size());
  int rank = 0;
  const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (error != std::errc() || *rest != '\0' || path_of_rank(first, rank) != file) return {};
  return rank;
}

}  // namespace

std::string path_of_rank(const std::string& first, int rank) {
  const fs::path path = first;
  std::error_code unknown;
  if (first.empty() || (fs::exists(path, unknown) && !fs::is_regular_file(path, unknown))) return {};
  return path.parent_path() /
         fmt::format("{}.rank{}{}", path.stem().string(), rank, path.extension().string());
}

std::string place_of_rank(const std::string& first, int rank) {
  const fs::path path = path_of_rank(first, rank);
  std::error_code ignored;  // errors are reported when the file is written
  if (!path.empty()) fs::create_directories(path.parent_path(), ignored);
  return path;
}

bool may_be_replaced(const std::string& path, std::string_view beginning) {
  if (!fs::exists(path)) return true;
  if (!fs::is_regular_file(path)) return false;
  std::ifstream file(path, std::ios::binary);
  std::string start(beginning.size(), '\0');
  file.read(start.data(), static_cast<std::streamsize>(start.size()));
  return file.gcount() == 0 || start == beginning;
}

std::map<int, std::string> files_of_absent_ranks(const std::string& first, int ranks) {
  std::map<int, std::string> files;
  if (path_of_rank(first, ranks).empty()) return files;
  const fs::path folder = fs::path(first).parent_path();
  std::error_code unread, ignored;  // a path that is no folder has no files
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, unread)) {
    const fs::path file = folder / entry.path().filename();
    const std::optional<int> rank = rank_of(file, first);
    if (rank && *rank >= ranks && fs::is_regular_file(file, ignored)) files[*rank] = file;
  }
  return files;
}

void remove_files_of_absent_ranks(const std::string& first, int ranks, std::string_view beginning) {
  std::error_code ignored;  // a file that cannot be removed stays
  for (const auto& [rank, file] : files_of_absent_ranks(first, ranks))
    if (may_be_replaced(file, beginning)) fs::remove(file, ignored);
}

}  // namespace sluice::models
