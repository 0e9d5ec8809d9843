#include "models/model/message_neighbours.h"

#include <string>

#include "core/error.h"
#include "engine/ranks/call_id.h"

namespace sluice::models {

MessageNeighbours::MessageNeighbours(comm::Communicator& sections, std::function<void()> meanwhile)
    : sections_(sections), meanwhile_(std::move(meanwhile)) {}

// Messages between two sections are told apart by their direction, and those of one come in order.
void MessageNeighbours::begin(const engine::Action& message, std::span<std::byte> bytes) {
  using Kind = engine::Action::Kind;
  static const std::uint64_t kId = engine::call_id("what sections of a pipeline give each other");
  const int before = sections_.rank() - 1, after = sections_.rank() + 1;
  const auto [at, is_new] = under_way_.try_emplace({message.kind, message.item});
  ensure(is_new, "a message of item {} is begun again before it has ended", message.item);
  const auto name = [&](const char* what) { return fmt::format("the {} of item {}", what, message.item); };
  Done done = at->second.add();
  switch (message.kind) {
    case Kind::kReceiveInput:
      return sections_.receive(before, kId, name("input"), bytes, std::move(done));
    case Kind::kSendOutput:
      return sections_.send(after, kId, name("output"), bytes, std::move(done));
    case Kind::kReceiveGradient:
      return sections_.receive(after, kId, name("output's gradient"), bytes, std::move(done));
    case Kind::kSendGradient:
      return sections_.send(before, kId, name("input's gradient"), bytes, std::move(done));
    default:
      fail(ErrorCode::kInternal, "a pass of item {} is no message", message.item);
  }
}

void MessageNeighbours::await(const engine::Action& message) {
  const auto at = under_way_.find({message.kind, message.item});
  ensure(at != under_way_.end(), "a message of item {} is awaited and was not begun", message.item);
  at->second.wait(meanwhile_);
  under_way_.erase(at);
}

}  // namespace sluice::models
