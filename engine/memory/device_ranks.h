#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/transfers.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"

namespace sluice::engine {

// What ranks sum or gather of what is in their GPUs' memory. It passes through registered host memory, piece
// by piece, in the order in which it was added: while the ranks have one piece, the next one leaves the GPU,
// and the one before returns to it. A piece of one rank waits for that of the others, and there is memory for
// a few. So all ranks add the same calls in the same order. Two threads do it, one for each direction. Thread
// rule: start() first, then one thread.
class DeviceRanks {
 public:
  // A call that all ranks make. Where it has failed, nothing more of it is copied or begun.
  struct Call {
    // The elements of a unit, from its first one on: in the GPU's memory, or, in_host, in registered memory
    // of the host, in which the call is then made where they are, once the GPU does not use them.
    std::byte* data = nullptr;
    bool in_host = false;
    Dtype type = Dtype::kF32;
    ElementRange elements;              // of these, what the call is about
    std::vector<ElementRange> out, in;  // what leaves the GPU before, and returns to it after
    // Begins the call for some of the elements, of which the array has nothing else.
    std::function<void(ElementRange elements, Array array, Done done)> begin;
    // What is done with them when it has ended, before they return.
    std::function<void(ElementRange elements, Array array)> end = {};
  };

  explicit DeviceRanks(const Layout& layout, DeviceWork& gpu);
  ~DeviceRanks();  // waits until the calls that were added have ended
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;
  static constexpr std::size_t kPieces = 4;  // that may be under way
  static std::size_t piece_elements(const Layout& layout);
  static std::size_t bytes(const Layout& layout);  // of host memory
  void start(allocator::Ledger& ledger);

  // `done` is called on a thread of this class when all that returns to the GPU is queued. REQUIRES: until
  // then nothing else is queued with that memory.
  void add(Call call, Done done);

 private:
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
  // The pieces of one direction, and the thread that takes them.
  struct Lane {
    std::deque<Piece> pieces;
    bool ends = false;
    std::thread thread;
  };
  std::vector<ElementRange> pieces_of(ElementRange elements) const;
  void work_on(Lane& lane, void (DeviceRanks::*work)(Piece&));
  void leave(Piece& piece);
  void come_back(Piece& piece);
  void attempt(Piece& piece, const std::function<void()>& action);
  std::byte* host(const Piece& piece) const {
    const Call& call = piece.of->call;
    if (call.in_host) return call.data + piece.elements.begin * size_of(call.type);
    return memory_.data() + piece.number % kPieces * piece_bytes_;
  }
  // Calls copy(the GPU's memory, the host's) for what of the ranges lies within the piece.
  template <class Copy>
  void for_each(const Piece& piece, const std::vector<ElementRange>& ranges, const Copy& copy) const;
  Array array_of(const Piece& piece) const { return {host(piece), piece.of->call.type}; }

  DeviceWork& gpu_;
  const std::size_t piece_elements_, piece_bytes_;
  RegisteredRegion memory_;
  std::mutex mutex_;  // guards what follows, and errors
  std::condition_variable changed_;
  Lane out_, in_;
  std::size_t added_ = 0, under_way_ = 0;  // pieces: in all, and from leave() to the end of come_back()
};

}  // namespace sluice::engine
