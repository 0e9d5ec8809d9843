#include "engine/memory/rank_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"

namespace sluice::engine {

namespace {

constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

void require(bool good, const char* what) {
  if (!good) fail(ErrorCode::kIo, "{}: {}", what, errno_text(errno));
}

// How other ranks find the memory: the process that has its file open, the descriptor's number, and the
// file's identity.
Json place_of(int file, std::size_t bytes) {
  struct stat status {};
  require(::fstat(file, &status) == 0, "fstat");
  return {{"bytes", bytes},
          {"process", ::getpid()},
          {"number", file},
          {"device", status.st_dev},
          {"file", status.st_ino}};
}

// Replaces the bytes' memory by memory that other processes may map.
void make_shared(int file, std::span<std::byte> own) {
  require(file >= 0, "memfd_create");
  require(::ftruncate(file, static_cast<off_t>(own.size())) == 0, "ftruncate");
  require(::fcntl(file, F_ADD_SEALS, kSealed) == 0, "fcntl");
  ::madvise(own.data(), own.size(), MADV_DONTNEED);  // frees the old pages first
  if (const int error = ::posix_fallocate(file, 0, static_cast<off_t>(own.size()))) {
    errno = error;
    require(false, "posix_fallocate");
  }
  const auto flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
  require(::mmap(own.data(), own.size(), PROT_READ | PROT_WRITE, flags, file, 0) == own.data(), "mmap");
  ::madvise(own.data(), own.size(), MADV_DONTDUMP);
  ::madvise(own.data(), own.size(), MADV_DONTFORK);  // no child keeps it
}

// Throws where the opened file is not the memory that the other rank described.
void require_told(int file, const Json& told) {
  struct stat status {};
  require(::fstat(file, &status) == 0, "fstat");
  const int seals = ::fcntl(file, F_GET_SEALS);
  if (status.st_dev != told.at("device").get<dev_t>() || status.st_ino != told.at("file").get<ino_t>() ||
      (seals & kSealed) != kSealed ||
      static_cast<std::size_t>(status.st_size) != told.at("bytes").get<std::size_t>())
    fail(ErrorCode::kIo, "the file is not the memory that was told");
}

}  // namespace

RankMemory::RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose,
                       std::size_t bytes, bool may_share)
    : device_(&device), bytes_(round_up(bytes, kHugePage)) {
  allocator::Region memory(ledger, purpose, bytes);
  if (bytes > 0 && may_share) {
    try {
      file_ = Descriptor(::memfd_create("sluice ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      make_shared(file_.get(), memory.bytes());
    } catch (const Error& error) {
      file_.close();
      problem_ = error.what();
    }
  }
  memory_ = RegisteredRegion(std::move(memory), device);
}

// A driver registers only writable memory.
RankMemory::OfRank RankMemory::open(const Json& place, bool with_gpu) const {
  const auto bytes = place.at("bytes").get<std::size_t>();
  if (bytes == 0) return {};
  const std::string path =
      fmt::format("/proc/{}/fd/{}", place.at("process").get<std::int64_t>(), place.at("number").get<int>());
  const Descriptor file(path, (with_gpu ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  require_told(file.get(), place);
  OfRank other;
  other.memory = {file.get(), bytes, with_gpu};
  other.data = other.memory.data();
  if (with_gpu) other.registered = {*device_, other.memory.data(), bytes};
  return other;
}

// Every rank takes part in both exchanges, even after an error.
void RankMemory::share(Ranks& ranks, const std::string& name, bool with_gpus) {
  if (!ranks.communicator().hosts().all_on_one()) return;
  Json place;
  if (problem_.empty()) place = bytes_ == 0 ? Json{{"bytes", 0}} : place_of(file_.get(), bytes_);
  const std::vector<std::string> places = ranks.exchange(name, place.dump(), {});
  std::vector<OfRank> all;
  try {
    for (int rank = 0; rank < ranks.size() && problem_.empty(); ++rank) {
      const Json there = parse_json(places[static_cast<std::size_t>(rank)], name);
      if (there.is_null()) break;          // that rank reports why
      ranks.communicator().report_work();  // registering much memory takes long
      all.push_back(rank == ranks.rank() ? OfRank{data()} : open(there, with_gpus));
    }
  } catch (const Error& error) {
    problem_ = error.what();
  }
  const std::vector<std::string> problems = ranks.exchange(name, problem_, {});
  file_.close();
  const auto first = std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
  if (first == problems.end())
    of_ranks_ = std::move(all);
  else if (ranks.rank() == 0)
    log().warn("{}: ranks of this host send it, since they cannot share the memory: rank {}: {}", name,
               first - problems.begin(), *first);
}

}  // namespace sluice::engine
