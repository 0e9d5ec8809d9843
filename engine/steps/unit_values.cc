#include "engine/steps/unit_values.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "engine/memory/host_staging.h"
#include "kernels/elementwise.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kGrain = std::size_t{32} << 10;  // elements that are worth another thread

// Memory for a chunk of f32 values.
float* scratch_of(const ValueStreams& s) {
  return s.host != nullptr ? s.host->scratch() : s.pipeline.scratch();
}

// Returns n elements of a unit's values where the CPU can read them.
ConstArray readable(const ValueStreams& s, ConstArray values, std::size_t n) {
  return s.host != nullptr ? s.host->bring_values(values, n) : values;
}

// Keeps the slices of parameters that have the array, and makes in_chunk the position in the array.
std::vector<Slice> slices_of(const ValueStreams& s, std::vector<Slice> slices, UnitId unit, std::size_t chunk,
                             std::size_t array) {
  const StateFormat& format = s.states.format();
  std::erase_if(slices, [&](const Slice& slice) { return !format.has(array, slice.parameter); });
  for (Slice& slice : slices) slice.in_chunk = format.position(unit, chunk, array, slice.in_chunk);
  return slices;
}

void clear_padding(const std::vector<Slice>& slices, std::size_t n, float* values) {
  std::size_t end = 0;
  const auto clear_up_to = [&](std::size_t begin) { std::fill(values + end, values + begin, 0.0f); };
  for (const Slice& slice : slices) {
    clear_up_to(slice.in_chunk);
    end = slice.in_chunk + slice.count;
  }
  clear_up_to(n);
}

void encode(Threads& threads, std::size_t n, optim::CodeMap map, const float* values, optim::StatePart to) {
  auto* const codes = static_cast<std::uint8_t*>(to.values.data);
  threads.parallel_for(n, 64 * optim::kScaleBlock, [&](std::size_t begin, std::size_t end) {
    optim::encode(end - begin, map, values + begin, codes + begin, to.scales + begin / optim::kScaleBlock);
  });
}

void fill_array(const ValueStreams& s, const std::vector<Slice>& present, UnitId unit, std::size_t chunk,
                std::size_t index, std::byte* state, const UnitSource& source) {
  const StateFormat& format = s.states.format();
  const optim::StateArray& array = format.array(index);
  const optim::StatePart part = format.part(state, unit, chunk, index);
  const std::size_t n = format.position(unit, chunk, index, format.shards().chunk(unit, chunk).size());
  const std::vector<Slice> own = slices_of(s, present, unit, chunk, index);
  float* wide = array.type == Dtype::kF32 ? part.values.f32() : scratch_of(s);
  clear_padding(own, n, wide);
  for (const Slice& slice : own)
    source.state(slice.parameter, index - format.masters(), slice.first,
                 {wide + slice.in_chunk, slice.count});
  if (array.type == Dtype::kU8)
    encode(s.resources.threads, n, array.map, wide, part);
  else if (array.type != Dtype::kF32)
    kernels::convert(s.resources.threads, n, {wide, Dtype::kF32}, part.values);
}

void fill_values(const ValueStreams& s, const std::vector<Slice>& slices, std::size_t n, Array values,
                 float* masters, const UnitSource& source) {
  const bool narrow = values.type != Dtype::kF32;
  float* wide = masters != nullptr ? masters : narrow ? scratch_of(s) : values.f32();
  clear_padding(slices, n, wide);
  for (const Slice& slice : slices)
    source.values(slice.parameter, slice.first, {wide + slice.in_chunk, slice.count});
  if (narrow) kernels::convert(s.resources.threads, n, {wide, Dtype::kF32}, values);
}

void clear(Threads& threads, std::byte* state, std::size_t bytes) {
  threads.parallel_for(bytes, kGrain * sizeof(float), [&](std::size_t begin, std::size_t end) {
    std::fill(state + begin, state + end, std::byte{0});
  });
}

