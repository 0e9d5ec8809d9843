#include "comm/host_links.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <vector>

#include "comm/local_links.h"
#include "core/checksum.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::uint64_t kHostMagic = 0x74736f68636c75;  // "luchost"

// By core; Linux supports no more.
using Cpus = std::bitset<8192>;

// A rank's location, which it sends to all others.
struct Card {
  std::uint64_t magic = kHostMagic;
  std::uint64_t host = 0;  // checksum of the host's name
  std::int64_t process = 0;
  Cpus cpus;
};
static_assert(sizeof(Card) <= kLeastGreeting);
// Sent by the first rank of a host to the other ranks there.
struct Offer {
  std::uint64_t magic = kHostMagic;
  std::int64_t descriptor = -1;  // of the memory, valid in the sender's process; -1: there is none
};
// The reply of each of them, and the first rank's summary of all replies.
struct HostsAnswer {
  std::uint64_t magic = kHostMagic;
  std::uint64_t shares = 0;
  std::array<char, 160> why{};
};

void set_text(std::array<char, 160>& to, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), to.size() - 1), to.begin());
}
std::string text_of(const std::array<char, 160>& text) {
  return {text.begin(), std::find(text.begin(), text.end(), '\0')};
}

Cpus own_cpus() {
  std::array<cpu_set_t, Cpus().size() / CPU_SETSIZE> set{};
  if (::sched_getaffinity(0, sizeof set, set.data()) != 0)
    fail(ErrorCode::kIo, "the cores of this process are not known: {}", errno_text(errno));
  Cpus cpus;
  for (std::size_t i = 0; i < cpus.size(); ++i) cpus[i] = CPU_ISSET_S(i, sizeof set, set.data()) != 0;
  return cpus;
}

double share_of(const Cpus& own, const std::vector<Cpus>& all) {
  double share = 0;
  for (std::size_t i = 0; i < own.size(); ++i)
    if (own[i])
      share += 1.0 / static_cast<double>(std::ranges::count_if(all, [i](const Cpus& c) { return c[i]; }));
  return share / static_cast<double>(own.count());
}

// Exchanges small values between ranks before there is a transport.
class Talk {
 public:
  Talk(Links& links, milliseconds patience)
      : links_(links), patience_(patience), until_(Links::Clock::now() + patience) {}

  template <class Value>
  void tell(int to, const Value& value) {
    while (!links_.send(to, std::as_bytes(std::span(&value, 1)), {})) wait_for(to, links_.gone(to));
  }
  template <class Value>
  Value hear(int from) {
    Value value;
    const auto take = [&](std::span<const std::byte> packet) {
      if (packet.size() != sizeof value)
        fail(ErrorCode::kCorrupt, "rank {} greets with {} bytes, not {}: all ranks must run the same program",
             from, packet.size(), sizeof value);
      std::memcpy(&value, packet.data(), sizeof value);
    };
    for (;;) {  // packets of a rank can still be received after it has gone
      const auto gone = links_.gone(from);
      if (links_.receive(from, take)) break;
      wait_for(from, gone);
    }
    if (value.magic != kHostMagic)
      fail(ErrorCode::kCorrupt, "rank {} sent what cannot be: its greeting is none", from);
    return value;
  }

 private:
  void wait_for(int rank, const std::optional<Links::Gone>& gone) {
    if (gone) fail(ErrorCode::kIo, "rank {} is gone before the run has begun: {}", rank, gone->how);
    if (Links::Clock::now() >= until_)
      fail(ErrorCode::kIo, "rank {} has not come for {:.3g} s", rank,
           std::chrono::duration<double>(patience_).count());
    links_.wait(std::min(until_, Links::Clock::now() + milliseconds(100)));
  }
  Links& links_;
  const milliseconds patience_;
  const Links::Clock::time_point until_;
};

