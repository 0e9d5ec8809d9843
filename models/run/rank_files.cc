#include "models/run/rank_files.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <system_error>

namespace sluice::models {
namespace {

namespace fs = std::filesystem;

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
  std::error_code ignored;  // what cannot be written is reported where that is tried
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

}  // namespace sluice::models
