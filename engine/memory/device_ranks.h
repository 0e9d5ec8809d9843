#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/serial_queue.h"
#include "core/threads.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/memory/device_work.h"
#include "engine/memory/rank_memory.h"

namespace sluice::engine {

// What ranks sum or gather of what is in their GPUs' memory. It passes through registered host memory, piece
// by piece, in the order in which it was added: while the ranks have one piece, the next one leaves the GPU,
// and the one before returns to it. A piece of one rank waits for that of the others, and there is memory for
// a few. So all ranks add the same calls in the same order. Two threads do it, one for each direction. Ranks
// of one host read each other's pieces where they are (RankMemory). The last piece of a call comes first, so
// that narrow elements may become wider ones in their own memory. Thread rule: start() and share() first,
// then one thread.
class DeviceRanks {
 public:
  enum class Of : std::uint8_t { kGradients, kParameters };
  // A call that all ranks make. Where it has failed, nothing more of it is copied or begun.
  struct Call {
    // The elements of a unit, from its first one on: in the GPU's memory, or, in_host, in registered memory
    // of the host, in which the call is then made where they are, once the GPU does not use them.
    std::byte* data = nullptr;
    bool in_host = false;
    Dtype type = Dtype::kF32;  // of what this rank has then, and of what is sent
    // Of what it has before. Another type may be narrower, and each rank has its own. REQUIRES: then ranks
    // share memory, and `out` is all elements.
    Dtype given = Dtype::kF32;
    ElementRange elements;              // of these, what the call is about
    std::vector<ElementRange> out, in;  // what leaves the GPU before, and returns to it after
    // Whether each rank makes of all ranks' pieces what it needs, where ranks share memory; `out` is then all
    // that others read. The same on all ranks.
    bool may_share = false;
    UnitId unit = 0;
    // Begins the call for some of the elements, of which the array has nothing else, where they are not
    // shared.
    std::function<void(ElementRange elements, Array array, Done done)> begin;
    // What is done with them when it has ended, before they return. of_ranks: where they are shared, what
    // each rank has given, of which this rank's may be the same array; else empty.
    std::function<void(ElementRange elements, Array array, std::span<const ConstArray> of_ranks)> end = {};
  };

  // may_share: whether ranks may give some unit where others read it. threads: of the host, for what is
  // copied there.
  DeviceRanks(const Layout& layout, Of of, bool may_share, DeviceWork& gpu, Threads& threads);
  ~DeviceRanks();  // waits until the calls that were added have ended
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;
  static constexpr std::size_t kPieces = 4;  // that may be under way
  static std::size_t piece_elements(const Layout& layout);
  static std::size_t bytes(const Layout& layout, Of of, bool may_share);  // of host memory
  void start(allocator::Ledger& ledger, Ranks& ranks);                    // which outlive it
  // Collective: comes before the first call. name: what passes here, for messages.
  void share(const std::string& name) { memory_.share(*ranks_, name, false); }
  // Whether ranks may give what is narrower than it is then.
  bool takes_narrow() const { return memory_.is_shared() && room_.narrow > 0; }

  // `done` is called on a thread of this class when all that returns to the GPU is queued. REQUIRES: until
  // then nothing else is queued with that memory.
  void add(Call call, Done done);

 private:
  // A rank that has begun a piece has ended those kPieces before it. So the others no longer read what this
  // one had twice as long ago.
  static constexpr std::size_t kPlaces = 2 * kPieces;
  // Of a place: what is sent or returns, then narrow elements that were given, then the type of what is there
  // for others.
  struct Room {
    Room(const Layout& layout, Of of, bool may_share);
    std::size_t wide, narrow;  // bytes
    std::size_t all() const { return wide + narrow + kLine; }
    static constexpr std::size_t kLine = 64;
  };
  struct Added {
    Call call;
    Done done;
    std::size_t pieces_left;
    std::exception_ptr error;  // of the first piece that failed
  };
  struct Piece {
    std::shared_ptr<Added> of;
    ElementRange elements;
    std::size_t number = 0;  // among all
    std::shared_ptr<TransferGroup> ranks;
  };
  std::vector<ElementRange> pieces_of(ElementRange elements) const;
  void leave(const Piece& piece);
  void come_back(const Piece& piece);
  void wait_for_record(const Piece& piece);
  void copy_to_place(const Piece& piece);
  void attempt(const Piece& piece, const std::function<void()>& action);
  std::byte* place(const Piece& piece) const { return memory_.data() + piece.number % kPlaces * room_.all(); }
  static bool is_narrow(const Piece& piece) { return piece.of->call.given != piece.of->call.type; }
  // Where others find what this rank gives, unless it is given where it is.
  std::byte* given(const Piece& piece) const { return place(piece) + (is_narrow(piece) ? room_.wide : 0); }
  // Where the type of that stands.
  std::byte* type_given(const Piece& piece) const { return place(piece) + room_.wide + room_.narrow; }
  std::byte* host(const Piece& piece) const {
    const Call& call = piece.of->call;
    return call.in_host ? call.data + piece.elements.begin * size_of(call.type) : place(piece);
  }
  bool is_shared(const Piece& piece) const { return memory_.is_shared() && piece.of->call.may_share; }
  std::vector<ConstArray> of_ranks(const Piece& piece) const;
  // Calls copy(the unit's memory, the host's) for what of the ranges lies within the piece. host: where the
  // piece begins there, in elements of that type.
  template <class Copy>
  void for_each(const Piece& piece, const std::vector<ElementRange>& ranges, Array host,
                const Copy& copy) const;
  Array array_of(const Piece& piece) const { return {host(piece), piece.of->call.type}; }
  Array given_array(const Piece& piece) const { return {given(piece), piece.of->call.given}; }

  DeviceWork& gpu_;
  Threads& threads_;
  const Of of_;
  const std::size_t piece_elements_;
  const Room room_;
  RankMemory memory_;
  Ranks* ranks_ = nullptr;
  std::size_t added_ = 0;  // pieces
  std::mutex mutex_;       // guards what follows, and errors
  std::condition_variable has_room_;
  std::size_t under_way_ = 0;  // pieces from leave() to the end of come_back()
  std::optional<SerialQueue> out_, in_;
};

// Copies what the other ranks have of their shards of some elements of a unit, where these are shared: see
// DeviceRanks::Call::end.
void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, Threads& threads);

}  // namespace sluice::engine
