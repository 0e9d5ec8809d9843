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

// What an engine queues on a GPU, and in which order the GPU does it. Work is queued on several streams:
// units come in on one, go out on another, and are updated on a third, whose chunks come in and go out on two
// more; numbers go out on one of their own; what ranks read of each other's GPUs is on another one; and the
// client computes on streams of its own. Each piece of memory remembers the last work that wrote it, and the
// last that read it on each stream. Who uses a piece next waits for these on its own stream, so that the
// caller need not wait. A stream that has waited for a place of another one waits for no earlier place of it.
// Thread rule: one thread, and others that copy in and out and wait, as DeviceDisk does; two of them do not
// use one piece at a time, unless both read it, or on one stream.
class DeviceWork {
 public:
  using Memory = std::span<const std::byte>;  // of the GPU's, or of registered memory of the host
  enum class Use : std::uint8_t { kRead, kWrite };
  // What copies are of. A unit that the GPU updates takes the link for tens of milliseconds, chunk by chunk:
  // gradients that the CPU waits for, and units that the client does, go beside that, and not behind. A
  // number that the caller reads is there when the client has computed it: other copies would wait behind it
  // for that, and the client would wait where it is copied among what the client computes.
  // The shards that this GPU brings for others (PassedShards) come in beside all that, too, and so do those
  // that it copies from others' places: nobody is to wait there for what the client computes.
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
  // For what GPUs of several ranks read of each other.
  CUstream_st* ranks() const { return ranks_.get(); }
  // All of its own: these, and those of chunks.
  static constexpr std::size_t kStreams = 9;
  std::array<CUstream_st*, kStreams> streams() const {
    return {in(),      out(),   chunks_in_.get(), chunks_out_.get(), numbers(),
            updates(), ranks(), brought_.get(),   borrowed_.get()};
  }
  // The stream on which the client computes from now on: at first one that is made for it. It goes on when
  // all is done that the one before has, so that this stands for all that came before it, which may end.
  // REQUIRES: the client orders what it queues on several streams itself.
  void set_client(CUstream_st* stream);
  CUstream_st* client() const { return client_; }

  // Memory that work may use, from now on, in pieces of so many bytes, of which each has an order of its own.
  void add(Memory memory, std::size_t piece_bytes);

  // What is queued on the stream between the two calls uses the memory, which lies in pieces that were added.
  void begin(CUstream_st* stream, Memory memory, Use use);
  void end(CUstream_st* stream, Memory memory, Use use);
  // Queues work that reads some memory, and writes other memory.
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
  // From memory of this GPU, or of another one that this reads, to memory of this one. Units come in so, too.
  void copy_within(std::byte* to, Memory from, Flow flow = Flow::kUnits);

  // The caller waits until it may use the memory itself; or asks whether it may.
  void wait(Memory memory, Use use);
  bool is_done(Memory memory, Use use) const { return unfinished(memory, use).empty(); }
  // The memory has other uses from now on, or is others'. Returns what its last uses so far have ended with,
  // and what comes next waits for none of it. REQUIRES: it is whole pieces, and nothing has begun to use it
  // that has not ended.
  std::vector<Device::SharedEvent> give_up(Memory memory);
  // The caller waits for everything that is queued, by the client, too; or, while its stream is captured, for
  // what it has queued with memory that was added, and was not given up since.
  void wait_for_all();
  // The same at the end. What fails was reported where it was queued, or has no one left to be told.
  void finish() noexcept;

 private:
  // A place of a stream: what was queued before it, and the event that comes after that.
  struct Place {
    CUstream_st* stream = nullptr;  // null: there is none
    std::uint64_t number = 0;       // places of a stream ascend
    Device::SharedEvent event;
  };
  // Events that nobody waits for any more.
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
  // What who uses the memory so comes after.
  std::vector<Place> uses_before(Memory memory, Use use) const;
  // What the caller would have to wait for. An event is not recorded again while somebody has it.
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
  Device::Event before_client_;  // what the client's streams before this one had
  // Of each stream, the client's last: is held while something is queued there. The driver lets a caller wait
  // where much is queued on a stream, and nobody else may have to wait for that.
  std::array<std::mutex, kStreams + 1> turns_;
  mutable std::mutex mutex_;                      // guards what follows; the driver is not called meanwhile
  std::map<const std::byte*, Piece> pieces_;      // by their beginnings
  std::map<CUstream_st*, std::uint64_t> places_;  // of each stream, the number of the last one
  // The last place of the second stream that the first one has waited for.
  std::map<std::pair<CUstream_st*, CUstream_st*>, std::uint64_t> waited_;
  const std::shared_ptr<Spare> spare_ = std::make_shared<Spare>();
};

// The tier that is computed on. gpu: null where the CPU computes.
inline allocator::Tier tier_of(const DeviceWork* gpu) {
  return gpu == nullptr ? kCpuTier : allocator::Tier::kDevice;
}

}  // namespace sluice::engine