// is_zero: all of the state is zero already.
void fill_chunk(const ValueStreams& s, UnitId unit, std::size_t chunk, Array values, std::byte* state,
                bool is_zero, const UnitSource& source) {
  const StateFormat& format = s.states.format();
  const std::size_t n = format.shards().chunk(unit, chunk).size(), masters = format.masters();
  const std::vector<Slice> present = s.states.format().shards().slices(unit, chunk);
  // Without a source the state becomes zero, which is zero bytes in all types.
  if (!source.state && !is_zero) clear(s.resources.threads, state, format.chunk_bytes(unit, chunk));
  if (source.values)
    fill_values(s, present, n, values, format.has_master(unit) ? reinterpret_cast<float*>(state) : nullptr,
                source);
  for (std::size_t a = masters; source.state && a < s.states.arrays(unit); ++a)
    fill_array(s, present, unit, chunk, a, state, source);
}

// Fills in values whose state other ranks have. Returns the exception of the source.
std::exception_ptr fill_others(const ValueStreams& s, UnitId unit, Array values, const UnitSource& source) {
  const Shards& shards = s.states.format().shards();
  const ElementRange own = shards.here(unit);
  for (const auto& [from, until] :
       {ElementRange{0, own.begin}, ElementRange{own.end, s.layout.unit_elements(unit)}})
    for (std::size_t begin = from; begin < until; begin += shards.chunk_elements()) {
      const ElementRange part = {begin, std::min(begin + shards.chunk_elements(), until)};
      if (s.host != nullptr) s.host->begin_values();
      const Array to = s.host != nullptr ? s.host->values(values.type) : values.at(begin);
      try {
        fill_values(s, shards.slices(unit, part), part.size(), to, nullptr, source);
      } catch (...) {
        return std::current_exception();
      }
      if (s.host != nullptr) s.host->store_values(values.at(begin), part.size());
    }
  return nullptr;
}

// Returns the chunk's values in f32: in place, or widened.
const float* wide_values(const ValueStreams& s, UnitId unit, std::size_t n, ConstArray values,
                         std::byte* state) {
  if (s.states.has_master(unit)) return reinterpret_cast<const float*>(state);
  if (values.type == Dtype::kF32) return values.f32();
  kernels::convert(s.resources.threads, n, values, {scratch_of(s), Dtype::kF32});
  return scratch_of(s);
}

void drain_values(const std::vector<Slice>& slices, const float* values, const UnitSink& sink) {
  for (const Slice& slice : slices)
    sink.values(slice.parameter, slice.first, {values + slice.in_chunk, slice.count});
}

// The arrays are handed out in parallel, because a sink that computes checksums is slower than a disk.
void drain_chunk(const ValueStreams& s, const StateFormat& format, UnitId unit, std::size_t chunk,
                 ConstArray values, std::byte* state, const UnitSink& sink) {
  const std::size_t n = format.shards().chunk(unit, chunk).size(), masters = format.masters();
  const std::size_t arrays = s.states.arrays(unit);
  const std::vector<Slice> present = format.shards().slices(unit, chunk);
  if (sink.values) drain_values(present, wide_values(s, unit, n, values, state), sink);
  const auto drain_parameters = [&] {
    if (!sink.parameter) return;
    for (const Slice& slice : present)
      sink.parameter(slice.parameter, slice.first, slice.count, values.at(slice.in_chunk));
  };
  const auto drain_array = [&](std::size_t array) {
    for (const Slice& slice : present) {
      if (!format.has(array, slice.parameter)) continue;
      const optim::StatePart part = format.part(state, unit, chunk, array, slice.in_chunk);
      if (array < masters && sink.master)
        sink.master(slice.parameter, slice.first, {part.values.f32(), slice.count});
      if (array >= masters && sink.state)
        sink.state(slice.parameter, array - masters, slice.first, slice.count, part.values, part.scales);
    }
  };
  s.resources.threads.parallel_for(1 + arrays, 1, [&](std::size_t i, std::size_t) {
    if (i == 0)
      drain_parameters();
    else
      drain_array(i - 1);
  });
}

// `round` rounds to the type of the values.
template <class T, class Round>
void keep_or_replace(Threads& threads, std::size_t n, const T* values, float* masters, const Round& round) {
  threads.parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (round(masters[i]).bits != values[i].bits) masters[i] = to_f32(values[i]);
  });
}

void keep_or_replace(Threads& threads, std::size_t n, ConstArray values, float* masters) {
  if (values.type == Dtype::kBf16)
    return keep_or_replace(threads, n, values.bf16(), masters, [](float value) { return to_bf16(value); });
  keep_or_replace(threads, n, values.f16(), masters, [](float value) { return to_f16(value); });
}

}  // namespace

