#include "engine/memory/device_work.h"

#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "core/log.h"

namespace sluice::engine {

DeviceWork::DeviceWork(Device& device)
    : device_(device),
      in_(device.make_stream(true)),
      out_(device.make_stream(false)),
      chunks_in_(device.make_stream(false)),
      chunks_out_(device.make_stream(false)),
      numbers_(device.make_stream(true)),
      updates_(device.make_stream(false)),
      ranks_(device.make_stream(true)),
      brought_(device.make_stream(true)),
      borrowed_(device.make_stream(true)),
      own_client_(device.make_stream(false)),
      client_(own_client_.get()),
      before_client_(device.make_event(false)) {}

DeviceWork::~DeviceWork() = default;

void DeviceWork::set_client(CUstream_st* stream) {
  if (stream == client_) return;
  device_.record(before_client_.get(), client_);
  device_.wait(stream, before_client_.get());
  client_ = stream;
  const std::lock_guard lock(mutex_);
  // `stream` may be a new stream at the address of a destroyed one.
  std::erase_if(waited_, [&](const auto& waited) { return waited.first.first == stream; });
}

void DeviceWork::add(Memory memory, std::size_t piece_bytes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t at = 0; at < memory.size(); at += piece_bytes)
    pieces_[memory.data() + at].bytes = std::min(piece_bytes, memory.size() - at);
}

template <class Pieces, class Body>
void DeviceWork::for_each(Pieces& pieces, Memory memory, const Body& body) {
  auto piece = pieces.upper_bound(memory.data());
  ensure(piece != pieces.begin(), "memory is used on a GPU that the engine does not have");
  const std::byte* at = memory.data();
  for (--piece; at < memory.data() + memory.size(); ++piece) {
    ensure(piece != pieces.end() && piece->first <= at && at < piece->first + piece->second.bytes,
           "memory is used on a GPU that the engine does not have");
    body(piece->second);
    at = piece->first + piece->second.bytes;
  }
}

std::vector<DeviceWork::Place> DeviceWork::uses_before(Memory memory, Use use) const {
  const std::lock_guard lock(mutex_);
  std::vector<Place> places;
  const auto note = [&](const Place& place) {
    if (place.stream == nullptr) return;
    const auto same = std::ranges::find(places, place.stream, &Place::stream);
    if (same == places.end())
      places.push_back(place);
    else if (same->number < place.number)
      *same = place;
  };
  for_each(pieces_, memory, [&](const Piece& piece) {
    note(piece.written);
    for (const Place& place : piece.read)
      if (use == Use::kWrite) note(place);
  });
  return places;
}

std::mutex& DeviceWork::turn_of(CUstream_st* stream) {
  const std::array<CUstream_st*, kStreams> own = streams();
  return turns_[static_cast<std::size_t>(std::ranges::find(own, stream) - own.begin())];
}

void DeviceWork::wait_for(CUstream_st* stream, const Place& place) {
  if (place.stream == stream) return;
  const auto last = [&]() -> std::uint64_t& { return waited_[{stream, place.stream}]; };
  {
    const std::lock_guard lock(mutex_);
    if (place.number <= last()) return;
  }
  device_.wait(stream, place.event.get());
  const std::lock_guard lock(mutex_);
  last() = std::max(last(), place.number);
}

// An event serves one place, and is reused when nothing refers to that place any more.
DeviceWork::Place DeviceWork::record(CUstream_st* stream) {
  Device::Event event;
  {
    const std::lock_guard lock(spare_->mutex);
    if (!spare_->events.empty()) {
      event = std::move(spare_->events.back());
      spare_->events.pop_back();
    }
  }
  if (event == nullptr) event = device_.make_event(false);
  device_.record(event.get(), stream);
  const auto give_back = [spare = spare_, end = event.get_deleter()](CUevent_st* done) {
    const std::lock_guard lock(spare->mutex);
    spare->events.emplace_back(done, end);
  };
  const std::lock_guard lock(mutex_);
  return {stream, ++places_[stream], Device::SharedEvent(event.release(), give_back)};
}

void DeviceWork::begin_use(CUstream_st* stream, Memory memory, Use use) {
  for (const Place& place : uses_before(memory, use)) wait_for(stream, place);
}

