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

// Throws Error(kIo) where a call of MPI has failed.
void check_mpi(int code, const char* call);
std::string mpi_text(int code);

// Links of one rank over a communicator of MPI.
//
// A packet is a message with one byte more, which says of what kind it is. As many receives are posted ahead,
// for each rank, as packets of that rank may be under way. A send is synchronous: it ends when its receive
// has begun, and so no packet waits in memory of MPI's own, which nobody has charged.
//
// MPI tells nothing by itself, so a rank that waits asks it, as often as Pace says.
class MpiLinks final : public Links {
 public:
  // `missed` is set where MPI has found that a rank is gone, and does not say which. `trouble` gets the
  // reason where not all have left in order. Both outlive the links. Takes `world`.
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

 private:
  enum class Kind : unsigned char { kPacket, kQuestion, kAnswer, kFarewell };
  struct Peer {
    std::vector<MPI_Request> posted;  // in turn; that of the oldest one is in heads_
    int oldest = 0;
    std::optional<std::size_t> arrived;  // the bytes of the oldest one
    int sends = 0;                       // under way to this rank
    bool left = false;                   // it has said farewell
    bool told = false;                   // this rank has said farewell to it
    std::optional<std::string> lost;     // why nothing can be sent to it
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
  std::vector<MPI_Request> heads_;    // by rank: the oldest receive
  std::vector<MPI_Request> sends_;    // by buffer
  std::vector<int> receivers_;        // by buffer
  std::vector<int> indices_;          // for poll()
  std::vector<MPI_Status> statuses_;  // for poll()
  Pace pace_;
  Clock::time_point asked_;
  std::optional<Clock::time_point> missing_since_;
  bool leaves_ = false;
  bool has_room_ = false;  // a buffer has become free, of which wait() has not told yet

  std::mutex mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;  // guarded by mutex_
};

}  // namespace sluice::comm