namespace {

std::exception_ptr load_to_gpu(const ValueStreams& s, UnitId unit, Array values, const UnitSource& source) {
  const Shards& shards = s.states.format().shards();
  const bool is_zero = s.states.begin_filling(unit);
  for (std::size_t chunk = 0; chunk < shards.chunks(unit); ++chunk) {
    const ElementRange elements = shards.chunk(unit, chunk);
    s.host->begin(unit, chunk);
    try {
      fill_chunk(s, unit, chunk, s.host->values(values.type), s.host->state(unit, chunk), is_zero, source);
    } catch (...) {
      return std::current_exception();
    }
    s.host->store_state(unit, chunk);
    if (source.values) s.host->store_values(values.at(elements.begin), elements.size());
  }
  return nullptr;
}

std::exception_ptr load_to_cpu(const ValueStreams& s, UnitId unit, Array values, const UnitSource& source) {
  const Shards& shards = s.states.format().shards();
  const bool resident = s.states.resident(unit), is_zero = s.states.begin_filling(unit);
  std::vector<TransferGroup> writes(s.pipeline.slots());
  for (std::size_t chunk = 0; chunk < shards.chunks(unit); ++chunk) {
    const std::size_t slot = resident ? 0 : chunk % writes.size();
    if (!resident) writes[slot].wait();
    std::byte* state = resident ? s.states.chunk_data(unit, chunk) : s.pipeline.slot(slot);
    try {
      fill_chunk(s, unit, chunk, values.at(shards.chunk(unit, chunk).begin), state, is_zero, source);
    } catch (...) {
      for (TransferGroup& group : writes) group.wait();
      return std::current_exception();
    }
    if (!resident)
      s.states.backing(unit).store(s.states.format().chunk_offset(unit, chunk),
                                   {state, s.states.format().chunk_bytes(unit, chunk)}, writes[slot].add());
  }
  for (TransferGroup& group : writes) group.wait();
  return nullptr;
}

}  // namespace

std::exception_ptr load_values(const ValueStreams& s, UnitId unit, Array values, const UnitSource& source,
                               bool own_alone) {
  ensure(s.pipeline.idle(), "a unit is loaded while updates are under way");
  const auto load = s.host != nullptr ? load_to_gpu : load_to_cpu;
  if (std::exception_ptr failed = load(s, unit, values, source)) return failed;
  return source.values && !own_alone ? fill_others(s, unit, values, source) : nullptr;
}

namespace {

std::vector<std::size_t> all_chunks(const ValueStreams& s, UnitId unit) {
  std::vector<std::size_t> chunks(s.states.format().shards().chunks(unit));
  std::iota(chunks.begin(), chunks.end(), std::size_t{0});
  return chunks;
}

// Calls body(chunk, state, slot) for these chunks of this rank, in order; with parameters.read the slot also
// has the chunk's parameters, where the CPU computes. Returns the exception of body.
template <class Body>
std::exception_ptr for_chunks(const ValueStreams& s, UnitId unit, const std::vector<std::size_t>& chunks,
                              const OwnParameters& parameters, const Body& body) {
  const bool resident = s.states.resident(unit);
  std::vector<TransferGroup> reads(s.pipeline.slots());
  const Shards& shards = s.states.format().shards();
  const std::size_t size = size_of(s.layout.dtype(unit));
  const auto read = [&](std::size_t i) {
    if (i >= chunks.size()) return;
    const ElementRange range = shards.chunk(unit, chunks[i]);
    if (parameters.read && s.host == nullptr)
      parameters.read((range.begin - shards.here(unit).begin) * size,
                      {s.pipeline.parameters(i % reads.size()), range.size() * size},
                      reads[i % reads.size()].add());
    if (!resident && s.host == nullptr)
      s.states.backing(unit).fetch(
          s.states.format().chunk_offset(unit, chunks[i]),
          {s.pipeline.slot(i % reads.size()), s.states.format().chunk_bytes(unit, chunks[i])},
          reads[i % reads.size()].add());
  };
  for (std::size_t i = 0; i < reads.size(); ++i) read(i);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const std::size_t slot = i % std::max<std::size_t>(1, reads.size());
    if (!reads.empty()) reads[slot].wait();
    std::byte* state = s.host != nullptr ? s.host->bring_state(unit, chunks[i])
                       : resident        ? s.states.chunk_data(unit, chunks[i])
                                         : s.pipeline.slot(slot);
    try {
      body(chunks[i], state, slot);
    } catch (...) {
      for (TransferGroup& group : reads) group.wait();
      return std::current_exception();
    }
    read(i + reads.size());
  }
  return nullptr;
}

