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
#include "engine/layout/stripes.h"
#include "engine/memory/device_work.h"
#include "engine/memory/nccl_turns.h"
#include "engine/memory/peer_memory.h"
#include "engine/memory/rank_memory.h"

namespace sluice::engine {

// Runs the collectives of a GPU engine: it sums gradients and gathers parameters that are in GPU memory, in
// pieces and in the order in which the calls were added. A piece is a stripe: some elements of each rank's
// shard, so that all ranks read and add at the same time. It is a pipeline of two threads: while the ranks
// exchange one piece, the next one is copied out and the one before is copied back. A piece waits for the
// same piece of the other ranks, and only a few are in flight; so all ranks must add the same calls in the
// same order.
//
// The ranks agree, by unit, on one of two places for the exchange. *On the GPUs*, where GPUs read each
// other's memory (PeerMemory): each rank copies its piece to memory that the others read, and each GPU
// computes its result from all of them. Or by NCCL (comm::Nccl), between hosts, too: each GPU sends the
// others what they need of its piece, and nothing is copied before. *In host memory*: ranks of one host read
// each other's registered memory (RankMemory), and other ranks send. Thread rule: start() and share() first,
// then one thread.
//
// Results may be wider than what ranks give, and take its memory. Results that would overwrite elements of
// later stripes lie at the end of the unit's memory until the last stripe has come. Each element whose place
// they take there has left, since every stripe has equally many elements of each shard, counted from its end.
class DeviceRanks {
 public:
  enum class Of : std::uint8_t { kGradients, kParameters };
  // A collective call. After an error in one of its pieces no further piece is copied or exchanged.
  struct Call {
    // All elements of the unit: in GPU memory, or, with in_host, in registered host memory, on which the call
    // then works in place once the GPU no longer uses it.
    std::byte* data = nullptr;
    bool in_host = false;
    Dtype type = Dtype::kF32;  // of this rank's result, and of what is sent
    // The type of this rank's elements before the call, which may be narrower than `type` and differ between
    // ranks. REQUIRES, where it differs: ranks read each other's memory, and `out` is all elements.
    Dtype given = Dtype::kF32;
    ElementRange elements;              // of the unit, that the call covers
    std::vector<ElementRange> out, in;  // copied out before the exchange; copied back after it
    // Whether ranks of one host read each other's pieces in place, from which each computes its own result;
    // `out` then names all that others read. The same on all ranks.
    bool may_share = false;
    UnitId unit = 0;
    // The functions below are called for each part of a stripe, and so with elements of one shard.
    // In host memory. begin() starts the collective on some elements, which are all that `array` has; it is
    // called only where ranks do not share their pieces. end() processes the elements after the exchange,
    // before they are copied back, and leaves results in `array`. of_ranks: where pieces are shared, the
    // input of each rank, of which this rank's may be `array` itself; else empty.
    std::function<void(ElementRange elements, Array array, Done done)> begin;
    std::function<void(ElementRange elements, Array array, std::span<const ConstArray> of_ranks)> end = {};
    // On the GPUs. make() queues on DeviceWork::ranks() the kernels that compute elements in `array` from the
    // input of each rank; `squares`, in GPU memory, has room for an f64 per block of the grid. made() gets
    // the squares in host memory once the kernels have ended; it is given by sums alone. NCCL gathers without
    // make().
    std::function<void(ElementRange elements, Array array, std::span<const ConstArray> of_ranks,
                       double* squares)>
        make = {};
    std::function<void(ElementRange elements, std::span<const double> squares)> made = {};
  };
  // The ways of exchange on which the ranks agree before they have plans.
  struct Meeting {
    bool on_gpus = false;    // some units may be exchanged on the GPUs
    bool may_share = false;  // ranks may read some units in each other's host memory
    bool by_nccl = false;    // on the GPUs NCCL sends what others need
  };

  // threads: the host's compute threads, for copies in host memory. All referenced objects outlive this one.
  DeviceRanks(const Layout& layout, Of of, Meeting meeting, DeviceWork& gpu, Threads& threads,
              ByNccl by_nccl = {});
  ~DeviceRanks();  // waits until all added calls have completed
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;
  // How many pieces are in flight in one of the two places, and how many elements each has.
  struct Pace {
    std::size_t pieces, elements;
  };
  static Pace pace(const Layout& layout, bool on_gpus);
  static std::size_t bytes(const Layout& layout, Of of, Meeting meeting);         // host memory that it takes
  static std::size_t device_bytes(const Layout& layout, Of of, Meeting meeting);  // GPU memory, likewise
  void start(allocator::Ledger& ledger, Ranks& ranks);                            // both outlive it
  // Collective; before the first call. name: of what is exchanged, for messages. in_host: by unit, whether
  // this rank has it in host memory at the exchange. Throws where GPUs cannot read each other's memory.
  // Returns, by unit, whether it is exchanged on the GPUs.
  std::vector<bool> share(const std::string& name, const std::vector<bool>& in_host);
  bool is_on_gpus(UnitId unit) const { return on_gpus_[unit]; }
  // Whether Call::given may be narrower than Call::type.
  bool takes_narrow(UnitId unit) const {
    return is_on_gpus(unit) ||
           (in_host_.memory.is_shared() && in_host_.room.narrow > 0 && ranks_->partitioned(unit));
  }

