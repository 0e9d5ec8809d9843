#include "engine/plan/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "core/error.h"

namespace sluice::engine {
namespace {

using Kind = Action::Kind;

constexpr std::array<const char*, 2> kOrders{"gpipe", "1f1b"};
constexpr std::array<const char*, Action::kKinds> kWords{
    "the receive of the input",    "the forward pass",  "the send of the output",
    "the receive of the gradient", "the backward pass", "the send of the gradient"};

std::string in_words(const Action& action) {
  return fmt::format("{} of item {}", kWords[static_cast<std::size_t>(action.kind)], action.item);
}

std::vector<Action> passes_of(const Pipeline& pipeline, int section) {
  const std::size_t later = static_cast<std::size_t>(pipeline.sections - section) - 1;
  const std::size_t ahead =
      pipeline.order == PipelineOrder::kGPipe ? pipeline.items : std::min(pipeline.items, later);
  std::vector<Action> passes;
  for (std::size_t i = 0; i < ahead; ++i) passes.push_back({Kind::kForward, i});
  for (std::size_t i = 0; i < pipeline.items; ++i) {
    if (ahead + i < pipeline.items) passes.push_back({Kind::kForward, ahead + i});
    passes.push_back({Kind::kBackward, i});
  }
  return passes;
}

// When a message was begun at both ends, and has come.
struct Message {
  double seconds = 0;
  std::optional<double> sent{}, received{};
  std::optional<double> came() const {
    if (!sent || !received) return std::nullopt;
    return std::max(*sent, *received) + seconds;
  }
};

class Simulation {
 public:
  Simulation(const Pipeline& pipeline, std::span<const std::vector<Action>> lists,
             std::span<const SectionSeconds> seconds)
      : pipeline_(pipeline), lists_(lists), seconds_(seconds), sections_(lists.size()) {
    for (std::size_t s = 0; s < sections_.size(); ++s) {
      sections_[s].buffers = buffers_of(pipeline, static_cast<int>(s));
      if (!is_first(s)) sections_[s].inputs.assign(pipeline.items, {seconds[s - 1].message});
      if (!is_last(s)) sections_[s].gradients.assign(pipeline.items, {seconds[s + 1].message});
    }
  }

  PipelineTime run() {
    for (bool moves = true; moves;) {
      moves = false;
      for (std::size_t s = 0; s < sections_.size(); ++s)
        while (sections_[s].next < lists_[s].size() && go_on(s)) moves = true;
    }
    check_ends();
    PipelineTime time;
    for (const Section& section : sections_) {
      time.step = std::max(time.step, section.now);
      time.busy.push_back(section.busy);
      time.held.push_back(section.most_held);
    }
    return time;
  }

 private:
  struct Section {
    PipelineBuffers buffers;
    std::size_t next = 0;  // of its list
    double now = 0, busy = 0;
    std::array<std::size_t, Action::kKinds> done{};
    std::vector<Message> inputs, gradients;  // that it receives, by item
    std::size_t most_held = 0;
  };

  bool is_first(std::size_t s) const { return s == 0; }
  bool is_last(std::size_t s) const { return s + 1 == sections_.size(); }
  std::size_t done(std::size_t s, Kind kind) const {
    return sections_[s].done[static_cast<std::size_t>(kind)];
  }

  // Refuses an action that is not due, or whose buffer still has what another one has to take out.
  void require(bool holds, std::size_t s, const Action& action, const char* what) const {
    ensure(holds, "section {} of {}: {} {}", s, sections_.size(), in_words(action), what);
  }
  void require_buffer(std::size_t s, const Action& action, std::size_t buffers, Kind emptied_by) const {
    require(action.item < done(s, emptied_by) + buffers, s, action, "has no free buffer");
  }

  // When the action may begin; nothing: it waits for what nobody has begun.
  std::optional<double> begin_of(std::size_t s, const Action& action) const {
    double begin = sections_[s].now;
    for (const Action& awaited : awaited_by(pipeline_, static_cast<int>(s), action)) {
      const std::optional<double> came = message_of(s, awaited).came();
      if (!came) return std::nullopt;
      begin = std::max(begin, *came);
    }
    return begin;
  }