// Drains the chunks of another rank, which sends their state, or is read.
std::exception_ptr drain_rank(const ValueStreams& s, int rank, UnitId unit, ConstArray values,
                              const UnitSink& sink) {
  const StateFormat& format = (*s.formats)[static_cast<std::size_t>(rank)];
  for (std::size_t chunk = 0; chunk < format.shards().chunks(unit); ++chunk) {
    std::byte* const state = s.host != nullptr ? s.host->room() : s.pipeline.slot(0);
    const std::span<std::byte> bytes{state, format.chunk_bytes(unit, chunk)};
    try {
      if (s.changes)
        s.ranks->read_state(rank, {.unit = unit, .chunk = chunk, .changes = *s.changes}, bytes);
      else
        s.ranks->receive_state(rank, unit, chunk, bytes);
    } catch (const StateRefused&) {
      return std::current_exception();
    }
    const ElementRange elements = format.shards().chunk(unit, chunk);
    const ConstArray here = readable(s, values.at(elements.begin), elements.size());
    try {
      drain_chunk(s, format, unit, chunk, here, state, sink);
    } catch (...) {
      return std::current_exception();
    }
  }
  return nullptr;
}

// Reads some elements of this rank's shard to where the CPU can read them, beside a GPU.
ConstArray read_to_host(const ValueStreams& s, UnitId unit, ElementRange elements,
                        const OwnParameters& parameters) {
  const Array values = s.host->values(s.layout.dtype(unit));
  const std::size_t size = size_of(values.type);
  s.host->begin_values();
  TransferGroup read;
  parameters.read((elements.begin - s.states.format().shards().here(unit).begin) * size,
                  {static_cast<std::byte*>(values.data), elements.size() * size}, read.add());
  read.wait();
  return values;
}

}  // namespace

std::exception_ptr save_values(const ValueStreams& s, UnitId unit, ConstArray values, const UnitSink& sink) {
  ensure(s.pipeline.idle(), "a unit is saved while updates are under way");
  const StateFormat& format = s.states.format();
  const bool sends = s.ranks != nullptr && s.ranks->rank() > 0;
  const auto chunks = all_chunks(s, unit);
  const auto values_of = [&](std::size_t chunk) {
    const ElementRange elements = format.shards().chunk(unit, chunk);
    return readable(s, values.at(elements.begin), elements.size());
  };
  std::exception_ptr failed =
      for_chunks(s, unit, chunks, {}, [&](std::size_t chunk, std::byte* state, std::size_t) {
        if (sends)
          s.ranks->send_state(unit, chunk, {state, format.chunk_bytes(unit, chunk)});
        else
          drain_chunk(s, format, unit, chunk, values_of(chunk), state, sink);
      });
  const int others = s.ranks == nullptr || sends ? 1 : s.ranks->size();
  for (int rank = 1; rank < others && failed == nullptr; ++rank)
    failed = drain_rank(s, rank, unit, values, sink);
  return failed;
}

std::exception_ptr save_chunk(const ValueStreams& s, UnitId unit, std::size_t chunk,
                              const std::function<void(std::span<const std::byte>)>& state) {
  return for_chunks(s, unit, {chunk}, {}, [&](std::size_t, const std::byte* bytes, std::size_t) {
    state({bytes, s.states.format().chunk_bytes(unit, chunk)});
  });
}

