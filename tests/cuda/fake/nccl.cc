#include <cuda.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cuda/fake/driver.h"

// The functions of NCCL that Sluice calls: see control.h. Ranks are joined by sockets without a file. The
// real one's settings are not looked at, but for their size.
using sluice::fake_cuda::fake;
using sluice::fake_cuda::Range;
using sluice::fake_cuda::Refusal;
struct ncclComm;

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7;

struct Id {
  std::array<char, 128> bytes;
};

int checked(CUresult result) { return static_cast<int>(result); }
[[noreturn]] void refuse(int result, std::string misuse) {
  throw Refusal{static_cast<CUresult>(result), std::move(misuse)};
}

sockaddr_un address_of(const Id& id, int rank, socklen_t& size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("sluice-fake-nccl-{:.32}-{}", id.bytes.data(), rank);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a name in no folder
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// One end of a message.
struct Transfer {
  int peer;
  bool is_sent;
  CUdeviceptr memory;
  std::size_t bytes;
  std::vector<std::byte> packet;  // the number of bytes, and the bytes
  std::size_t done = 0;           // of the packet
};
struct Group {
  std::vector<Transfer> transfers;
  CUstream stream = nullptr;
};
thread_local int groups_open = 0;
thread_local ncclComm* group_of = nullptr;
thread_local Group group;

}  // namespace

struct ncclComm {
  ncclComm(const Id& id, int all, int own) : rank(own), sockets(static_cast<std::size_t>(all), -1) {
    joining = std::thread([this, id] { join(id); });
  }
  ~ncclComm() {
    is_aborted = true;
    joining.join();
    for (const int socket : sockets)
      if (socket >= 0) ::close(socket);
  }
  ncclComm(const ncclComm&) = delete;
  ncclComm& operator=(const ncclComm&) = delete;

