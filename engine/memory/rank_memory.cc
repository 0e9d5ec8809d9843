#include "engine/memory/rank_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"

namespace sluice::engine {
namespace {

constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

class SharedFile {
 public:
  explicit SharedFile(int number) : number_(number) {}
  ~SharedFile() {
    if (number_ >= 0) ::close(number_);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  int number() const { return number_; }

 private:
  const int number_;
};

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

const std::byte* map_of(const Json& place, std::size_t bytes) {
  const std::string path =
      fmt::format("/proc/{}/fd/{}", place.at("process").get<std::int64_t>(), place.at("number").get<int>());
  const SharedFile file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  require(file.number() >= 0, path.c_str());
  Json found = place_of(file.number());
  const int seals = ::fcntl(file.number(), F_GET_SEALS);
  struct stat status {};
  require(::fstat(file.number(), &status) == 0, "fstat");
  if (found["device"] != place["device"] || found["file"] != place["file"] || (seals & kSealed) != kSealed ||
      static_cast<std::size_t>(status.st_size) != bytes)
    fail(ErrorCode::kIo, "{} is not the memory that was told", path);
  void* const data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.number(), 0);
  require(data != MAP_FAILED, "mmap");
  ::madvise(data, bytes, MADV_DONTDUMP);
  return static_cast<const std::byte*>(data);
}

}  // namespace

void RankMemory::Unmap::operator()(const std::byte* data) const {
  if (bytes > 0) ::munmap(const_cast<std::byte*>(data), bytes);
}

RankMemory::RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose,
                       std::size_t bytes, Ranks& ranks, const std::string& name) {
  allocator::Region memory(ledger, purpose, bytes);
  if (bytes > 0 && ranks.communicator().hosts().all_on_one()) mapped_ = shared(memory.bytes(), ranks, name);
  memory_ = RegisteredRegion(std::move(memory), device);
}

// Every rank takes part in both exchanges, whatever has failed.
std::vector<RankMemory::Mapped> RankMemory::shared(std::span<std::byte> own, Ranks& ranks,
                                                   const std::string& name) {
  std::vector<Mapped> all;
  Json place;
  std::string problem;
  const auto attempt = [&](const auto& action) {
    try {
      action();
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  const SharedFile file(::memfd_create("sluice pieces", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  attempt([&] {
    make_shared(file.number(), own);
    place = place_of(file.number());
  });
  const std::vector<std::string> places = ranks.exchange(name, place.dump(), {});
  for (int rank = 0; rank < ranks.size() && problem.empty(); ++rank)
    attempt([&] {
      const Json there = parse_json(places[static_cast<std::size_t>(rank)], name);
      if (there.is_null()) fail(ErrorCode::kIo, "rank {} has none", rank);
      all.push_back(rank == ranks.rank() ? Mapped(own.data(), {0})
                                         : Mapped(map_of(there, own.size()), {own.size()}));
    });
  const std::vector<std::string> problems = ranks.exchange(name, problem, {});
  const auto first = std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
  if (first == problems.end()) return all;
  log().warn("{} is sent, since ranks cannot share the memory: rank {}: {}", name, first - problems.begin(),
             *first);
  return {};
}

}  // namespace sluice::engine
