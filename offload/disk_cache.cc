#include "offload/disk_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "core/bytes.h"
#include "core/checksum.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/system.h"
#include "core/text_file.h"
#include "offload/disk_use.h"

namespace sluice::offload {
namespace {

constexpr int kVersion = 4;
constexpr std::int64_t kValidSeconds = 7 * 24 * 3600;
constexpr std::int64_t kValidSecondsDisturbed = 3600;
constexpr double kSteady = 0.75;
constexpr unsigned kMostUnderWay = 1024;
constexpr std::uint64_t kWholeSample = std::uint64_t{64} << 20;  // shorter measurements are not cached

std::int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Returns "ext4 /dev/vda" for the mount with these device numbers, from /proc/self/mountinfo (see proc(5)).
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

std::string name_of_disk(const std::string& folder) {
  struct stat info = {};
  struct statvfs size = {};
  if (::stat(folder.c_str(), &info) != 0 || ::statvfs(folder.c_str(), &size) != 0)
    fail(ErrorCode::kNotFound, "the folder '{}' cannot be examined: {}", folder, errno_text(errno));
  const std::string numbers = fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev));
  return fmt::format("{} {} {} {} {}", numbers, mount_of(numbers),
                     static_cast<std::uint64_t>(size.f_blocks) * size.f_frsize,
                     uring_available(nullptr) ? "io_uring" : "threads", kernel_version());
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
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

IoOptions read_options(const Json& entry, const std::string& path) {
  IoOptions io;
  io.way = json_field<std::string>(entry, "service", path) == "threads" ? IoWay::kThreads : IoWay::kUring;
  io.block_bytes = json_field<std::size_t>(entry, "block", path);
  (io.way == IoWay::kThreads ? io.threads : io.queue_depth) = json_field<unsigned>(entry, "under_way", path);
  return io;
}

bool sound(const DiskKnowledge& known) {
  const std::uint64_t bytes = in_flight(known.io);
  return known.rates.read > 0 && known.rates.write > 0 && known.rates.together > 0 &&
         known.processor_seconds >= 0 && bytes > 0 && bytes <= kMostInFlight &&
         known.io.block_bytes % kDiskBlock == 0;
}

std::optional<DiskKnowledge> read_entry(const std::string& path, const std::string& disk) {
  const Json entry = read_json_file(path);
  if (json_field<int>(entry, "version", path) != kVersion) return std::nullopt;
  const std::int64_t age = seconds_now() - json_field<std::int64_t>(entry, "measured", path);
  DiskKnowledge known;
  known.rates = {json_field<double>(entry, "read", path), json_field<double>(entry, "write", path),
                 json_field<double>(entry, "together", path)};
  known.processor_seconds = json_field<double>(entry, "processor_seconds_per_byte", path);
  known.io = read_options(entry, path);
  known.disturbed = json_field<bool>(entry, "disturbed", path);
  const bool counts = json_field<std::string>(entry, "disk", path) == disk && age >= 0 &&
                      age < (known.disturbed ? kValidSecondsDisturbed : kValidSeconds) && sound(known);
  return counts ? std::optional(known) : std::nullopt;
}

}  // namespace

DiskKnowledge knowledge_of(const std::string& folder, std::uint64_t bytes,
                           std::span<const DiskTrial> trials) {
  const DiskTrial& best = best_trial(trials);
  const DiskUse use = use_disk(folder, bytes, best.io);
  return {use.rates, best.io, use.processor_seconds, best.steady < kSteady};
}

IoOptions options_for(std::span<const DiskKnowledge> disks) {
  if (disks.empty()) return {};
  IoOptions io = std::ranges::min_element(disks, {}, [](const DiskKnowledge& d) {
                   return d.rates.read + d.rates.write;
                 })->io;
  std::uint64_t bytes = 0;
  for (const DiskKnowledge& disk : disks) bytes += in_flight(disk.io);
  const auto count =
      static_cast<unsigned>(std::min<std::uint64_t>(divide_up(bytes, io.block_bytes), kMostUnderWay));
  (io.way == IoWay::kThreads ? io.threads : io.queue_depth) = count;
  return io;
}

std::optional<DiskKnowledge> kept_disk(const std::string& folder) {
  const auto cache = cache_folder();
  if (!cache) return std::nullopt;
  const std::string disk = name_of_disk(folder);
  try {
    return read_entry(file_of(*cache, disk), disk);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) log().debug("the disk is measured anew: {}", error.what());
    return std::nullopt;
  }
}

std::optional<std::string> keep_disk(const std::string& folder, const DiskKnowledge& known,
                                     std::string* why) {
  static std::mutex one_writer;  // threads share the temporary file, which is named after the process
  const std::lock_guard lock(one_writer);
  const auto cache = cache_folder();
  try {
    if (!cache) fail(ErrorCode::kNotFound, "neither XDG_CACHE_HOME nor HOME names a folder");
    const std::string disk = name_of_disk(folder), path = file_of(*cache, disk);
    std::error_code error;
    std::filesystem::create_directories(*cache, error);
    write_text_file(path, Json{{"version", kVersion},
                               {"disk", disk},
                               {"measured", seconds_now()},
                               {"read", known.rates.read},
                               {"write", known.rates.write},
                               {"together", known.rates.together},
                               {"processor_seconds_per_byte", known.processor_seconds},
                               {"service", known.io.way == IoWay::kThreads ? "threads" : "io_uring"},
                               {"block", known.io.block_bytes},
                               {"under_way", in_flight(known.io) / known.io.block_bytes},
                               {"disturbed", known.disturbed}}
                                  .dump(2) +
                              "\n");
    return path;
  } catch (const Error& error) {
    *why = error.what();
    return std::nullopt;
  }
}

namespace {

// Lets one process measure at a time: ranks that start together would each see only a part of the disk's
// rate. Waits for at most a minute. Does nothing without a cache folder, or where its file system has no
// locks.
class Turn {
 public:
  Turn() {
    const auto cache = cache_folder();
    std::error_code ignored;
    if (cache) std::filesystem::create_directories(*cache, ignored);
    if (cache) folder_ = ::open(cache->c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ >= 0) wait();
  }
  ~Turn() {
    if (folder_ >= 0) ::close(folder_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  void wait() const {
    constexpr std::chrono::seconds kQuiet{1}, kMost{60};
    const auto begin = std::chrono::steady_clock::now();
    bool told = false;
    while (::flock(folder_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (waited >= kMost)
        return log().warn("another process has measured disks for a minute; measuring beside it");
      if (waited >= kQuiet && !std::exchange(told, true))
        log().info("waiting while another process measures a disk");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  int folder_ = -1;
};

}  // namespace

DiskKnowledge know_disk(const std::string& folder, std::uint64_t bytes, const MeasureDisk& measure) {
  const auto kept_one = [&] { return asked_to_measure() ? std::nullopt : kept_disk(folder); };
  if (const auto kept = kept_one()) return *kept;
  const Turn turn;
  if (const auto kept = kept_one()) return *kept;  // another process has measured meanwhile
  const DiskKnowledge known =
      measure ? measure(folder, bytes) : knowledge_of(folder, bytes, try_disk(folder, bytes));
  std::string why;
  if (bytes >= kWholeSample && !keep_disk(folder, known, &why))
    log().debug("the disk of '{}' is measured at every start: {}", folder, why);
  return known;
}

}  // namespace sluice::offload
