#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "allocator/ledger.h"
#include "core/device.h"
#include "engine/layout/tier.h"

namespace sluice::engine {

// Queues an engine's work on a GPU and orders it. Units are copied in on one stream, copied out on another
// and updated on a third, whose chunks are copied in and out on two more; numbers are copied out on a stream
// of their own; three streams serve what GPUs of several ranks copy and read of each other; the client
// computes on its own streams. Each piece of memory remembers the work that wrote it last and the last that
// read it on each stream. The stream that uses a piece next waits for these by events, so that the caller
// need not wait. A stream waits only once for a point (Place) of another stream and all before it. Thread
// rule: one thread, and others that copy in and out and wait, as DeviceDisk does; two of them must not use
// one piece at a time, unless both read it, or on one stream.
class DeviceWork {
 public:
  using Memory = std::span<const std::byte>;  // GPU memory, or registered host memory
  enum class Use : std::uint8_t { kRead, kWrite };
  // The kind of a copy, which chooses its stream. The update of a unit occupies the link for tens of
  // milliseconds, chunk by chunk (kChunks): a gradient for which the CPU waits, or a unit for which the
  // client waits, must not queue behind that. A number that the caller reads (kNumbers) is ready only when
  // the client has computed it: other copies would wait behind it, and on the client's stream its copy would
  // delay the client. Shards that this GPU brings for others (PassedShards), or copies from others' places
  // (kPassed), have streams of their own, so that nobody waits there for what the client computes.
  enum class Flow : std::uint8_t { kUnits, kChunks, kNumbers, kPassed };

  explicit DeviceWork(Device& device);  // the device outlives it
  ~DeviceWork();                        // REQUIRES: finish() was called, or nothing was queued
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  Device& device() const { return device_; }
  CUstream_st* in() const { return in_.get(); }
  CUstream_st* out() const { return out_.get(); }
  CUstream_st* updates() const { return updates_.get(); }
  CUstream_st* numbers() const { return numbers_.get(); }
  // For the reads of other ranks' GPU memory.
  CUstream_st* ranks() const { return ranks_.get(); }
  // All streams of this class: the ones above, and those of chunks and of passed shards.
  static constexpr std::size_t kStreams = 9;
  std::array<CUstream_st*, kStreams> streams() const {
    return {in(),      out(),   chunks_in_.get(), chunks_out_.get(), numbers(),
            updates(), ranks(), brought_.get(),   borrowed_.get()};
  }
  // Sets the client's stream; at first it is one of this class's own. The new stream first waits for all work
  // of the old one, so that it stands for all earlier work and the old stream may be destroyed. REQUIRES: a
  // client that uses several streams orders its work on them itself.
  void set_client(CUstream_st* stream);
  CUstream_st* client() const { return client_; }

  // Adds memory for work to use, in pieces of piece_bytes, each of which is ordered by itself.
  void add(Memory memory, std::size_t piece_bytes);

  // Work queued on the stream between the two calls uses the memory, which lies in pieces that were added.
  void begin(CUstream_st* stream, Memory memory, Use use);
  void end(CUstream_st* stream, Memory memory, Use use);
  // Queues work that reads some memory and writes other memory.
  template <class Work>
  void queue(CUstream_st* stream, std::span<const Memory> read, std::span<const Memory> written,
             Work&& work) {
    const std::lock_guard turn(turn_of(stream));
    for (const Memory& memory : read) begin_use(stream, memory, Use::kRead);
    for (const Memory& memory : written) begin_use(stream, memory, Use::kWrite);
    std::forward<Work>(work)();
    const Place place = record(stream);
    for (const Memory& memory : read) end_use(place, memory, Use::kRead);
    for (const Memory& memory : written) end_use(place, memory, Use::kWrite);
  }
  void copy_in(std::byte* to, Memory from, Flow flow = Flow::kUnits);
  void copy_out(std::byte* to, Memory from, Flow flow = Flow::kUnits);
  // Copies from memory of this GPU, or of a peer that it can read, to memory of this GPU.
  void copy_within(std::byte* to, Memory from, Flow flow = Flow::kUnits);

  // wait() blocks the caller until it may use the memory itself; is_done() asks whether it may.
  void wait(Memory memory, Use use);
  bool is_done(Memory memory, Use use) const { return unfinished(memory, use).empty(); }
  // The memory will be used otherwise, or by others. Returns the events that end its last uses so far; later
  // work does not wait for them. REQUIRES: `memory` is whole pieces, and each use of it that has begun has
  // ended.
  std::vector<Device::SharedEvent> give_up(Memory memory);
  // Blocks until all queued work is done, the client's too; where the client's stream is being captured, only
  // its work with memory that was added and not given up since.
  void wait_for_all();
  // The same at shutdown. Errors were reported where the work was queued, or nobody is left to hear of them,
  // so they are only logged.
  void finish() noexcept;

 private:
  // A point of a stream: after all work queued there before it, with the event recorded at it.
  struct Place {
    CUstream_st* stream = nullptr;  // null: there is none
    std::uint64_t number = 0;       // ascends within a stream
    Device::SharedEvent event;
  };
  // Events that nobody waits for any more, for reuse.
  struct Spare {
    std::mutex mutex;
    std::vector<Device::Event> events;
  };
  struct Piece {
    std::size_t bytes = 0;
    Place written;
    std::vector<Place> read;  // each on a stream of its own
  };
  template <class Pieces, class Body>
  static void for_each(Pieces& pieces, Memory memory, const Body& body);
  // The points after which such a use of the memory may run.
  std::vector<Place> uses_before(Memory memory, Use use) const;
  // The events for which the caller would have to block. An event is not recorded again while somebody refers
  // to it.
  std::vector<Device::SharedEvent> unfinished(Memory memory, Use use) const;
  std::mutex& turn_of(CUstream_st* stream);
  void wait_for_client();
  void begin_use(CUstream_st* stream, Memory memory, Use use);
  void end_use(const Place& place, Memory memory, Use use);
  void wait_for(CUstream_st* stream, const Place& place);
  Place record(CUstream_st* stream);

  Device& device_;
  Device::Stream in_, out_, chunks_in_, chunks_out_, numbers_, updates_, ranks_, brought_, borrowed_,
      own_client_;
  CUstream_st* client_;
  Device::Event before_client_;  // recorded on the last former stream of the client
  // By stream, the client's last: held while work is queued on the stream. The driver may block a caller
  // where much is queued, and callers that use other streams must not be blocked by that.
  std::array<std::mutex, kStreams + 1> turns_;
  mutable std::mutex mutex_;                      // guards what follows; not held during calls of the driver
  std::map<const std::byte*, Piece> pieces_;      // by address
  std::map<CUstream_st*, std::uint64_t> places_;  // by stream, the number of its last place
  // By (waiting stream, other stream): the last place of the other one for which the first has waited.
  std::map<std::pair<CUstream_st*, CUstream_st*>, std::uint64_t> waited_;
  const std::shared_ptr<Spare> spare_ = std::make_shared<Spare>();
};

// The tier that is computed on. gpu: null where the CPU computes.
inline allocator::Tier tier_of(const DeviceWork* gpu) {
  return gpu == nullptr ? kCpuTier : allocator::Tier::kDevice;
}

}  // namespace sluice::engine
