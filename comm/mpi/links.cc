#include "comm/mpi/links.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/mpi/plugin.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

using std::chrono::milliseconds;

constexpr int kTag = 1;
constexpr milliseconds kBetweenQuestions{50}, kSearch{3000};
constexpr milliseconds kMostLeaving{30000};
// A send to a rank that has ended fails at once, while that rank's earlier packets, such as the reason of its
// end, may still be unread.
constexpr milliseconds kLastWords{100};

}  // namespace

std::string mpi_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return fmt::format("error {}", code);
  return {text, static_cast<std::size_t>(length)};
}

void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) fail(ErrorCode::kIo, "MPI: {}: {}", call, mpi_text(code));
}

MpiLinks::MpiLinks(MPI_Comm world, const Mpi::Settings& settings, std::atomic<bool>& missed,
                   std::string& trouble)
    : world_(world), settings_(settings), missed_(missed), trouble_(trouble), pace_(Clock::now()) {
  check_mpi(MPI_Comm_rank(world_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(world_, &size_), "MPI_Comm_size");
  const auto ranks = static_cast<std::size_t>(size_);
  const auto buffers = static_cast<std::size_t>(mpi_send_buffers(size_));
  buffer_bytes_ = mpi_buffer_bytes(size_);
  packet_bytes_ = buffer_bytes_ - 64;
  memory_.resize(mpi_links_bytes(size_));
  peers_.resize(ranks);
  heads_.assign(ranks, MPI_REQUEST_NULL);
  sends_.assign(buffers, MPI_REQUEST_NULL);
  receivers_.assign(buffers, 0);
  indices_.resize(std::max(ranks, buffers));
  statuses_.resize(std::max(ranks, buffers));
  for (int from = 0; from < size_; ++from) {
    if (from == rank_) continue;
    peer(from).heard = Clock::now();
    peer(from).posted.assign(kMpiAhead, MPI_REQUEST_NULL);
    for (int i = 0; i < kMpiAhead; ++i) {
      peer(from).oldest = i;
      post(from);
    }
    peer(from).oldest = 0;
    std::swap(heads_[static_cast<std::size_t>(from)], peer(from).posted[0]);
  }
}

std::byte* MpiLinks::buffer(int from, int index) {
  const int before = from < rank_ ? from : from - 1;  // a rank has no buffers for itself
  return memory_.data() + static_cast<std::size_t>(before * kMpiAhead + index) * buffer_bytes_;
}
std::byte* MpiLinks::send_buffer(int index) {
  return memory_.data() + static_cast<std::size_t>((size_ - 1) * kMpiAhead + index) * buffer_bytes_;
}

// Posts a receive into the oldest buffer, which becomes the newest one.
void MpiLinks::post(int from) {
  Peer& p = peer(from);
  check_mpi(MPI_Irecv(buffer(from, p.oldest), static_cast<int>(packet_bytes_ + 1), MPI_BYTE, from, kTag,
                      world_, &p.posted[static_cast<std::size_t>(p.oldest)]),
            "MPI_Irecv");
}

void MpiLinks::lose(int rank, const std::string& why) {
  Peer& p = peer(rank);
  if (p.lost) return;
  p.lost = why;
  p.lost_at = Clock::now();
}

void MpiLinks::end_of_send(int index, int code) {
  const int to = receivers_[static_cast<std::size_t>(index)];
  --peer(to).sends;
  if (code == MPI_SUCCESS) peer(to).heard = Clock::now();  // the synchronous send's receive has begun
  if (code != MPI_SUCCESS) lose(to, fmt::format("what was sent to it has not arrived ({})", mpi_text(code)));
}

bool MpiLinks::poll_sends() {
  int ended = 0;
  const int code =
      MPI_Testsome(static_cast<int>(sends_.size()), sends_.data(), &ended, indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
  if (ended == MPI_UNDEFINED) return false;
  for (int i = 0; i < ended; ++i)
    end_of_send(indices_[static_cast<std::size_t>(i)],
                code == MPI_SUCCESS ? code : statuses_[static_cast<std::size_t>(i)].MPI_ERROR);
  return ended > 0;
}

void MpiLinks::see_head(int from, const MPI_Status& status, int code) {
  if (code != MPI_SUCCESS) {
    heads_[static_cast<std::size_t>(from)] = MPI_REQUEST_NULL;  // no later packet may be taken before it
    return lose(from, fmt::format("nothing can be received from it ({})", mpi_text(code)));
  }
  int bytes = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  if (bytes < 1) fail(ErrorCode::kCorrupt, "a packet of rank {} has no bytes", from);
  peer(from).arrived = static_cast<std::size_t>(bytes);
  peer(from).heard = Clock::now();
}

// Lets MPI make progress. Returns whether a packet has come or a send buffer has become free.
bool MpiLinks::poll() {
  const bool sent = poll_sends();
  int ended = 0;
  const int code = MPI_Testsome(size_, heads_.data(), &ended, indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
  if (ended == MPI_UNDEFINED) return sent;
  for (int i = 0; i < ended; ++i) {
    const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    see_head(indices_[static_cast<std::size_t>(i)], status, code == MPI_SUCCESS ? code : status.MPI_ERROR);
  }
  return sent || ended > 0;
}

std::optional<int> MpiLinks::free_send() {
  const auto free = std::find(sends_.begin(), sends_.end(), MPI_REQUEST_NULL);
  if (free == sends_.end()) return std::nullopt;
  return static_cast<int>(free - sends_.begin());
}

void MpiLinks::has_moved(std::size_t bytes) {
  if (2 * bytes < packet_bytes_) return pace_.moved(Clock::now());
  pace_.moved_large(Clock::now());
}

bool MpiLinks::say(int to, Kind kind, std::span<const std::byte> head, std::span<const std::byte> body) {
  Peer& p = peer(to);
  if (p.told || p.lost || (p.left && kind < Kind::kAnswer)) return false;
  std::optional<int> index = free_send();
  if (!index || p.sends == kMpiAhead) {
    has_room_ |= poll_sends();
    index = free_send();
    if (!index || p.sends == kMpiAhead) return false;
  }
  std::byte* const at = send_buffer(*index);
  std::copy(head.begin(), head.end(), at);
  std::copy(body.begin(), body.end(), at + head.size());
  const std::size_t bytes = head.size() + body.size();
  at[bytes] = static_cast<std::byte>(kind);
  const int code = MPI_Issend(at, static_cast<int>(bytes + 1), MPI_BYTE, to, kTag, world_,
                              &sends_[static_cast<std::size_t>(*index)]);
  if (code != MPI_SUCCESS) {
    lose(to, fmt::format("nothing can be sent to it ({})", mpi_text(code)));
    return false;
  }
  receivers_[static_cast<std::size_t>(*index)] = to;
  ++p.sends;
  has_moved(bytes);
  return true;
}

bool MpiLinks::send(int to, std::span<const std::byte> head, std::span<const std::byte> body) {
  return say(to, Kind::kPacket, head, body);
}

bool MpiLinks::receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) {
  ask();
  Peer& p = peer(from);
  MPI_Request& head = heads_[static_cast<std::size_t>(from)];
  for (;;) {
    if (!p.arrived && !p.left && head != MPI_REQUEST_NULL) {
      int ended = 0;
      MPI_Status status;
      const int code = MPI_Test(&head, &ended, &status);
      if (ended != 0 || code != MPI_SUCCESS) see_head(from, status, code);
    }
    if (!p.arrived) return false;
    // The buffer is posted again even if take() throws.
    struct Turn {
      MpiLinks& links;
      int from;
      ~Turn() {
        Peer& p = links.peer(from);
        p.arrived.reset();
        try {
          links.post(from);
        } catch (const Error& error) {
          links.lose(from, error.what());
        }
        p.oldest = (p.oldest + 1) % kMpiAhead;
        std::swap(links.heads_[static_cast<std::size_t>(from)], p.posted[static_cast<std::size_t>(p.oldest)]);
      }
    } turn{*this, from};
    const std::byte* const packet = buffer(from, p.oldest);
    const std::size_t bytes = *p.arrived - 1;
    switch (static_cast<Kind>(packet[bytes])) {
      case Kind::kPacket:
        has_moved(bytes);
        take({packet, bytes});
        return true;
      case Kind::kQuestion:
        say(from, Kind::kAnswer, {}, {});  // without room, other packets show that this one lives
        break;
      case Kind::kAnswer:
        break;
      case Kind::kFarewell:
        p.left = true;
        return false;
      default:
        fail(ErrorCode::kCorrupt, "a packet is of kind {}", static_cast<int>(packet[bytes]));
    }
  }
}

// While a rank is missing, asks all ranks whether they live: see gone(). Ranks that have left do not ask;
// they are told without a question that this rank lives.
void MpiLinks::ask() {
  const auto now = Clock::now();
  if (missing_since_ && !leaves_ && now > *missing_since_ + kSearch) {  // the search is over
    missed_ = false;
    missing_since_.reset();
  }
  if (!missing_since_ && (missed_ || leaves_ || settings_.asked_to_end())) missing_since_ = now;
  if (now < asked_ + kBetweenQuestions) return;
  asked_ = now;
  has_room_ |= poll_sends();  // while other links are waited for, nothing else polls the sends
  for (int to = 0; to < size_; ++to)
    if (to != rank_ && peer(to).sends == 0 && (missing_since_ || peer(to).left))
      say(to, peer(to).left ? Kind::kAnswer : Kind::kQuestion, {}, {});
}

void MpiLinks::wait(Clock::time_point until) {
  if (missing_since_) until = std::min(until, Clock::now() + kBetweenQuestions);  // gone() changes with time
  for (;;) {
    ask();
    const bool has_moved = poll(), has_room = std::exchange(has_room_, false), moved = has_moved || has_room;
    std::unique_lock lock(mutex_);
    const auto now = Clock::now();
    if (moved) pace_.moved(now);
    if (moved || is_woken_ || now >= until) {
      is_woken_ = false;
      return;
    }
    const auto sleep = pace_.sleep(now);
    if (sleep == Clock::duration::zero()) {
      lock.unlock();
      ::sched_yield();
      continue;
    }
    woken_.wait_until(lock, std::min(until, now + sleep), [this] { return is_woken_; });
  }
}

void MpiLinks::wake() {
  {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  woken_.notify_one();
}

std::optional<Links::Gone> MpiLinks::gone(int rank) {
  Peer& p = peer(rank);
  if (p.left) return Gone{true, "it has left"};
  const auto now = Clock::now();
  if (p.lost && now < p.lost_at + kLastWords) return std::nullopt;
  if (p.lost) return Gone{false, *p.lost};
  if (!missing_since_) return std::nullopt;
  const auto since = now - std::max(p.heard, *missing_since_);
  if (since < (leaves_ ? std::max(settings_.silence, silent_leaving_) : settings_.silence))
    return std::nullopt;
  lose(rank, fmt::format("it is silent since {}, for {:.1f} s",
                         leaves_ ? "this rank has ended" : "MPI or the launcher has missed a rank",
                         std::chrono::duration<double>(since).count()));
  return Gone{false, *p.lost};
}

// Sends a farewell to all ranks, and waits until all farewells have come and no packet is in flight. Returns
// whether that happened.
bool MpiLinks::leave(Clock::time_point until) {
  leaves_ = true;
  for (;;) {
    bool ends = true, whole = true;
    for (int other = 0; other < size_; ++other) {
      if (other == rank_) continue;
      while (receive(other, [](std::span<const std::byte>) {})) {
      }
      (void)gone(other);  // marks silent ranks as lost
      if (peer(other).lost) {
        whole &= peer(other).left;
        continue;
      }
      if (say(other, Kind::kFarewell, {}, {})) peer(other).told = true;  // the last packet to that rank
      ends &= peer(other).left && peer(other).told && peer(other).sends == 0;
    }
    if (ends) return whole;
    if (Clock::now() >= until) return false;
    wait(std::min(until, Clock::now() + milliseconds(5)));
  }
}

// Cancels posted receives that no packet will come for.
void MpiLinks::withdraw_receives() {
  for (Peer& p : peers_)
    for (MPI_Request& request : p.posted)
      if (request != MPI_REQUEST_NULL) {
        check_mpi(MPI_Cancel(&request), "MPI_Cancel");
        check_mpi(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait");
      }
  for (MPI_Request& request : heads_)
    if (request != MPI_REQUEST_NULL) {
      check_mpi(MPI_Cancel(&request), "MPI_Cancel");
      check_mpi(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait");
    }
}

MpiLinks::~MpiLinks() {
  try {
    if (leave(Clock::now() + kMostLeaving)) {
      withdraw_receives();
      check_mpi(MPI_Comm_free(&world_), "MPI_Comm_free");
      return;
    }
    for (int other = 0; other < size_; ++other)
      if (other != rank_ && !peer(other).left)
        trouble_ = fmt::format("rank {} {}", other,
                               peer(other).lost ? "is gone: " + *peer(other).lost : "has not left");
  } catch (const std::exception& error) {
    trouble_ = error.what();
  }
  if (trouble_.empty()) trouble_ = "what was sent has not arrived";
  // MPI may still write into the buffers.
  new std::vector<std::byte>(std::move(memory_));  // NOLINT: it is never freed
}

}  // namespace sluice::comm