  // `done` is called once every copy back to the GPU is queued: on a thread of this class, or at once where
  // the call has no elements. REQUIRES: until then no other work is queued with that memory.
  void add(Call call, Done done);

 private:
  // The parts of one place: elements at full width, then narrow input of this rank, or, on GPUs, squares.
  struct Room {
    std::size_t wide = 0, narrow = 0, squares = 0;  // bytes
    std::size_t all() const { return wide + narrow + squares; }
  };
  static Room room_in_host(const Layout& layout, Of of, bool may_share);
  static Room room_on_gpus(const Layout& layout, Of of, bool by_nccl);
  // A rank begins a piece only when it has completed the one `pieces` before, for which all ranks had begun
  // that one. So when a place is used again after twice as many pieces, no rank still reads it.
  static std::size_t places(Pace pace) { return 2 * pace.pieces; }
  template <class Memory>
  struct Places {
    Pace pace;
    Room room;
    Memory memory = {};
    std::size_t added = 0;      // pieces
    std::size_t under_way = 0;  // in flight: from leave() to the end of come_back()
    std::size_t bytes() const { return places(pace) * room.all(); }
    std::byte* at(std::size_t number) const { return memory.data() + number % places(pace) * room.all(); }
  };
  struct Added {
    Call call;
    Done done;
    bool on_gpus;
    std::size_t pieces_left;
    ElementRange shifted;      // whose results lie elsewhere until the last stripe has come,
    std::size_t shift;         // so many elements behind their place
    std::exception_ptr error;  // of the first piece that failed
  };
  struct Piece {
    std::shared_ptr<Added> of;
    Stripe stripe;
    std::size_t number = 0;  // in the order of its place
    std::shared_ptr<TransferGroup> ranks;
    std::shared_ptr<const Ranks::Types> types = {};  // of each rank's input
  };
  std::vector<Stripe> stripes(const Call& call, std::size_t most) const;
  void leave(const std::shared_ptr<Piece>& piece);
  void leave_in_host(Piece& piece);
  void leave_on_gpu(Piece& piece);
  // Returns each rank's part of a stripe: its shard's, or a share of a unit that is not partitioned.
  std::vector<Stripe::Part> shares(const Piece& piece) const;
  void sum_by_nccl(const Piece& piece);
  void gather_by_nccl(const Piece& piece);
  void take_turn(const Piece& piece, const std::function<void()>& queue);
  void come_back(const Piece& piece);
  void come_back_from_host(const Piece& piece);
  void come_back_from_gpus(const Piece& piece);
  void make_from_peers(const Piece& piece);
  void give_squares(const Piece& piece);
  void shift_back(const Added& added);
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
  // Where other ranks read this rank's input, unless they read it in the unit's own memory.
  std::byte* given(const Piece& piece) const {
    return begin_of_place(piece) + (is_narrow(piece) && !piece.of->on_gpus ? in_host_.room.wide : 0);
  }
  // Where results of these elements lie until the last stripe has come.
  static Array results(const Added& added, ElementRange elements) {
    const Dtype type = added.call.type;
    const bool shifted = added.shifted.begin <= elements.begin && elements.begin < added.shifted.end;
    return {added.call.data + (elements.begin + (shifted ? added.shift : 0)) * size_of(type), type};
  }
  bool is_shared(const Piece& piece) const { return in_host_.memory.is_shared() && piece.of->call.may_share; }
  std::vector<ConstArray> of_ranks(const Piece& piece, const Stripe::Part& part) const;
  // Calls copy(memory of the unit, memory of the place) for what the stripe has of Call::out, and of
  // Call::in.
  template <class Copy>
  void for_each_out(const Piece& piece, const Copy& copy) const;
  template <class Copy>
  void for_each_in(const Piece& piece, const Copy& copy) const;
  // A part's elements in host memory, on which the collective works.
  Array array_of(const Piece& piece, const Stripe::Part& part) const {
    if (piece.of->call.in_host) return results(*piece.of, part.elements);
    return Array{begin_of_place(piece), piece.of->call.type}.at(part.at);
  }
  Array given_array(const Piece& piece, const Stripe::Part& part) const {
    return Array{given(piece), piece.of->call.given}.at(part.at);
  }

  DeviceWork& gpu_;
  Threads& threads_;
  const Of of_;
  const Meeting meeting_;
  const ByNccl by_nccl_;
  Places<RankMemory> in_host_;
  Places<PeerMemory> on_gpus_places_;
  RegisteredRegion squares_;   // host copies of the squares in the places on the GPU
  std::vector<bool> on_gpus_;  // by unit
  Ranks* ranks_ = nullptr;
  std::mutex mutex_;  // guards what follows, and errors
  std::condition_variable has_room_;
  std::optional<SerialQueue> out_, in_;
};

// Copies elements of one rank's shard into `array` from that rank's memory, unless it is this rank, or
// messages have brought them: see DeviceRanks::Call::end.
void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, Threads& threads);
// Queues the same copies on the GPU: see DeviceRanks::Call::make.
void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, DeviceWork& gpu);

}  // namespace sluice::engine