  void join(const Id& id) {
    const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t size = 0;
    sockaddr_un own = address_of(id, rank, size);
    (void)::bind(listener, reinterpret_cast<sockaddr*>(&own), size);
    (void)::listen(listener, 64);
    for (int peer = 0; peer < rank && !is_aborted; ++peer) connect_to(id, peer);
    for (int left = static_cast<int>(sockets.size()) - 1 - rank; left > 0 && !is_aborted;) {
      const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        continue;
      }
      int peer = 0;
      (void)!::recv(socket, &peer, sizeof peer, MSG_WAITALL);
      keep(socket, peer);
      --left;
    }
    ::close(listener);
    is_joined = !is_aborted;
  }
  void connect_to(const Id& id, int peer) {
    socklen_t size = 0;
    sockaddr_un other = address_of(id, peer, size);
    while (!is_aborted) {
      const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(socket, reinterpret_cast<sockaddr*>(&other), size) == 0) {
        (void)!::send(socket, &rank, sizeof rank, MSG_NOSIGNAL);
        return keep(socket, peer);
      }
      ::close(socket);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  void keep(int socket, int peer) {
    (void)::fcntl(socket, F_SETFL, O_NONBLOCK);
    sockets[static_cast<std::size_t>(peer)] = socket;
  }

  // Sends and receives what can be without waiting. Returns whether all has come and gone.
  bool go_on(Group& of) const {
    if (is_aborted || is_stuck) return is_aborted;
    bool all_done = true;
    std::vector<std::array<bool, 2>> waits(sockets.size());  // by peer and direction, in order
    for (Transfer& transfer : of.transfers) {
      bool& is_behind = waits[static_cast<std::size_t>(transfer.peer)][transfer.is_sent ? 1 : 0];
      if (!is_behind && !go_on(transfer)) is_behind = true;
      all_done = all_done && !is_behind;
    }
    return all_done;
  }
  bool go_on(Transfer& transfer) const {
    if (transfer.peer == rank) return true;
    std::uint64_t bytes = transfer.bytes;
    if (transfer.packet.empty()) {
      transfer.packet.resize(sizeof bytes + bytes);
      std::memcpy(transfer.packet.data(), &bytes, sizeof bytes);
      std::byte* to = transfer.packet.data() + sizeof bytes;
      if (transfer.is_sent)
        fake().memory_->pieces(transfer.memory, transfer.bytes, [&](const std::byte* seen, std::size_t size) {
          std::memcpy(to, seen, size);
          to += size;
        });
    }
    const int socket = sockets[static_cast<std::size_t>(transfer.peer)];
    while (transfer.done < transfer.packet.size() && !is_stuck) {
      std::byte* const at = transfer.packet.data() + transfer.done;
      const std::size_t left = transfer.packet.size() - transfer.done;
      const ssize_t now =
          transfer.is_sent
              ? ::send(socket, at, left, MSG_NOSIGNAL)
              : ::recv(socket, at, transfer.done < sizeof bytes ? sizeof bytes - transfer.done : left, 0);
      if (now <= 0) return false;  // also where the other rank has gone, of which a kernel hears nothing
      transfer.done += static_cast<std::size_t>(now);
      if (transfer.is_sent || transfer.done != sizeof bytes) continue;
      std::uint64_t theirs = 0;
      std::memcpy(&theirs, transfer.packet.data(), sizeof theirs);
      if (theirs != bytes) {
        is_stuck = true;
        fake().remember(fmt::format("rank {} sends {} bytes, and rank {} receives {}", transfer.peer, theirs,
                                    rank, bytes));
      }
    }
    return !is_stuck;
  }
  void finish(Group& of) const {
    if (is_aborted) return;
    std::vector<const Transfer*> to_itself;
    for (const Transfer& transfer : of.transfers)
      if (transfer.peer == rank && transfer.is_sent) to_itself.push_back(&transfer);
    auto own = to_itself.begin();
    for (const Transfer& transfer : of.transfers) {
      if (transfer.is_sent) continue;
      std::vector<std::byte> copied;
      const std::byte* from = transfer.packet.data() + sizeof(std::uint64_t);
      if (transfer.peer == rank) {
        fake().memory_->pieces(
            (*own++)->memory, transfer.bytes,
            [&](const std::byte* seen, std::size_t size) { copied.insert(copied.end(), seen, seen + size); });
        from = copied.data();
      }
      fake().memory_->pieces(transfer.memory, transfer.bytes, [&](std::byte* seen, std::size_t size) {
        std::memcpy(seen, from, size);
        from += size;
      });
    }
  }

  const int rank;
  std::vector<int> sockets;  // by rank
  std::atomic<bool> is_joined = false;
  std::atomic<bool> is_aborted = false;
  mutable bool is_stuck = false;  // as the real one is, where the ends of a message differ
  std::thread joining;
};

namespace {

// Work of NCCL that is queued keeps its communicator, which the caller may have aborted.
std::map<ncclComm*, std::shared_ptr<ncclComm>>& communicators() {
  static auto* const all = new std::map<ncclComm*, std::shared_ptr<ncclComm>>();
  return *all;
}
std::shared_ptr<ncclComm> find(ncclComm* communicator) {
  const auto found = communicators().find(communicator);
  if (found == communicators().end()) refuse(kInvalidArgument, "a communicator is used that has ended");
  return found->second;
}
int end(const char* function, ncclComm* communicator) {
  std::shared_ptr<ncclComm> ended;  // after the driver's lock
  return checked(fake().call_beside(function, [&] {
    ended = find(communicator);
    ended->is_aborted = true;
    communicators().erase(communicator);
    --fake().nccl_communicators_;
    fake().account();
  }));
}

// A GPU sends and receives without a call of its process.
void serve_for_ever() {
  [[maybe_unused]] static const bool serves = [] {
    std::thread([] {
      for (;;) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        fake().serve_ranks();
      }
    }).detach();
    return true;
  }();
}