  const Message& message_of(std::size_t s, const Action& action) const {
    switch (action.kind) {
      case Kind::kReceiveInput:
        return sections_[s].inputs[action.item];
      case Kind::kReceiveGradient:
        return sections_[s].gradients[action.item];
      case Kind::kSendOutput:
        return sections_[s + 1].inputs[action.item];
      default:
        return sections_[s - 1].gradients[action.item];
    }
  }

  void check(std::size_t s, const Action& action) const {
    const PipelineBuffers& buffers = sections_[s].buffers;
    require(action.item == done(s, action.kind), s, action, "does not ascend");
    require(action.item < pipeline_.items, s, action, "is of no item of the step");
    const auto follows = [&](Kind before) {
      require(action.item < done(s, before), s, action, "comes before what it is made of");
    };
    const Kind empties_border = is_first(s) ? Kind::kBackward : Kind::kSendGradient;
    switch (action.kind) {
      case Kind::kReceiveInput:
        require(!is_first(s), s, action, "comes from nowhere");
        return require_buffer(s, action, buffers.items, Kind::kBackward);
      case Kind::kForward:
        if (!is_first(s)) return follows(Kind::kReceiveInput);
        return require_buffer(s, action, buffers.items, Kind::kBackward);
      case Kind::kSendOutput:
        require(!is_last(s), s, action, "goes nowhere");
        return follows(Kind::kForward);
      case Kind::kReceiveGradient:
        require(!is_last(s), s, action, "comes from nowhere");
        return require_buffer(s, action, buffers.borders, empties_border);
      case Kind::kBackward:
        follows(Kind::kForward);
        if (!is_last(s)) return follows(Kind::kReceiveGradient);
        return require_buffer(s, action, buffers.borders, empties_border);
      case Kind::kSendGradient:
        require(!is_first(s), s, action, "goes nowhere");
        return follows(Kind::kBackward);
    }
  }

  bool go_on(std::size_t s) {
    Section& own = sections_[s];
    const Action& action = lists_[s][own.next];
    check(s, action);
    if (action.kind == Kind::kForward && !is_last(s))
      require_buffer(s, action, own.buffers.outputs, Kind::kSendOutput);
    const std::optional<double> begins = begin_of(s, action);
    if (!begins) return false;
    own.now = *begins;
    begin(s, action);
    ++own.done[static_cast<std::size_t>(action.kind)];
    own.most_held = std::max(own.most_held, done(s, Kind::kForward) - done(s, Kind::kBackward));
    ++own.next;
    return true;
  }

  void begin(std::size_t s, const Action& action) {
    Section& own = sections_[s];
    switch (action.kind) {
      case Kind::kReceiveInput:
        own.inputs[action.item].received = own.now;
        return;
      case Kind::kReceiveGradient:
        own.gradients[action.item].received = own.now;
        return;
      case Kind::kSendOutput:
        sections_[s + 1].inputs[action.item].sent = own.now;
        return;
      case Kind::kSendGradient:
        sections_[s - 1].gradients[action.item].sent = own.now;
        return;
      case Kind::kForward:
      case Kind::kBackward:
        const double seconds = action.kind == Kind::kForward ? seconds_[s].forward : seconds_[s].backward;
        own.now += seconds;
        own.busy += seconds;
    }
  }

  void check_ends() const {
    std::string waiting;
    for (std::size_t s = 0; s < sections_.size(); ++s)
      if (sections_[s].next < lists_[s].size())
        waiting += fmt::format("{}section {} has to wait before {}", waiting.empty() ? "" : "; ", s,
                               in_words(lists_[s][sections_[s].next]));
    ensure(waiting.empty(), "a pipeline of {} sections and {} items cannot go on: {}", sections_.size(),
           pipeline_.items, waiting);
    for (std::size_t s = 0; s < sections_.size(); ++s)
      for (std::size_t k = 0; k < Action::kKinds; ++k) {
        const auto kind = static_cast<Kind>(k);
        const bool is_none = (is_first(s) && (kind == Kind::kReceiveInput || kind == Kind::kSendGradient)) ||
                             (is_last(s) && (kind == Kind::kSendOutput || kind == Kind::kReceiveGradient));
        const std::size_t expected = is_none ? 0 : pipeline_.items;
        ensure(done(s, kind) == expected, "section {} of {} has {} of {} items, not of {}", s,
               sections_.size(), kWords[k], done(s, kind), expected);
      }
  }