// Links that use shared memory to the ranks of this host, and other links to the rest.
class Composite final : public Links {
 public:
  // between: null where all ranks are here. here: the ranks of this host, ascending.
  Composite(std::unique_ptr<Links> between, std::unique_ptr<LocalMemory> memory, std::unique_ptr<Links> local,
            const std::vector<int>& here, int rank, int size)
      : between_(std::move(between)),
        memory_(std::move(memory)),
        local_(std::move(local)),
        rank_(rank),
        places_(static_cast<std::size_t>(size), -1) {
    for (std::size_t i = 0; i < here.size(); ++i)
      places_[static_cast<std::size_t>(here[i])] = static_cast<int>(i);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(places_.size()); }
  std::size_t packet_bytes() const override {
    return std::min(local_->packet_bytes(), between_ == nullptr ? SIZE_MAX : between_->packet_bytes());
  }
  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) override {
    if (place(to) >= 0) return local_->send(place(to), head, body);
    const bool sent = between_->send(to, head, body);
    if (sent) moved_ = Clock::now();
    return sent;
  }
  bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) override {
    if (place(from) >= 0) return local_->receive(place(from), take);
    const bool received = between_->receive(from, take);
    if (received) moved_ = Clock::now();
    return received;
  }
  // The other links must be polled, and cannot wake a rank that sleeps for those of its host. So the rank
  // sleeps for a fourth of the time since the last packet between hosts, up to a millisecond. After a longer
  // idle time polling is a waste, and some links are the caller's, where each poll costs more: then it sleeps
  // for a hundredth of that time, up to 10 milliseconds.
  void wait(Clock::time_point until) override {
    constexpr microseconds kAwake{50}, kShortSleep{1000}, kMostSleep{10000};
    if (between_ == nullptr) return local_->wait(until);
    const auto now = Clock::now();
    const auto idle = now - moved_;
    if (idle < kAwake) {
      ::sched_yield();
      return local_->wait(now);
    }
    const auto sleep = std::max(std::min<Clock::duration>(idle / 4, kShortSleep),
                                std::min<Clock::duration>(idle / 100, kMostSleep));
    local_->wait(std::min(until, now + sleep));
  }
  void wake() override { local_->wake(); }
  std::optional<Gone> gone(int rank) override {
    return place(rank) >= 0 ? local_->gone(place(rank)) : between_->gone(rank);
  }
  void work_has_failed() override {
    if (between_ != nullptr) between_->work_has_failed();
  }

 private:
  int place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }

  const std::unique_ptr<Links> between_;
  const std::unique_ptr<LocalMemory> memory_;
  const std::unique_ptr<Links> local_;
  const int rank_;
  std::vector<int> places_;  // by rank: its index in the memory; -1: on another host
  Clock::time_point moved_ = Clock::now();
};

// The memory that this host's ranks share, with this rank's links over it; or the reason why there is none.
struct Shared {
  std::unique_ptr<LocalMemory> memory;
  std::unique_ptr<Links> links;
  std::string why;

  // A rank has its links before the others know that it shares the memory, so that they will notice its end.
  template <class Make>
  bool open(int place, Make&& make) {
    try {
      memory = make();
      links = make_local_links(*memory, place);
      return true;
    } catch (const Error& error) {
      return give_up(error.what());
    }
  }
  bool give_up(const std::string& reason) {
    why = reason;
    links.reset();
    memory.reset();
    return false;
  }
};

Shared lead(Talk& talk, const std::vector<int>& here, std::size_t ring) {
  Shared shared;
  Offer offer;
  if (shared.open(0, [&] { return std::make_unique<LocalMemory>(static_cast<int>(here.size()), ring); }))
    offer.descriptor = shared.memory->descriptor();
  const std::span others = std::span(here).subspan(1);
  for (const int other : others) talk.tell(other, offer);
  for (const int other : others) {
    const auto answer = talk.hear<HostsAnswer>(other);
    if (answer.shares == 0 && shared.memory != nullptr) shared.give_up(text_of(answer.why));
  }
  HostsAnswer all;
  all.shares = shared.memory != nullptr ? 1 : 0;
  set_text(all.why, shared.why);
  for (const int other : others) talk.tell(other, all);
  return shared;
}

