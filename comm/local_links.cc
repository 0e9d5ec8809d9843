#include "comm/local_links.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <vector>

#include "comm/ring.h"
#include "core/bytes.h"
#include "core/descriptor.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

constexpr std::uint64_t kLinksMagic = 0x736b6e696c63756c;  // "luclinks"
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kPage = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// The interval at which a rank checks whether another rank's process lives.
constexpr std::chrono::milliseconds kLockLook{250};

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t ranks;
  std::uint64_t ring_bytes;
};

// Rings of a bell are counted, so that its owner notices a ring from before it slept.
enum Presence : std::uint32_t { kNotBegun, kPresent, kLeft, kEnded };
struct Bell {
  alignas(64) std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleeps;
  std::atomic<std::uint32_t> presence;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

std::size_t header_bytes(int ranks) {
  return round_up(sizeof(Bell) * (1 + static_cast<std::size_t>(ranks)), kPage);
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* until) {
  return ::syscall(SYS_futex, &word, operation, value, until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

// The owner sets `sleeps` before its last look at `rings`, and others read `sleeps` after ringing. So no ring
// is missed, and ringing makes no system call while the owner is awake.
void ring_bell(Bell& bell) {
  bell.rings.fetch_add(1);
  if (bell.sleeps.load() != 0) futex(bell.rings, FUTEX_WAKE_BITSET, INT_MAX, nullptr);
}

timespec as_timespec(Links::Clock::time_point time) {
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  return {since / 1'000'000'000, since % 1'000'000'000};
}

std::string text_of(const char* call) {
  return fmt::format("the memory that ranks share: {}: {}", call, errno_text(errno));
}
void check_system(bool good, const char* call) {
  if (!good) throw Error(ErrorCode::kIo, text_of(call));
}

// Reads and checks the memory's header.
Header read_header(int descriptor) {
  struct stat status {};
  check_system(::fstat(descriptor, &status) == 0, "fstat");
  // Without this seal another process could shrink the memory, and an access would end this one by SIGBUS.
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  Header header{};
  const bool whole = ::pread(descriptor, &header, sizeof(header), 0) == sizeof(header);
  if (seals < 0 || (seals & kSeals) != kSeals || !whole || header.magic != kLinksMagic)
    fail(ErrorCode::kCorrupt, "descriptor {} is not memory that ranks share", descriptor);
  if (header.version != kVersion)
    fail(ErrorCode::kCorrupt, "descriptor {} is memory that ranks share, of version {}, not {}", descriptor,
         header.version, kVersion);
  if (header.ranks < 1 || header.ranks > LocalMemory::kMostRanks || header.ring_bytes > SIZE_MAX >> 16 ||
      header.ring_bytes < LocalMemory::kLeastRing || header.ring_bytes % kPage != 0 ||
      static_cast<std::size_t>(status.st_size) !=
          LocalMemory::bytes(static_cast<int>(header.ranks), header.ring_bytes))
    fail(ErrorCode::kCorrupt, "descriptor {} says {} ranks with rings of {} bytes, and has {} bytes",
         descriptor, header.ranks, header.ring_bytes, status.st_size);
  return header;
}

}  // namespace

struct LocalMemory::Map {
  Descriptor descriptor;
  Header header{};  // a private copy, which no other process can change
  std::byte* base = nullptr;

  explicit Map(int number) : descriptor(number) {}
  ~Map() {
    if (base != nullptr) ::munmap(base, size());
  }
  int ranks() const { return static_cast<int>(header.ranks); }
  std::size_t size() const { return bytes(ranks(), header.ring_bytes); }
  Bell& bell(int rank) const { return reinterpret_cast<Bell*>(base)[1 + rank]; }
  Ring ring(int from, int to) const {
    const int index = from * (ranks() - 1) + (to < from ? to : to - 1);
    return {base + header_bytes(ranks()) + static_cast<std::size_t>(index) * header.ring_bytes,
            header.ring_bytes - Ring::bytes(0)};
  }
  void open() {
    header = read_header(descriptor.get());
    void* const at = ::mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
    check_system(at != MAP_FAILED, "mmap");
    base = static_cast<std::byte*>(at);
  }
};

std::size_t LocalMemory::bytes(int ranks, std::size_t ring_bytes) {
  const auto count = static_cast<std::size_t>(ranks);
  return header_bytes(ranks) + count * (count - 1) * ring_bytes;
}

LocalMemory::LocalMemory(int ranks, std::size_t ring_bytes) {
  if (ranks < 1 || ranks > kMostRanks)
    fail(ErrorCode::kInvalidArgument, "{} ranks were asked for on one machine: there may be 1 to {}", ranks,
         kMostRanks);
  if (ring_bytes < kLeastRing || ring_bytes % kPage != 0 || ring_bytes > SIZE_MAX >> 16)
    fail(ErrorCode::kInvalidArgument, "a ring of {} bytes was asked for: it must be a multiple of {}",
         ring_bytes, kPage);
  const int made = ::memfd_create("sluice ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  check_system(made >= 0, "memfd_create");
  map_ = std::make_unique<Map>(made);
  const Header header{kLinksMagic, kVersion, static_cast<std::uint32_t>(ranks), ring_bytes};
  const auto size = static_cast<off_t>(bytes(ranks, ring_bytes));
  // All pages are allocated now: a lack of memory later would end the process that writes by SIGBUS.
  check_system(::fallocate(made, 0, 0, size) == 0, "fallocate");
  check_system(::pwrite(made, &header, sizeof(header), 0) == sizeof(header), "pwrite");
  check_system(::fcntl(made, F_ADD_SEALS, kSeals) == 0, "F_ADD_SEALS");
  map_->open();
}

LocalMemory::LocalMemory(int descriptor) : map_(std::make_unique<Map>(descriptor)) { map_->open(); }
LocalMemory::~LocalMemory() = default;

int LocalMemory::ranks() const { return map_->ranks(); }
int LocalMemory::descriptor() const { return map_->descriptor.get(); }

void LocalMemory::leave(int rank, bool in_order) {
  std::atomic<std::uint32_t>& presence = map_->bell(rank).presence;
  std::uint32_t before = presence.load();
  while (before <= kPresent && !presence.compare_exchange_weak(before, in_order ? kLeft : kEnded)) {
  }
  for (int other = 0; other < ranks(); ++other) ring_bell(map_->bell(other));
}

// A rank's process is alive while it holds the rank's lock, on a byte of the memory's file. Such a lock
// belongs to an open file description, so each links object opens the file again: threads of one process have
// locks of their own.
class LocalLinks final : public Links {
 public:
  LocalLinks(LocalMemory& memory, int rank)
      : memory_(memory),
        map_(*memory.map_),
        rank_(rank),
        bell_(map_.bell(rank)),
        lock_(::open(fmt::format("/proc/self/fd/{}", memory.descriptor()).c_str(), O_RDWR | O_CLOEXEC)),
        looks_(static_cast<std::size_t>(map_.ranks())) {
    check_system(lock_.get() >= 0, "open");
    begin();
    for (int other = 0; other < map_.ranks(); ++other) {
      // A rank has no ring to itself; its entry is another ring, which stays unused.
      const int with = other != rank ? other : (rank == 0 ? 1 : 0);
      if (map_.ranks() == 1) break;
      out_.push_back(map_.ring(rank, with));
      in_.push_back(map_.ring(with, rank));
    }
  }
  ~LocalLinks() override { memory_.leave(rank_, true); }

  int rank() const override { return rank_; }
  int size() const override { return map_.ranks(); }
  std::size_t packet_bytes() const override { return (map_.header.ring_bytes - Ring::bytes(0)) / 4; }

  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) override {
    if (!out_[static_cast<std::size_t>(to)].write(head, body)) return false;
    ring_bell(map_.bell(to));
    return true;
  }

  bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) override {
    Ring& ring = in_[static_cast<std::size_t>(from)];
    if (!ring.read(take)) return false;
    if (ring.writer_waits()) ring_bell(map_.bell(from));
    return true;
  }

  void wait(Clock::time_point until) override {
    bell_.sleeps.store(1);
    const timespec time = as_timespec(until);
    if (bell_.rings.load() == heard_) futex(bell_.rings, FUTEX_WAIT_BITSET, heard_, &time);
    bell_.sleeps.store(0);
    heard_ = bell_.rings.load();
  }
  void wake() override { ring_bell(bell_); }

  std::optional<Gone> gone(int rank) override {
    switch (map_.bell(rank).presence.load()) {
      case kNotBegun:
        return std::nullopt;
      case kPresent:
        break;
      case kLeft:
        return Gone{true, "it has left"};
      case kEnded:
        return Gone{false, "its process has ended"};
      default:
        fail(ErrorCode::kCorrupt, "the memory that ranks share does not say whether rank {} is there", rank);
    }
    Clock::time_point& look = looks_[static_cast<std::size_t>(rank)];
    if (Clock::now() < look + kLockLook) return std::nullopt;
    look = Clock::now();
    // A rank that leaves in order marks this before it gives up its lock.
    if (is_locked(rank) || map_.bell(rank).presence.load() != kPresent) return std::nullopt;
    return Gone{false, "its process has ended"};
  }

 private:
  static struct flock lock_of(int rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
  }
  void begin() {
    struct flock lock = lock_of(rank_);
    if (::fcntl(lock_.get(), F_OFD_SETLK, &lock) != 0) {
      if (errno == EAGAIN || errno == EACCES) fail(ErrorCode::kState, "rank {} has links already", rank_);
      throw Error(ErrorCode::kIo, text_of("F_OFD_SETLK"));
    }
    std::uint32_t before = kNotBegun;
    if (!bell_.presence.compare_exchange_strong(before, kPresent))
      fail(ErrorCode::kState, "rank {} has had links already, and has left", rank_);
  }
  bool is_locked(int rank) const {
    struct flock lock = lock_of(rank);
    check_system(::fcntl(lock_.get(), F_OFD_GETLK, &lock) == 0, "F_OFD_GETLK");
    return lock.l_type != F_UNLCK;
  }

  LocalMemory& memory_;
  LocalMemory::Map& map_;
  const int rank_;
  Bell& bell_;
  const Descriptor lock_;
  std::vector<Ring> out_, in_;            // by the other rank
  std::vector<Clock::time_point> looks_;  // by rank: when its lock was last checked
  std::uint32_t heard_ = 0;               // the rings counted at the end of the last wait
};

std::unique_ptr<Links> make_local_links(LocalMemory& memory, int rank) {
  if (rank < 0 || rank >= memory.ranks())
    fail(ErrorCode::kInvalidArgument, "rank {} was asked for, of {} ranks", rank, memory.ranks());
  return std::make_unique<LocalLinks>(memory, rank);
}

}  // namespace sluice::comm