// A writer has waited for all readers, so that work which waits for the write need not wait for them.
void DeviceWork::end_use(const Place& place, Memory memory, Use use) {
  const std::lock_guard lock(mutex_);
  for_each(pieces_, memory, [&](Piece& piece) {
    if (use == Use::kWrite) {
      piece.written = place;
      piece.read.clear();
      return;
    }
    const auto own = std::ranges::find(piece.read, place.stream, &Place::stream);
    if (own == piece.read.end())
      piece.read.push_back(place);
    else
      *own = place;
  });
}

void DeviceWork::begin(CUstream_st* stream, Memory memory, Use use) {
  const std::lock_guard turn(turn_of(stream));
  begin_use(stream, memory, use);
}

void DeviceWork::end(CUstream_st* stream, Memory memory, Use use) {
  const std::lock_guard turn(turn_of(stream));
  end_use(record(stream), memory, use);
}

void DeviceWork::copy_in(std::byte* to, Memory from, Flow flow) {
  const Memory written = {to, from.size()};
  CUstream_st* const stream = flow == Flow::kChunks   ? chunks_in_.get()
                              : flow == Flow::kPassed ? brought_.get()
                                                      : in();
  queue(stream, {&from, 1}, {&written, 1},
        [&] { device_.copy_in(stream, reinterpret_cast<DeviceAddress>(to), from.data(), from.size()); });
}

void DeviceWork::copy_within(std::byte* to, Memory from, Flow flow) {
  const Memory written = {to, from.size()};
  CUstream_st* const stream = flow == Flow::kPassed ? borrowed_.get() : in();
  queue(stream, {&from, 1}, {&written, 1}, [&] {
    device_.copy(stream, reinterpret_cast<DeviceAddress>(to), reinterpret_cast<DeviceAddress>(from.data()),
                 from.size());
  });
}

void DeviceWork::copy_out(std::byte* to, Memory from, Flow flow) {
  const Memory written = {to, from.size()};
  CUstream_st* const stream = flow == Flow::kChunks    ? chunks_out_.get()
                              : flow == Flow::kNumbers ? numbers()
                                                       : out();
  queue(stream, {&from, 1}, {&written, 1},
        [&] { device_.copy_out(stream, to, reinterpret_cast<DeviceAddress>(from.data()), from.size()); });
}

std::vector<Device::SharedEvent> DeviceWork::unfinished(Memory memory, Use use) const {
  std::vector<Device::SharedEvent> events;
  for (Place& place : uses_before(memory, use))
    if (!device_.is_done(place.event.get())) events.push_back(std::move(place.event));
  return events;
}

void DeviceWork::wait(Memory memory, Use use) {
  for (const Device::SharedEvent& event : unfinished(memory, use)) device_.synchronize(event.get());
}

std::vector<Device::SharedEvent> DeviceWork::give_up(Memory memory) {
  const std::lock_guard lock(mutex_);
  std::vector<Device::SharedEvent> last;
  const auto take = [&](Place& place) {
    if (place.stream != nullptr) last.push_back(std::move(place.event));
  };
  for_each(pieces_, memory, [&](Piece& piece) {
    take(piece.written);
    for (Place& place : piece.read) take(place);
    piece.written = {};
    piece.read.clear();
  });
  return last;
}

// A stream that is being captured cannot be synchronized. Its earlier uses of memory have events.
void DeviceWork::wait_for_client() {
  if (!device_.is_capturing(client_)) return device_.synchronize(client_);
  std::vector<Device::SharedEvent> events;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [begin, piece] : pieces_) {
      if (piece.written.stream == client_) events.push_back(piece.written.event);
      for (const Place& place : piece.read)
        if (place.stream == client_) events.push_back(place.event);
    }
  }
  device_.synchronize(before_client_.get());
  for (const Device::SharedEvent& event : events) device_.synchronize(event.get());
}

void DeviceWork::wait_for_all() {
  for (CUstream_st* const stream : streams()) device_.synchronize(stream);
  wait_for_client();
}

void DeviceWork::finish() noexcept {
  const auto quietly = [](const auto& wait) {
    try {
      wait();
    } catch (const Error& error) {
      log().debug("{}", error.what());
    }
  };
  for (CUstream_st* const stream : streams()) quietly([&] { device_.synchronize(stream); });
  quietly([&] { wait_for_client(); });
}

}  // namespace sluice::engine
