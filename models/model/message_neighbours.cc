#include "models/model/message_neighbours.h"

#include <string>

#include "core/error.h"
#include "engine/ranks/call_id.h"

namespace sluice::models {

namespace {

std::string name_of(const engine::Action& message) {
  using Kind = engine::Action::Kind;
  const char* const what = message.kind == Kind::kReceiveInput      ? "input"
                           : message.kind == Kind::kSendOutput      ? "output"
                           : message.kind == Kind::kReceiveGradient ? "output's gradient"
                                                                    : "input's gradient";
  return fmt::format("the {} of item {}{}", what, message.item,
                     message.chunk > 0 ? fmt::format(" in chunk {}", message.chunk) : "");
}

}  // namespace

MessageNeighbours::MessageNeighbours(comm::Communicator& sections, Trace* trace,
                                     std::function<void()> meanwhile)
    : sections_(sections), trace_(trace), waits_(trace), meanwhile_(std::move(meanwhile)) {}

// Chunk c of the last section sends its output to chunk c + 1 of the first section.
void MessageNeighbours::begin(const engine::Action& message, std::span<std::byte> bytes) {
  using Kind = engine::Action::Kind;
  static const std::uint64_t kInputs = engine::call_id("inputs of a chunk of a pipeline");
  static const std::uint64_t kGradients = engine::call_id("gradients of a chunk of a pipeline");
  const int size = sections_.size(), own = sections_.rank();
  const int before = (own + size - 1) % size, after = (own + 1) % size;
  // A message has the number of the chunk that receives it.
  const auto inputs = [](std::size_t chunk) { return kInputs + chunk; };
  const auto gradients = [](std::size_t chunk) { return kGradients + chunk; };
  const auto [at, is_new] = under_way_.try_emplace({message.kind, message.chunk, message.item});
  ensure(is_new, "a message of item {} is begun again before it has ended", message.item);
  const std::string name = name_of(message);
  Done done = [this, name, size = bytes.size(), begin = Trace::Clock::now(),
               ended = at->second.add()](std::exception_ptr error) {
    if (trace_ != nullptr) trace_->add(Trace::Lane::kMessage, name, begin, Trace::Clock::now(), size);
    ended(std::move(error));
  };
  switch (message.kind) {
    case Kind::kReceiveInput:
      return sections_.receive(before, inputs(message.chunk), name, bytes, std::move(done));
    case Kind::kSendOutput:
      return sections_.send(after, inputs(message.chunk + (after == 0 ? 1 : 0)), name, bytes,
                            std::move(done));
    case Kind::kReceiveGradient:
      return sections_.receive(after, gradients(message.chunk), name, bytes, std::move(done));
    case Kind::kSendGradient:
      return sections_.send(before, gradients(message.chunk - (own == 0 ? 1 : 0)), name, bytes,
                            std::move(done));
    default:
      fail(ErrorCode::kInternal, "a pass of item {} is no message", message.item);
  }
}

void MessageNeighbours::await(const engine::Action& message) {
  const auto at = under_way_.find({message.kind, message.chunk, message.item});
  ensure(at != under_way_.end(), "a message of item {} is awaited and was not begun", message.item);
  waits_.during(engine::Waits::For::kRanks, name_of(message), [&] { at->second.wait(meanwhile_); });
  under_way_.erase(at);
}

}  // namespace sluice::models