  const Pipeline pipeline_;
  const std::span<const std::vector<Action>> lists_;
  const std::span<const SectionSeconds> seconds_;
  std::vector<Section> sections_;
};

}  // namespace

PipelineOrder pipeline_order(std::string_view word) {
  const auto found = std::ranges::find(kOrders, word);
  if (found == kOrders.end())
    fail(ErrorCode::kInvalidArgument, "'{}' is not an order of a pipeline; there are {}", word,
         fmt::join(kOrders, ", "));
  return static_cast<PipelineOrder>(found - kOrders.begin());
}
std::string_view name_of(PipelineOrder order) { return kOrders[static_cast<std::size_t>(order)]; }

// A gradient lands in one border while another one is computed with, and one more leaves.
PipelineBuffers buffers_of(const Pipeline& pipeline, int section) {
  const bool is_first = section == 0, is_last = section + 1 == pipeline.sections;
  const auto from_here = static_cast<std::size_t>(pipeline.sections - section);
  PipelineBuffers buffers;
  buffers.items =
      pipeline.order == PipelineOrder::kGPipe ? pipeline.items : std::min(pipeline.items, from_here);
  buffers.outputs = is_last ? 0 : std::min<std::size_t>(pipeline.items, 2);
  buffers.borders = std::min<std::size_t>(pipeline.items, 3 - (is_first ? 1 : 0) - (is_last ? 1 : 0));
  return buffers;
}

std::vector<Action> awaited_by(const Pipeline& pipeline, int section, const Action& action) {
  const bool is_first = section == 0, is_last = section + 1 == pipeline.sections;
  const PipelineBuffers buffers = buffers_of(pipeline, section);
  std::vector<Action> awaited;
  const auto left = [&](Kind send, std::size_t count) {
    if (action.item >= count) awaited.push_back({send, action.item - count});
  };
  if (action.kind == Kind::kForward && !is_first) awaited.push_back({Kind::kReceiveInput, action.item});
  if (action.kind == Kind::kForward && !is_last) left(Kind::kSendOutput, buffers.outputs);
  if (action.kind == Kind::kBackward && !is_last) awaited.push_back({Kind::kReceiveGradient, action.item});
  // A border is filled by the gradient that comes, or by backward where none does.
  if (action.kind == (is_last ? Kind::kBackward : Kind::kReceiveGradient) && !is_first)
    left(Kind::kSendGradient, buffers.borders);
  return awaited;
}

std::vector<Action> actions_of(const Pipeline& pipeline, int section) {
  const bool is_first = section == 0, is_last = section + 1 == pipeline.sections;
  const PipelineBuffers buffers = buffers_of(pipeline, section);
  std::vector<Action> actions;
  std::size_t inputs = 0, gradients = 0;  // received
  // A border from which a gradient is sent becomes free during the next backward pass.
  const auto receive = [&](std::size_t backward) {
    const std::size_t leaving = is_first ? 0 : std::min<std::size_t>(backward, 1);
    for (; !is_first && inputs < std::min(pipeline.items, backward + buffers.items); ++inputs)
      actions.push_back({Kind::kReceiveInput, inputs});
    for (; !is_last && gradients < std::min(pipeline.items, backward + buffers.borders - leaving);
         ++gradients)
      actions.push_back({Kind::kReceiveGradient, gradients});
  };
  receive(0);
  for (const Action& pass : passes_of(pipeline, section)) {
    actions.push_back(pass);
    if (pass.kind == Kind::kForward) {
      if (!is_last) actions.push_back({Kind::kSendOutput, pass.item});
      continue;
    }
    if (!is_first) actions.push_back({Kind::kSendGradient, pass.item});
    receive(pass.item + 1);
  }
  return actions;
}

PipelineTime simulate(const Pipeline& pipeline, std::span<const SectionSeconds> seconds) {
  std::vector<std::vector<Action>> lists;
  for (int section = 0; section < pipeline.sections; ++section)
    lists.push_back(actions_of(pipeline, section));
  return simulate(pipeline, lists, seconds);
}

PipelineTime simulate(const Pipeline& pipeline, std::span<const std::vector<Action>> lists,
                      std::span<const SectionSeconds> seconds) {
  return Simulation(pipeline, lists, seconds).run();
}

}  // namespace sluice::engine
