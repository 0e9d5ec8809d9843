#include "offload/disk_cache.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "allocator/memory.h"
#include "core/checksum.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/system.h"
#include "core/text_file.h"

namespace sluice::offload {
namespace {

constexpr int kVersion = 1;
constexpr std::int64_t kValidSeconds = 7 * 24 * 3600;
constexpr double kNearBest = 0.95;
constexpr std::uint64_t kWholeSample = std::uint64_t{64} << 20;  // a shorter measurement is not kept

std::int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// "ext4 /dev/vda" of the mount that has these device numbers: /proc/self/mountinfo, as proc(5) describes it.
std::string mount_of(const std::string& numbers) {
  std::ifstream file("/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word, device, type, source;
    words >> word >> word >> device;
    if (device != numbers) continue;
    while (words >> word && word != "-") {
    }
    words >> type >> source;
    return type + " " + source;
  }
  return "unknown";
}

std::string name_of_disk(const IoService& io, const std::string& folder) {
  struct stat info = {};
  struct statvfs size = {};
  if (::stat(folder.c_str(), &info) != 0 || ::statvfs(folder.c_str(), &size) != 0)
    fail(ErrorCode::kNotFound, "the folder '{}' cannot be looked at: {}", folder, errno_text(errno));
  const std::string numbers = fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev));
  return fmt::format("{} {} {} {} {}", numbers, mount_of(numbers),
                     static_cast<std::uint64_t>(size.f_blocks) * size.f_frsize, io.name(), kernel_version());
}

std::optional<std::filesystem::path> cache_folder() {
  const auto absolute = [](const char* name) -> std::optional<std::filesystem::path> {
    const char* value = std::getenv(name);
    if (value == nullptr || !std::filesystem::path(value).is_absolute()) return std::nullopt;
    return value;
  };
  if (const auto cache = absolute("XDG_CACHE_HOME")) return *cache / "sluice";
  if (const auto home = absolute("HOME")) return *home / ".cache" / "sluice";
  return std::nullopt;
}

std::string file_of(const std::filesystem::path& folder, const std::string& disk) {
  return (folder / fmt::format("disk-{:016x}.json", checksum(std::as_bytes(std::span(disk))))).string();
}

bool asked_to_measure() {
  const char* value = std::getenv("SLUICE_MEASURE_DISK");
  return value != nullptr && std::string(value) != "" && std::string(value) != "0";
}

std::optional<DiskKnowledge> read_entry(const std::string& path, const std::string& disk) {
  const Json entry = read_json_file(path);
  const std::int64_t age = seconds_now() - json_field<std::int64_t>(entry, "measured", path);
  const DiskKnowledge known = {
      {json_field<double>(entry, "read", path), json_field<double>(entry, "write", path)},
      json_field<std::uint64_t>(entry, "in_flight", path)};
  const bool counts = json_field<int>(entry, "version", path) == kVersion &&
                      json_field<std::string>(entry, "disk", path) == disk && age >= 0 &&
                      age < kValidSeconds && known.rates.read > 0 && known.rates.write > 0 &&
                      known.in_flight > 0 && known.in_flight <= kMeasuredShape.bytes();
  return counts ? std::optional(known) : std::nullopt;
}

bool near_best(const DiskRates& rates, const DiskRates& best) {
  return rates.read >= kNearBest * best.read && rates.write >= kNearBest * best.write;
}

}  // namespace

DiskKnowledge measure_disk(IoService& io, const std::string& folder, std::uint64_t bytes) {
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kStaging, kMeasuredShape.bytes());
  fill_for_measuring(memory.bytes());
  const auto file = io.open(folder, OpenMode::kUnnamed);
  file->allocate(bytes);
  measure_file(*file, bytes, kMeasuredShape, memory.bytes());  // first writes into reserved space are slower
  DiskKnowledge known;
  DiskRates best;
  for (StreamShape shape = kMeasuredShape; shape.depth > 0; shape.depth /= 2) {
    const DiskRates rates = measure_file(*file, bytes, shape, memory.bytes());
    best = {std::max(best.read, rates.read), std::max(best.write, rates.write)};
    if (known.in_flight != 0 && !near_best(rates, best)) break;
    known = {rates, shape.bytes()};
  }
  return known;
}

std::optional<DiskKnowledge> kept_disk(const IoService& io, const std::string& folder) {
  const auto cache = cache_folder();
  if (!cache) return std::nullopt;
  const std::string disk = name_of_disk(io, folder);
  try {
    return read_entry(file_of(*cache, disk), disk);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) log().debug("measured anew: {}", error.what());
    return std::nullopt;
  }
}

std::optional<std::string> keep_disk(const IoService& io, const std::string& folder,
                                     const DiskKnowledge& known, std::string* why) {
  static std::mutex one_writer;  // of this process: the temporary file is named after it
  const std::lock_guard lock(one_writer);
  const auto cache = cache_folder();
  try {
    if (!cache) fail(ErrorCode::kNotFound, "neither XDG_CACHE_HOME nor HOME names a folder");
    const std::string disk = name_of_disk(io, folder), path = file_of(*cache, disk);
    std::error_code error;
    std::filesystem::create_directories(*cache, error);
    write_text_file(path, Json{{"version", kVersion},
                               {"disk", disk},
                               {"measured", seconds_now()},
                               {"read", known.rates.read},
                               {"write", known.rates.write},
                               {"in_flight", known.in_flight}}
                                  .dump(2) +
                              "\n");
    return path;
  } catch (const Error& error) {
    *why = error.what();
    return std::nullopt;
  }
}

DiskKnowledge know_disk(IoService& io, const std::string& folder, std::uint64_t bytes) {
  if (!asked_to_measure())
    if (const auto kept = kept_disk(io, folder)) return *kept;
  const DiskKnowledge known = measure_disk(io, folder, bytes);
  std::string why;
  if (bytes >= kWholeSample && !keep_disk(io, folder, known, &why))
    log().debug("the disk of '{}' is measured at every start: {}", folder, why);
  return known;
}

}  // namespace sluice::offload