int add(const char* function, bool is_sent, CUdeviceptr memory, std::size_t bytes, int type, int peer,
        ncclComm* communicator, CUstream stream) {
  return checked(fake().call_in_context(function, [&] {
    const auto of = find(communicator);
    if (!of->is_joined) refuse(kInvalidUsage, "a message is queued before ranks are joined");
    if (groups_open == 0) refuse(kInvalidUsage, "a message is in no group");
    if (type != 1) refuse(kInvalidArgument, "a message is not of bytes");
    if (peer < 0 || peer >= static_cast<int>(of->sockets.size()))
      refuse(kInvalidArgument, fmt::format("there is no rank {}", peer));
    if (!group.transfers.empty() && (group_of != communicator || group.stream != stream))
      refuse(kInvalidUsage, "a group has messages of two communicators, or on two streams");
    fake().memory_->expect_mapped(memory, bytes);
    (is_sent ? fake().own_counts().bytes_sent : fake().own_counts().bytes_received) +=
        peer == of->rank ? 0 : bytes;
    group_of = communicator;
    group.stream = stream;
    group.transfers.push_back({peer, is_sent, memory, bytes, {}});
  }));
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = fake().settings_.nccl;
  return kSuccess;
}
int ncclGetUniqueId(Id* id) {
  return checked(fake().call("ncclGetUniqueId", false, [&] {
    *id = {};
    std::random_device random;
    const std::string text = fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
    std::memcpy(id->bytes.data(), text.data(), text.size());
  }));
}
int ncclCommInitRankConfig(ncclComm** communicator, int ranks, Id id, int rank, const std::size_t* settings) {
  *communicator = nullptr;
  const int result = checked(fake().call_in_context("ncclCommInitRankConfig", [&] {
    if (*settings < 48) refuse(kInvalidArgument, "NCCL's settings are too short");
    if (rank < 0 || rank >= ranks) refuse(kInvalidArgument, "a rank is none");
    auto made = std::make_shared<ncclComm>(id, ranks, rank);
    *communicator = made.get();
    communicators()[made.get()] = std::move(made);
    ++fake().nccl_communicators_;
    fake().account();
  }));
  if (result != kSuccess) return result;
  serve_for_ever();
  return kInProgress;
}
// As the real one it waits for nothing that a GPU does.
int ncclCommGetAsyncError(ncclComm* communicator, int* result) {
  return checked(fake().call_beside(
      "ncclCommGetAsyncError", [&] { *result = find(communicator)->is_joined ? kSuccess : kInProgress; }));
}
int ncclCommFinalize(ncclComm* communicator) {
  return checked(fake().call_in_context("ncclCommFinalize", [&] { (void)find(communicator); }));
}
int ncclCommDestroy(ncclComm* communicator) { return end("ncclCommDestroy", communicator); }
int ncclCommAbort(ncclComm* communicator) { return end("ncclCommAbort", communicator); }
int ncclGroupStart() {
  ++groups_open;
  return kSuccess;
}
int ncclGroupEnd() {
  if (groups_open == 0 || --groups_open > 0) return groups_open > 0 ? kSuccess : kInvalidUsage;
  const auto all = std::make_shared<Group>(std::exchange(group, {}));
  if (all->transfers.empty()) return kSuccess;
  return checked(fake().call_in_context("ncclGroupEnd", [&] {
    std::vector<Range> ranges;
    for (const Transfer& transfer : all->transfers)
      ranges.push_back({transfer.memory, transfer.memory + transfer.bytes, false});
    const auto of = find(group_of);
    fake().work_->queue_for_ranks(
        all->stream, std::move(ranges), [of, all] { return of->go_on(*all); },
        [of, all] { of->finish(*all); });
  }));
}
int ncclSend(const void* memory, std::size_t bytes, int type, int peer, ncclComm* communicator,
             CUstream stream) {
  return add("ncclSend", true, reinterpret_cast<CUdeviceptr>(memory), bytes, type, peer, communicator,
             stream);
}
int ncclRecv(void* memory, std::size_t bytes, int type, int peer, ncclComm* communicator, CUstream stream) {
  return add("ncclRecv", false, reinterpret_cast<CUdeviceptr>(memory), bytes, type, peer, communicator,
             stream);
}
const char* ncclGetErrorString(int result) {
  return result == 2 ? "unhandled system error" : result == 6 ? "remote process exited" : "an error";
}
const char* ncclGetLastError(ncclComm*) { return "as the fake says"; }
}
