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
  return fmt::format("the {} of item {}", what, message.item);
}

}  // namespace

MessageNeighbours::MessageNeighbours(comm::Communicator& sections, Trace* trace,
                                     std::function<void()> meanwhile)
    : sections_(sections), trace_(trace), waits_(trace), meanwhile_(std::move(meanwhile)) {}

// Messages between two sections are told apart by their direction, and those of one come in order.
void MessageNeighbours::begin(const engine::Action& message, std::span<std::byte> bytes) {
  using Kind = engine::Action::Kind;
  static const std::uint64_t kId = engine::call_id("what sections of a pipeline give each other");
  const int before = sections_.rank() - 1, after = sections_.rank() + 1;
  const auto [at, is_new] = under_way_.try_emplace({message.kind, message.item});
  ensure(is_new, "a message of item {} is begun again before it has ended", message.item);
  const std::string name = name_of(message);
  Done done = [this, name, size = bytes.size(), begin = Trace::Clock::now(),
               ended = at->second.add()](std::exception_ptr error) {
    if (trace_ != nullptr) trace_->add(Trace::Lane::kMessage, name, begin, Trace::Clock::now(), size);
    ended(std::move(error));
  };
  switch (message.kind) {
    case Kind::kReceiveInput:
      return sections_.receive(before, kId, name, bytes, std::move(done));
    case Kind::kSendOutput:
      return sections_.send(after, kId, name, bytes, std::move(done));
    case Kind::kReceiveGradient:
      return sections_.receive(after, kId, name, bytes, std::move(done));
    case Kind::kSendGradient:
      return sections_.send(before, kId, name, bytes, std::move(done));
    default:
      fail(ErrorCode::kInternal, "a pass of item {} is no message", message.item);
  }
}

void MessageNeighbours::await(const engine::Action& message) {
  const auto at = under_way_.find({message.kind, message.item});
  ensure(at != under_way_.end(), "a message of item {} is awaited and was not begun", message.item);
  waits_.during(engine::Waits::For::kRanks, name_of(message), [&] { at->second.wait(meanwhile_); });
  under_way_.erase(at);
}

}  // namespace sluice::models
