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

// How the others find the file: the process that has it open, under which number, and which file it is.
Json place_of(int file) {
  struct stat status {};
  require(::fstat(file, &status) == 0, "fstat");
  return {{"process", ::getpid()}, {"number", file}, {"device", status.st_dev}, {"file", status.st_ino}};
}

// Puts memory that others may map under the bytes.
void make_shared(int file, std::span<std::byte> own) {
  require(file >= 0, "memfd_create");
  require(::ftruncate(file, static_cast<off_t>(own.size())) == 0, "ftruncate");
  require(::fcntl(file, F_ADD_SEALS, kSealed) == 0, "fcntl");
  ::madvise(own.data(), own.size(), MADV_DONTNEED);  // so that nothing is taken twice
  if (const int error = ::posix_fallocate(file, 0, static_cast<off_t>(own.size()))) {
    errno = error;
    require(false, "posix_fallocate");
  }
  const auto flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
  require(::mmap(own.data(), own.size(), PROT_READ | PROT_WRITE, flags, file, 0) == own.data(), "mmap");
  ::madvise(own.data(), own.size(), MADV_DONTDUMP);
}

// Maps memory of which another rank has told the place. file: it was opened there.
const std::byte* map_of(const Json& told, int file, std::size_t bytes) {
  Json found = place_of(file);
  struct stat status {};
  require(::fstat(file, &status) == 0, "fstat");
  const int seals = ::fcntl(file, F_GET_SEALS);
  if (found["device"] != told["device"] || found["file"] != told["file"] || (seals & kSealed) != kSealed ||
      static_cast<std::size_t>(status.st_size) != bytes)
    fail(ErrorCode::kIo, "the file is not the memory that was told");
  void* const data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
  require(data != MAP_FAILED, "mmap");
  ::madvise(data, bytes, MADV_DONTDUMP);
  ::madvise(data, bytes, MADV_DONTFORK);  // so that no child keeps it
  return static_cast<const std::byte*>(data);
}

}  // namespace

void RankMemory::Unmap::operator()(const std::byte* data) const {
  if (bytes > 0) ::munmap(const_cast<std::byte*>(data), bytes);
}

RankMemory::RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose,
                       std::size_t bytes, bool may_share)
    : bytes_(round_up(bytes, kHugePage)) {
  allocator::Region memory(ledger, purpose, bytes);
  if (bytes > 0 && may_share) {
    try {
      file_ = Descriptor(::memfd_create("sluice pieces", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      make_shared(file_.get(), memory.bytes());
    } catch (const Error& error) {
      file_.close();
      problem_ = error.what();
    }
  }
  memory_ = RegisteredRegion(std::move(memory), device);
}

// Every rank takes part in both exchanges, whatever has failed.
void RankMemory::share(Ranks& ranks, const std::string& name) {
  if (bytes_ == 0 || !ranks.communicator().hosts().all_on_one()) return;
  const Json place = problem_.empty() ? place_of(file_.get()) : Json();
  const std::vector<std::string> places = ranks.exchange(name, place.dump(), {});
  std::vector<Mapped> all;
  try {
    for (int rank = 0; rank < ranks.size() && problem_.empty(); ++rank) {
      const Json there = parse_json(places[static_cast<std::size_t>(rank)], name);
      if (there.is_null()) break;  // that rank tells why
      if (rank == ranks.rank()) {
        all.push_back(Mapped(data(), {0}));
        continue;
      }
      const std::string path = fmt::format("/proc/{}/fd/{}", there.at("process").get<std::int64_t>(),
                                           there.at("number").get<int>());
      const Descriptor file(path, O_RDONLY | O_CLOEXEC);
      all.push_back(Mapped(map_of(there, file.get(), bytes_), {bytes_}));
    }
  } catch (const Error& error) {
    problem_ = error.what();
  }
  const std::vector<std::string> problems = ranks.exchange(name, problem_, {});
  file_.close();
  const auto first = std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
  if (first == problems.end())
    mapped_ = std::move(all);
  else
    log().warn("{}: ranks of this host send it, since they cannot share the memory: rank {}: {}", name,
               first - problems.begin(), *first);
}

}  // namespace sluice::engine
