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

// What the ranks of this host read of the shards that ranks of other hosts have. Each piece of these comes to
// the host once, to the rank that relays it, which keeps it (Pieces) and gives it to the others. A rank reads
// when it wants and whatever it wants, and a relay fetches what is asked for and nothing else, on threads
// that wait for no engine; so one rank alone may read, and none waits for what another one's engine does.
//
// A relay takes a piece of memory for a version only once the owner has that version, for which it asks
// first: otherwise reads of versions that are still to come could hold all pieces, and reads for which the
// owners of these wait would get none.
//
// Thread rule: start() comes first; then any thread.
class RelayedShards {
 public:
  // What a rank takes for it: pieces of so many bytes, of which a unit needs so many at most.
  struct Need {
    std::size_t pieces = 0, bytes = 0;
  };
  // `all` has the shards of all ranks.
  static Need need_of(const Layout& layout, const Shards& all, UnitId unit, const comm::Hosts& hosts,
                      int rank);

  // pieces: 0 where this rank relays nothing.
  RelayedShards(const Layout& layout, Ranks& ranks, std::size_t pieces, std::size_t piece_bytes);
  // Who waits for a version gets an error. Waits until what was given has been sent.
  ~RelayedShards();
  RelayedShards(const RelayedShards&) = delete;
  RelayedShards& operator=(const RelayedShards&) = delete;
  void start(allocator::Ledger& ledger) { pieces_.start(ledger, piece_bytes_); }

  // The rank that this one asks for a piece of another one's shard: its owner, or the one that relays it.
  int source(int owner, std::size_t piece) const;
  // Gives a piece that this rank relays. REQUIRES: the read is of one.
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
  // Outlives this, since the communicator may call when this is gone.
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
  std::map<std::pair<int, UnitId>, std::uint64_t> published_;  // the newest version that an owner has told
  std::map<Version, std::vector<Waiting>> waiting_;

  Pieces pieces_;
};

}  // namespace sluice::engine