std::exception_ptr save_wanted_parameters(const ValueStreams& s, UnitId unit, ConstArray values,
                                          const UnitSink& sink, const WantedElements& wanted) {
  const Shards& shards = s.states.format().shards();
  const std::size_t elements = s.layout.unit_elements(unit), most = shards.chunk_elements();
  try {
    for (std::size_t begin = 0; begin < elements; begin += most) {
      const ElementRange part = {begin, std::min(begin + most, elements)};
      if (!wanted.parameters(part)) continue;
      const ConstArray here = readable(s, values.at(begin), part.size());
      for (const Slice& slice : shards.slices(unit, part))
        sink.parameter(slice.parameter, slice.first, slice.count, here.at(slice.in_chunk));
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr save_own_chunks(const ValueStreams& s, UnitId unit, const OwnParameters& parameters,
                                   const UnitSink& sink, const WantedElements& wanted) {
  ensure(s.pipeline.idle(), "a unit is saved while updates are under way");
  const StateFormat& format = s.states.format();
  UnitSink own = sink;
  own.values = nullptr;
  if (!parameters.any()) own.parameter = nullptr;
  std::vector<std::size_t> chunks = all_chunks(s, unit);
  std::erase_if(chunks, [&](std::size_t chunk) {
    const ElementRange range = format.shards().chunk(unit, chunk);
    return !wanted.state(range) && (!parameters.any() || !wanted.parameters(range));
  });
  const std::size_t first = format.shards().here(unit).begin;
  const auto drain = [&](std::size_t chunk, std::byte* state, std::size_t slot) {
    ConstArray values = parameters.shard;
    if (parameters.read && s.host != nullptr)
      values = read_to_host(s, unit, format.shards().chunk(unit, chunk), parameters);
    else if (parameters.read)
      values = {s.pipeline.parameters(slot), s.layout.dtype(unit)};
    else if (values.data != nullptr)
      values = values.at(format.shards().chunk(unit, chunk).begin - first);
    if (parameters.on_gpu) values = readable(s, values, format.shards().chunk(unit, chunk).size());
    drain_chunk(s, format, unit, chunk, values, state, own);
  };
  return for_chunks(s, unit, chunks, parameters, drain);
}

std::exception_ptr save_parameters(const ValueStreams& s, UnitId unit, ConstArray values,
                                   const UnitSink& sink) {
  ensure(s.pipeline.idle(), "a unit is saved while updates are under way");
  const Shards& shards = s.states.format().shards();
  const std::size_t elements = s.layout.unit_elements(unit), most = shards.chunk_elements();
  try {
    for (std::size_t begin = 0; begin < elements; begin += most) {
      const ElementRange part = {begin, std::min(begin + most, elements)};
      const ConstArray here = readable(s, values.at(begin), part.size());
      const float* wide = here.f32();
      if (values.type != Dtype::kF32) {
        wide = scratch_of(s);
        kernels::convert(s.resources.threads, part.size(), here, {scratch_of(s), Dtype::kF32});
      }
      drain_values(shards.slices(unit, part), wide, sink);
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void take_masters(const ValueStreams& s, UnitId unit, ConstArray values) {
  ensure(s.pipeline.idle(), "a unit's masters are taken while updates are under way");
  const Shards& shards = s.states.format().shards();
  const bool resident = s.states.resident(unit);
  for (std::size_t chunk = 0; s.host != nullptr && chunk < shards.chunks(unit); ++chunk) {
    const ElementRange elements = shards.chunk(unit, chunk);
    std::byte* const state = s.host->bring_state(unit, chunk);
    const ConstArray edited = s.host->bring_values(values.at(elements.begin), elements.size());
    keep_or_replace(s.resources.threads, elements.size(), edited, reinterpret_cast<float*>(state));
    s.host->store_state(unit, chunk);
  }
  for (std::size_t chunk = 0; s.host == nullptr && chunk < shards.chunks(unit); ++chunk) {
    std::byte* state = resident ? s.states.chunk_data(unit, chunk) : s.pipeline.slot(0);
    const std::span<std::byte> bytes = {state, s.states.format().chunk_bytes(unit, chunk)};
    const auto transfer = [&](auto&& begin) {
      if (resident) return;
      TransferGroup group;
      begin(group.add());
      group.wait();
    };
    const std::size_t offset = s.states.format().chunk_offset(unit, chunk);
    transfer([&](auto done) { s.states.backing(unit).fetch(offset, bytes, std::move(done)); });
    keep_or_replace(s.resources.threads, shards.chunk(unit, chunk).size(),
                    values.at(shards.chunk(unit, chunk).begin), reinterpret_cast<float*>(state));
    transfer([&](auto done) { s.states.backing(unit).store(offset, bytes, std::move(done)); });
  }
}

}  // namespace sluice::engine
