#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator/ledger.h"
#include "comm/call.h"
#include "engine/memory/pieces.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// Reads of shards on other hosts. Each piece of such a shard is sent to this host once, to the rank that
// relays it, which buffers it (Pieces) and gives it to the other ranks. A relay fetches only what is
// requested, on threads that wait for no engine; so a rank may read at any time and alone, and never waits
// for another rank's engine.
//
// A relay first asks the owner for the version, and takes a buffer only once the owner has published it.
// Otherwise reads of future versions could occupy all buffers, while reads that the owners need before they
// can publish these get none.
//
// Thread rule: start() comes first; then any thread.
class RelayedShards {
 public:
  // The buffers of this rank for one unit: how many, and of how many bytes at most.
  struct Need {
    std::size_t pieces = 0, bytes = 0;
  };
  // `all` has the shards of all ranks.
  static Need need_of(const Layout& layout, const Shards& all, UnitId unit, const comm::Hosts& hosts,
                      int rank);

  // pieces: 0 where this rank relays nothing.
  RelayedShards(const Layout& layout, Ranks& ranks, std::size_t pieces, std::size_t piece_bytes);
  // Reads that wait for a version get an error. Waits until answers that were given have been sent.
  ~RelayedShards();
  RelayedShards(const RelayedShards&) = delete;
  RelayedShards& operator=(const RelayedShards&) = delete;
  void start(allocator::Ledger& ledger) { pieces_.start(ledger, piece_bytes_); }

  // The rank to ask for a piece of a shard: its owner, or the rank that relays it.
  int source(int owner, std::size_t piece) const;
  // Answers a read of a piece. REQUIRES: this rank relays it.
  void read(const comm::Read& read, Pieces::Use use);

 private:
  struct Version {
    int owner;
    UnitId unit;
    std::uint64_t version;
    auto operator<=>(const Version&) const = default;
  };
  struct Waiting {
    comm::Read read;
    Pieces::Use use;
  };
  // Outlives this object, since the communicator may call after its end.
  struct Calls {
    std::mutex mutex;
    std::condition_variable ended;
    RelayedShards* shards = nullptr;
    int running = 0;
  };
  void ask(const Version& version);
  void on_asked(const Version& version, const std::exception_ptr& error);
  void give(const Waiting& waiting);
  void bring(const Pieces::Key& key, std::byte* into, Done done);

  const Layout& layout_;
  Ranks& ranks_;
  const std::size_t piece_bytes_;
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();

  // mutex_ guards what follows.
  std::mutex mutex_;
  std::map<std::pair<int, UnitId>, std::uint64_t> published_;  // the newest that its owner has confirmed
  std::map<Version, std::vector<Waiting>> waiting_;

  Pieces pieces_;
};

}  // namespace sluice::engine