std::unique_ptr<LocalMemory> open_memory(std::int64_t process, std::int64_t descriptor) {
  const std::string path = fmt::format("/proc/{}/fd/{}", process, descriptor);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) fail(ErrorCode::kIo, "{} could not be opened: {}", path, errno_text(errno));
  return std::make_unique<LocalMemory>(opened);
}

Shared follow(Talk& talk, const std::vector<int>& here, int place, std::int64_t process) {
  Shared shared;
  HostsAnswer answer;
  const auto offer = talk.hear<Offer>(here[0]);
  if (offer.descriptor >= 0 && shared.open(place, [&] { return open_memory(process, offer.descriptor); }))
    answer.shares = 1;
  set_text(answer.why, fmt::format("rank {}: {}", here[static_cast<std::size_t>(place)], shared.why));
  talk.tell(here[0], answer);
  const auto all = talk.hear<HostsAnswer>(here[0]);
  if (all.shares == 0) shared.give_up(text_of(all.why));
  return shared;
}

}  // namespace

std::string name_of_this_host() {
  std::string name;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, name);
  for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    std::error_code error;
    name += " " + std::filesystem::read_symlink(space, error).string();
  }
  return name;
}

std::size_t host_links_bytes(int ranks_here, std::size_t ring_bytes) {
  if (ranks_here < 2 || ranks_here > LocalMemory::kMostRanks) return 0;
  return LocalMemory::bytes(ranks_here, ring_bytes) * 2 / static_cast<std::size_t>(ranks_here);
}

HostLinks make_host_links(std::unique_ptr<Links> between, std::size_t ring_bytes, milliseconds patience,
                          const std::string& host) {
  HostLinks made;
  const int rank = between->rank(), size = between->size();
  Talk talk(*between, patience);
  std::vector<Card> cards(static_cast<std::size_t>(size));
  Card& own = cards[static_cast<std::size_t>(rank)];
  own = {kHostMagic, checksum(std::as_bytes(std::span(host))), ::getpid(), own_cpus()};
  for (int other = 0; other < size; ++other)
    if (other != rank) talk.tell(other, own);
  std::vector<int> here;
  std::vector<Cpus> cpus_here;
  for (int other = 0; other < size; ++other) {
    Card& card = cards[static_cast<std::size_t>(other)];
    if (other != rank) card = talk.hear<Card>(other);
    made.hosts.push_back(static_cast<int>(std::ranges::find(cards, card.host, &Card::host) - cards.begin()));
    if (card.host != own.host) continue;
    here.push_back(other);
    cpus_here.push_back(card.cpus);
  }
  made.share_of_cpus = share_of(own.cpus, cpus_here);
  made.ranks_here = static_cast<int>(here.size());
  if (here.size() == 1) {
    made.links = std::move(between);
    return made;
  }
  Shared shared;
  const auto place = std::find(here.begin(), here.end(), rank) - here.begin();
  if (made.ranks_here > LocalMemory::kMostRanks)
    shared.why = fmt::format("they are {}, and {} is the most", made.ranks_here, LocalMemory::kMostRanks);
  else if (place == 0)
    shared = lead(talk, here, ring_bytes);
  else
    shared = follow(talk, here, static_cast<int>(place), cards[static_cast<std::size_t>(here[0])].process);
  if (shared.memory == nullptr) {
    if (place == 0)
      made.note =
          fmt::format("ranks {} of this host do not share memory: {}", fmt::join(here, ", "), shared.why);
    made.links = std::move(between);
    return made;
  }
  made.memory = host_links_bytes(made.ranks_here, ring_bytes);
  made.all_here = made.ranks_here == size;
  if (made.all_here) between.reset();
  made.links = std::make_unique<Composite>(std::move(between), std::move(shared.memory),
                                           std::move(shared.links), here, rank, size);
  return made;
}

}  // namespace sluice::comm
