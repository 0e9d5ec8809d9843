#pragma once
#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi/pace.h"
#include "comm/mpi_links.h"

namespace sluice::comm {

// Throws Error(kIo) where `code` is an error of MPI.
void check_mpi(int code, const char* call);
std::string mpi_text(int code);

// Links of one rank over an MPI communicator.
//
// A packet is an MPI message with one more byte, which tells its Kind. For each rank, as many receives are
// posted in advance as it may have packets in flight. Sends are synchronous (MPI_Issend): a send ends only
// when its receive has begun, so no packet waits in a buffer of MPI that nobody has charged.
//
// MPI makes no callbacks, so a rank that waits polls it, at the intervals that Pace gives.
class MpiLinks final : public Links {
 public:
  // Takes ownership of `world`. Sets `missed` where MPI reports that some rank is gone without saying which,
  // and `trouble` to the reason where not all ranks have left in order. Both outlive the links.
  MpiLinks(MPI_Comm world, const Mpi::Settings& settings, std::atomic<bool>& missed, std::string& trouble);
  ~MpiLinks() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::size_t packet_bytes() const override { return packet_bytes_; }
  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) override;
  bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) override;
  void wait(Clock::time_point until) override;
  void wake() override;
  std::optional<Gone> gone(int rank) override;
  void work_has_failed() override { silent_leaving_ = kSilentFailed; }

 private:
  // How long a rank that leaves waits for a silent one. A live rank answers while it still works, for example
  // frees memory. On a busy machine it may wait for a processor for seconds, and where it is missed, the job
  // seems to have failed. Once the work has failed, the others need time only to report the same.
  static constexpr std::chrono::milliseconds kSilentLeaving{10000}, kSilentFailed{2000};
  enum class Kind : unsigned char { kPacket, kQuestion, kAnswer, kFarewell };
  struct Peer {
    std::vector<MPI_Request> posted;  // a circular queue; heads_ has the oldest request
    int oldest = 0;
    std::optional<std::size_t> arrived;  // the size of the oldest one's packet, in bytes
    int sends = 0;                       // in flight to this rank
    bool left = false;                   // its farewell has arrived
    bool told = false;                   // this rank has sent it a farewell
    std::optional<std::string> lost;     // why it can no longer be reached
    Clock::time_point heard, lost_at;
  };
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  std::byte* buffer(int from, int index);
  std::byte* send_buffer(int index);
  void post(int from);
  bool say(int to, Kind kind, std::span<const std::byte> head, std::span<const std::byte> body);
  std::optional<int> free_send();
  bool poll();
  bool poll_sends();
  void see_head(int from, const MPI_Status& status, int code);
  void end_of_send(int index, int code);
  void lose(int rank, const std::string& why);
  void has_moved(std::size_t bytes);
  void ask();
  bool leave(Clock::time_point until);
  void withdraw_receives();

  MPI_Comm world_;
  const Mpi::Settings settings_;
  std::atomic<bool>& missed_;
  std::string& trouble_;
  int rank_ = 0, size_ = 0;
  std::size_t buffer_bytes_ = 0, packet_bytes_ = 0;
  std::vector<std::byte> memory_;
  std::vector<Peer> peers_;
  std::vector<MPI_Request> heads_;    // by rank: the oldest posted receive
  std::vector<MPI_Request> sends_;    // by buffer
  std::vector<int> receivers_;        // by buffer
  std::vector<int> indices_;          // for poll()
  std::vector<MPI_Status> statuses_;  // for poll()
  Pace pace_;
  Clock::time_point asked_;
  std::optional<Clock::time_point> missing_since_;
  bool leaves_ = false;
  std::chrono::milliseconds silent_leaving_ = kSilentLeaving;
  bool has_room_ = false;  // a send buffer is free, and wait() has not reported it yet

  std::mutex mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;  // guarded by mutex_
};

}  // namespace sluice::comm
