#pragma once
#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/serial_queue.h"
#include "core/threads.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/memory/device_work.h"
#include "engine/memory/peer_memory.h"
#include "engine/memory/rank_memory.h"

namespace sluice::engine {

// What ranks sum or gather of what is in their GPUs' memory, piece by piece, in the order in which it was
// added: while the ranks have one piece, the next one leaves, and the one before returns. A piece of one rank
// waits for that of the others, and there is memory for a few. So all ranks add the same calls in the same
// order. Two threads do it, one for each direction.
//
// A unit meets in one of two places, on which ranks agree. On the GPUs, where the plan has these read each
// other's memory (PeerMemory): a piece is copied to where the others read it, and each rank's GPU makes what
// it needs of all. Or in registered memory of the host, which ranks of one host read where it is
// (RankMemory), and others send. The last piece of a call comes first, so that narrow elements may become
// wider ones in their own memory. Thread rule: start() and share() first, then one thread.
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
    // read each other's memory, and `out` is all elements.
    Dtype given = Dtype::kF32;
    ElementRange elements;              // of these, what the call is about
    std::vector<ElementRange> out, in;  // what leaves before, and what this rank has after
    // Whether each rank makes of all ranks' pieces what it needs, where ranks share memory of the host; `out`
    // is then all that others read. The same on all ranks.
    bool may_share = false;
    UnitId unit = 0;
    // In the host. begin() begins the call for some of the elements, of which the array has nothing else,
    // where they are not shared. end() does what is done with them when it has ended, before they return.
    // of_ranks: where they are shared, what each rank has given, of which this rank's may be the same array;
    // else empty.
    std::function<void(ElementRange elements, Array array, Done done)> begin;
    std::function<void(ElementRange elements, Array array, std::span<const ConstArray> of_ranks)> end = {};
    // On the GPUs. make() queues on DeviceWork::ranks() what becomes of some elements, by what each rank has
    // given of them, in the unit's memory; `squares`, in the GPU's memory, has an f64 for each block of the
    // grid. made() gets these in the host's memory when that has ended.
    std::function<void(ElementRange elements, std::span<const ConstArray> of_ranks, double* squares)> make =
        {};
    std::function<void(ElementRange elements, std::span<const double> squares)> made = {};
  };
  // What ranks agree on before they have plans.
  struct Meeting {
    bool on_gpus = false;    // some units may meet there
    bool may_share = false;  // ranks may give some unit where others read it in the host's memory
  };

  // threads: of the host, for what is copied there.
  DeviceRanks(const Layout& layout, Of of, Meeting meeting, DeviceWork& gpu, Threads& threads);
  ~DeviceRanks();  // waits until the calls that were added have ended
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;
  // How pieces pass in one of the two places: how many are under way, and how large they are.
  struct Pace {
    std::size_t pieces, elements;
  };
  static Pace pace(const Layout& layout, bool on_gpus);
  static std::size_t bytes(const Layout& layout, Of of, Meeting meeting);         // of host memory
  static std::size_t device_bytes(const Layout& layout, Of of, Meeting meeting);  // of the GPU's
  void start(allocator::Ledger& ledger, Ranks& ranks);                            // which outlive it
  // Collective: comes before the first call. name: what passes here, for messages. in_host: by unit, whether
  // this rank has it in the host's memory when it meets the others'. Throws where GPUs cannot read each
  // other's memory. Returns, by unit, whether it meets on the GPUs.
  std::vector<bool> share(const std::string& name, const std::vector<bool>& in_host);
  bool is_on_gpus(UnitId unit) const { return on_gpus_[unit]; }
  // Whether ranks may give what is narrower than it is then.
  bool takes_narrow(UnitId unit) const {
    return is_on_gpus(unit) ||
           (in_host_.memory.is_shared() && in_host_.room.narrow > 0 && ranks_->partitioned(unit));
  }

  // `done` is called on a thread of this class when all that returns to the GPU is queued. REQUIRES: until
  // then nothing else is queued with that memory.
  void add(Call call, Done done);

 private:
  // Of a place: what is sent or returns, then narrow elements that were given, or, on GPUs, squares.
  struct Room {
    std::size_t wide = 0, narrow = 0, squares = 0;  // bytes
    std::size_t all() const { return wide + narrow + squares; }
  };
  static Room room_in_host(const Layout& layout, Of of, bool may_share);
  static Room room_on_gpus(const Layout& layout, Of of);
  // A rank that has begun a piece has ended as many before it as may be under way. So the others no longer
  // read what this one had twice as long ago.
  static std::size_t places(Pace pace) { return 2 * pace.pieces; }
  template <class Memory>
  struct Places {
    Pace pace;
    Room room;
    Memory memory = {};
    std::size_t added = 0;      // pieces
    std::size_t under_way = 0;  // from leave() to the end of come_back()
    std::size_t bytes() const { return places(pace) * room.all(); }
    std::byte* at(std::size_t number) const { return memory.data() + number % places(pace) * room.all(); }
  };
  struct Added {
    Call call;
    Done done;
    bool on_gpus;
    std::size_t pieces_left;
    std::exception_ptr error;  // of the first piece that failed
  };
  struct Piece {
    std::shared_ptr<Added> of;
    ElementRange elements;
    std::size_t number = 0;  // among all that meet in the same place
    std::shared_ptr<TransferGroup> ranks;
    std::shared_ptr<const Ranks::Types> types = {};  // that the ranks have given it in
  };
  std::vector<ElementRange> pieces_of(ElementRange elements, std::size_t most) const;
  void leave(const std::shared_ptr<Piece>& piece);
  void leave_in_host(Piece& piece);
  void leave_on_gpu(Piece& piece);
  void come_back(const Piece& piece);
  void come_back_from_host(const Piece& piece);
  void come_back_from_gpus(const Piece& piece);
  void wait_for_record(const Piece& piece);
  void copy_to_place(const Piece& piece);
  void meet(Piece& piece);
  void attempt(const Piece& piece, const std::function<void()>& action);
  std::size_t& under_way(const Piece& piece) {
    return piece.of->on_gpus ? on_gpus_places_.under_way : in_host_.under_way;
  }
  const Pace& pace(const Piece& piece) const {
    return piece.of->on_gpus ? on_gpus_places_.pace : in_host_.pace;
  }
  DeviceWork::Memory place(const Piece& piece) const {
    if (piece.of->on_gpus) return {on_gpus_places_.at(piece.number), on_gpus_places_.room.all()};
    return {in_host_.at(piece.number), in_host_.room.all()};
  }
  std::byte* begin_of_place(const Piece& piece) const { return const_cast<std::byte*>(place(piece).data()); }
  static bool is_narrow(const Piece& piece) { return piece.of->call.given != piece.of->call.type; }
  // Where others find what this rank gives, unless it is given where it is.
  std::byte* given(const Piece& piece) const {
    return begin_of_place(piece) + (is_narrow(piece) && !piece.of->on_gpus ? in_host_.room.wide : 0);
  }
  std::byte* host(const Piece& piece) const {
    const Call& call = piece.of->call;
    return call.in_host ? call.data + piece.elements.begin * size_of(call.type) : begin_of_place(piece);
  }
  bool is_shared(const Piece& piece) const { return in_host_.memory.is_shared() && piece.of->call.may_share; }
  std::vector<ConstArray> of_ranks(const Piece& piece) const;
  // Calls copy(the unit's memory, the place's) for what of the ranges lies within the piece. place: where the
  // piece begins there, in elements of that type.
  template <class Copy>
  void for_each(const Piece& piece, const std::vector<ElementRange>& ranges, Array place,
                const Copy& copy) const;
  Array array_of(const Piece& piece) const { return {host(piece), piece.of->call.type}; }
  Array given_array(const Piece& piece) const { return {given(piece), piece.of->call.given}; }

  DeviceWork& gpu_;
  Threads& threads_;
  const Of of_;
  const Meeting meeting_;
  Places<RankMemory> in_host_;
  Places<PeerMemory> on_gpus_places_;
  RegisteredRegion squares_;   // of the places on the GPU
  std::vector<bool> on_gpus_;  // by unit
  Ranks* ranks_ = nullptr;
  std::mutex mutex_;  // guards what follows, and errors
  std::condition_variable has_room_;
  std::optional<SerialQueue> out_, in_;
};

// Copies what the other ranks have of their shards of some elements of a unit, where these are shared: see
// DeviceRanks::Call::end.
void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, Threads& threads);
// Queues the same on GPUs: see DeviceRanks::Call::make. `unit_data`: all elements of the unit.
void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array unit_data,
                    std::span<const ConstArray> of_ranks, DeviceWork& gpu);

}  // namespace sluice::engine
