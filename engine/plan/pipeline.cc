#include "engine/plan/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "core/error.h"
#include "engine/plan/pipeline_clock.h"

namespace sluice::engine {
namespace {

using Kind = Action::Kind;

constexpr std::array<const char*, 3> kOrders{"gpipe", "1f1b", "zb-h1"};
constexpr std::array<const char*, Action::kKinds> kWords{
    "the receive of the input",    "the forward pass",  "the send of the output",
    "the receive of the gradient", "the backward pass", "the send of the gradient",
    "the pass for the weights"};

std::string in_words(const Pipeline& pipeline, const Action& action) {
  return fmt::format("{} of item {}{}", kWords[static_cast<std::size_t>(action.kind)], action.item,
                     pipeline.chunks > 1 ? fmt::format(" in chunk {}", action.chunk) : "");
}

bool sends(const Pipeline& pipeline, int section, const Action& pass) {
  return pass.kind == Kind::kForward ? !pipeline.ends(section, pass.chunk)
                                     : !pipeline.begins(section, pass.chunk);
}
bool receives(const Pipeline& pipeline, int section, const Action& pass) {
  return pass.kind == Kind::kForward ? !pipeline.begins(section, pass.chunk)
                                     : !pipeline.ends(section, pass.chunk);
}
Action send_of(const Action& pass) {
  return {pass.kind == Kind::kForward ? Kind::kSendOutput : Kind::kSendGradient, pass.item, pass.chunk};
}
Action receive_of(const Action& pass) {
  return {pass.kind == Kind::kForward ? Kind::kReceiveInput : Kind::kReceiveGradient, pass.item, pass.chunk};
}

// Items that go through a section's chunks one chunk after another. A group has at least as many items as
// there are sections, where there are so many: with fewer, the first section would wait for what comes back
// to its next chunk. Groups are of one size, or the first ones have an item more.
struct Group {
  std::size_t first = 0, size = 0;
};
Group group_of(const Pipeline& pipeline, std::size_t item) {
  const std::size_t groups =
      std::max<std::size_t>(1, pipeline.items / static_cast<std::size_t>(pipeline.sections));
  const std::size_t size = pipeline.items / groups, larger = pipeline.items % groups * (size + 1);
  if (item < larger) return {item - item % (size + 1), size + 1};
  return {item - (item - larger) % size, size};
}

// The section's pass of a kind with this number. Passes forward take chunks in their order, and those
// backward in the opposite one.
Action pass_of(const Pipeline& pipeline, Kind kind, std::size_t number) {
  const Group group = group_of(pipeline, number / pipeline.chunks);
  const std::size_t within = number - group.first * pipeline.chunks, chunk = within / group.size;
  return {kind, group.first + within % group.size,
          kind == Kind::kForward ? chunk : pipeline.chunks - 1 - chunk};
}

// How many passes forward a section makes before its first one backward follows one forward.
std::size_t passes_ahead(const Pipeline& pipeline, int section) {
  const std::size_t all = pipeline.items * pipeline.chunks;
  const std::size_t later = static_cast<std::size_t>(pipeline.sections - section) - 1;
  if (pipeline.order == PipelineOrder::kGPipe) return all;
  if (pipeline.chunks == 1) return std::min(all, later);
  return std::min(all, 2 * later + (pipeline.chunks - 1) * group_of(pipeline, 0).size);
}

std::vector<Action> passes_of(const Pipeline& pipeline, int section) {
  const std::size_t all = pipeline.items * pipeline.chunks, ahead = passes_ahead(pipeline, section);
  // Section s computes weights s items late. So much is left for the end of a step, when the last gradient
  // passes through the sections before.
  const std::size_t late =
      splits_backward(pipeline.order) ? std::min(all, static_cast<std::size_t>(section)) : all;
  std::vector<Action> passes;
  for (std::size_t i = 0; i < ahead; ++i) passes.push_back(pass_of(pipeline, Kind::kForward, i));
  for (std::size_t i = 0; i < all; ++i) {
    if (ahead + i < all) passes.push_back(pass_of(pipeline, Kind::kForward, ahead + i));
    passes.push_back(pass_of(pipeline, Kind::kBackward, i));
    if (i >= late) passes.push_back(pass_of(pipeline, Kind::kWeights, i - late));
  }
  for (std::size_t i = all - late; splits_backward(pipeline.order) && i < all; ++i)
    passes.push_back(pass_of(pipeline, Kind::kWeights, i));
  return passes;
}

bool is_pass(Kind kind) {
  return kind == Kind::kForward || kind == Kind::kBackward || kind == Kind::kWeights;
}

double seconds_of(PipelineOrder order, const SectionSeconds& own, Kind pass) {
  if (pass == Kind::kForward) return own.forward;
  if (pass == Kind::kWeights) return own.weights;
  return own.backward - (splits_backward(order) ? own.weights : 0);
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

// awaited_by(), for a section with these buffers, without a vector.
class Awaited {
 public:
  Awaited(const Pipeline& pipeline, int section, const PipelineBuffers& buffers, const Action& action) {
    const Action forward{Kind::kForward, action.item, action.chunk};
    const Action backward{Kind::kBackward, action.item, action.chunk};
    // The send from the buffer that this pass fills.
    const auto left = [&](const Action& pass, std::size_t count) {
      const std::size_t number = number_of(pipeline, pass);
      if (number < count) return;
      const Action before = pass_of(pipeline, pass.kind, number - count);
      if (sends(pipeline, section, before)) add(send_of(before));
    };
    const bool is_sent_back = receives(pipeline, section, backward);
    if (action == forward && receives(pipeline, section, forward)) add(receive_of(forward));
    if (action == forward && sends(pipeline, section, forward)) left(forward, buffers.outputs);
    if (action == backward && is_sent_back) add(receive_of(backward));
    // A border is filled by the gradient that comes, or by backward where none does.
    if (action == (is_sent_back ? receive_of(backward) : backward)) left(backward, buffers.borders);
  }
  const Action* begin() const { return actions_.data(); }
  const Action* end() const { return actions_.data() + count_; }

 private:
  void add(const Action& action) { actions_[count_++] = action; }
  std::array<Action, 2> actions_;
  std::size_t count_ = 0;
};

class Simulation {
 public:
  Simulation(const Pipeline& pipeline, std::span<const std::vector<Action>> lists,
             std::span<const SectionSeconds> seconds, std::span<const OnceSeconds> once)
      : pipeline_(pipeline),
        lists_(lists),
        seconds_(seconds),
        once_(once.begin(), once.end()),
        sections_(lists.size()),
        inputs_(pipeline.all_chunks()),
        gradients_(pipeline.all_chunks()) {
    once_.resize(sections_.size());
    for (std::size_t s = 0; s < sections_.size(); ++s) {
      sections_[s].now = sections_[s].busy = once_[s].before;
      sections_[s].buffers = buffers_of(pipeline, static_cast<int>(s));
      sections_[s].items = items_held(pipeline, static_cast<int>(s));
      for (std::vector<std::size_t>& done : sections_[s].done) done.resize(pipeline.chunks);
    }
    for (std::size_t i = 0; i < pipeline.all_chunks(); ++i) {
      if (i > 0) inputs_[i].assign(pipeline.items, {seconds[i - 1].message});
      if (i + 1 < pipeline.all_chunks()) gradients_[i].assign(pipeline.items, {seconds[i].message});
    }
  }

  // events: gets what goes on, unless it is null.
  PipelineTime run(std::vector<PipelineClock::Event>* events = nullptr) {
    events_ = events;
    for (bool moves = true; moves;) {
      moves = false;
      for (std::size_t s = 0; s < sections_.size(); ++s)
        while (sections_[s].next < lists_[s].size() && go_on(s)) moves = true;
    }
    check_ends();
    for (std::size_t s = 0; s < sections_.size(); ++s) take(sections_[s], once_[s].after);
    exchange();
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
    std::vector<std::size_t> items;  // buffers of them, by chunk
    std::size_t next = 0;            // of its list
    double now = 0, busy = 0;
    std::array<std::vector<std::size_t>, Action::kKinds> done{};  // by kind and chunk
    std::size_t held = 0, most_held = 0;
  };

  static void take(Section& section, double seconds) {
    section.now += seconds;
    section.busy += seconds;
  }

  // Each of the two gives what the other waits for, and neither computes meanwhile.
  void exchange() {
    const double seconds = std::max(once_.front().exchange, once_.back().exchange);
    if (seconds == 0 || sections_.size() == 1) return;
    Section &first = sections_.front(), &last = sections_.back();
    first.now = last.now = std::max(first.now, last.now) + seconds;
  }

  std::size_t& done(std::size_t s, Kind kind, std::size_t chunk) {
    return sections_[s].done[static_cast<std::size_t>(kind)][chunk];
  }
  bool is_done(std::size_t s, const Action& action) {
    return action.item < done(s, action.kind, action.chunk);
  }

  // Refuses an action that is not due, or whose buffer still has what another one has to take out.
  void require(bool holds, std::size_t s, const Action& action, const char* what) const {
    if (holds) return;
    fail(ErrorCode::kInternal, "section {} of {}: {} {}", s, sections_.size(), in_words(pipeline_, action),
         what);
  }
  // Of the buffers for what passes send: that the pass so many before this one has left its own.
  void require_buffer(std::size_t s, const Action& action, Kind kind, std::size_t buffers) {
    const std::size_t number = number_of(pipeline_, {kind, action.item, action.chunk});
    if (number < buffers) return;
    const Action before = pass_of(pipeline_, kind, number - buffers);
    const bool leaves = sends(pipeline_, static_cast<int>(s), before);
    require(is_done(s, leaves ? send_of(before) : before), s, action, "has no free buffer");
  }

  // Of the buffers that gradients of weights empty.
  void require_weights(std::size_t s, const Action& action, std::size_t buffers) {
    require(action.item < done(s, Kind::kWeights, action.chunk) + buffers, s, action, "has no free buffer");
  }

  // When the action may begin; nothing: it waits for what nobody has begun.
  std::optional<double> begin_of(std::size_t s, const Action& action) {
    double begin = sections_[s].now;
    for (const Action& awaited : Awaited(pipeline_, static_cast<int>(s), sections_[s].buffers, action)) {
      const std::optional<double> came = message_of(s, awaited).came();
      if (!came) return std::nullopt;
      begin = std::max(begin, *came);
    }
    return begin;
  }

  PipelineClock::Event event_of(std::size_t s, const Action& action) {
    const auto number = [&](const Action& message) {
      return static_cast<std::uint32_t>(number_of_message(s, message));
    };
    PipelineClock::Event event{
        static_cast<std::uint32_t>(s),
        static_cast<std::uint32_t>(pipeline_.number(static_cast<int>(s), action.chunk)), action.kind};
    for (const Action& awaited : Awaited(pipeline_, static_cast<int>(s), sections_[s].buffers, action))
      event.awaited[event.count++] = number(awaited);
    if (!is_pass(action.kind)) event.message = number(action);
    return event;
  }

  // Of the messages at the borders of all chunks, first those forward. A border is before the chunk behind
  // it.
  std::size_t number_of_message(std::size_t s, const Action& action) const {
    const std::size_t at = pipeline_.number(static_cast<int>(s), action.chunk);
    const bool forward = action.kind == Kind::kReceiveInput || action.kind == Kind::kSendOutput;
    const bool is_behind = action.kind == Kind::kReceiveInput || action.kind == Kind::kSendGradient;
    const std::size_t border = is_behind ? at - 1 : at;
    return ((forward ? 0 : pipeline_.all_chunks()) + border) * pipeline_.items + action.item;
  }

  Message& message_of(std::size_t s, const Action& action) {
    const std::size_t at = pipeline_.number(static_cast<int>(s), action.chunk);
    switch (action.kind) {
      case Kind::kReceiveInput:
        return inputs_[at][action.item];
      case Kind::kReceiveGradient:
        return gradients_[at][action.item];
      case Kind::kSendOutput:
        return inputs_[at + 1][action.item];
      default:
        return gradients_[at - 1][action.item];
    }
  }

  void check(std::size_t s, const Action& action) {
    const auto section = static_cast<int>(s);
    require(action.chunk < pipeline_.chunks && action.item < pipeline_.items, s, action,
            "is of no item of the step");
    require(action.item == done(s, action.kind, action.chunk), s, action, "does not ascend");
    const Action forward{Kind::kForward, action.item, action.chunk};
    const Action backward{Kind::kBackward, action.item, action.chunk};
    const auto follows = [&](const Action& before) {
      require(is_done(s, before), s, action, "comes before what it is made of");
    };
    const auto fill = [&] {  // activations of the item
      require(action.item < done(s, Kind::kBackward, action.chunk) + sections_[s].items[action.chunk], s,
              action, "has no free buffer");
    };
    const PipelineBuffers& buffers = sections_[s].buffers;
    const bool is_split = splits_backward(pipeline_.order);
    switch (action.kind) {
      case Kind::kReceiveInput:
        require(receives(pipeline_, section, forward), s, action, "comes from nowhere");
        return fill();
      case Kind::kForward:
        if (sends(pipeline_, section, forward)) require_buffer(s, action, Kind::kForward, buffers.outputs);
        if (is_split) require_weights(s, action, buffers.kept_for_weights);
        return receives(pipeline_, section, forward) ? follows(receive_of(forward)) : fill();
      case Kind::kSendOutput:
        require(sends(pipeline_, section, forward), s, action, "goes nowhere");
        return follows(forward);
      case Kind::kReceiveGradient:
        require(receives(pipeline_, section, backward), s, action, "comes from nowhere");
        return require_buffer(s, action, Kind::kBackward, buffers.borders);
      case Kind::kBackward:
        follows(forward);
        if (is_split) require_weights(s, action, buffers.left_for_weights);
        if (receives(pipeline_, section, backward)) return follows(receive_of(backward));
        return require_buffer(s, action, Kind::kBackward, buffers.borders);
      case Kind::kSendGradient:
        require(sends(pipeline_, section, backward), s, action, "goes nowhere");
        return follows(backward);
      case Kind::kWeights:
        require(is_split, s, action, "is a part of the backward pass");
        return follows(backward);
    }
  }

  bool go_on(std::size_t s) {
    Section& own = sections_[s];
    const Action& action = lists_[s][own.next];
    check(s, action);
    const std::optional<double> begins = begin_of(s, action);
    if (!begins) return false;
    own.now = *begins;
    if (events_ != nullptr) events_->push_back(event_of(s, action));
    begin(s, action);
    ++done(s, action.kind, action.chunk);
    ++own.next;
    return true;
  }

  void begin(std::size_t s, const Action& action) {
    Section& own = sections_[s];
    switch (action.kind) {
      case Kind::kReceiveInput:
      case Kind::kReceiveGradient:
        message_of(s, action).received = own.now;
        return;
      case Kind::kSendOutput:
      case Kind::kSendGradient:
        message_of(s, action).sent = own.now;
        return;
      case Kind::kForward:
      case Kind::kBackward:
      case Kind::kWeights:
        take(own, seconds_of(pipeline_.order, seconds_[pipeline_.number(static_cast<int>(s), action.chunk)],
                             action.kind));
        if (action.kind == Kind::kForward) ++own.held;
        if (action.kind == Kind::kBackward) --own.held;
        own.most_held = std::max(own.most_held, own.held);
    }
  }

  void check_ends() {
    std::string waiting;
    for (std::size_t s = 0; s < sections_.size(); ++s)
      if (sections_[s].next < lists_[s].size())
        waiting += fmt::format("{}section {} has to wait before {}", waiting.empty() ? "" : "; ", s,
                               in_words(pipeline_, lists_[s][sections_[s].next]));
    ensure(waiting.empty(), "a pipeline of {} sections and {} items cannot go on: {}", sections_.size(),
           pipeline_.items, waiting);
    for (std::size_t s = 0; s < sections_.size(); ++s)
      for (std::size_t chunk = 0; chunk < pipeline_.chunks; ++chunk) {
        check_number(s, {Kind::kWeights, 0, chunk}, splits_backward(pipeline_.order));
        for (const Kind kind : {Kind::kForward, Kind::kBackward}) {
          const Action pass{kind, 0, chunk};
          const auto section = static_cast<int>(s);
          check_number(s, pass, true);
          check_number(s, receive_of(pass), receives(pipeline_, section, pass));
          check_number(s, send_of(pass), sends(pipeline_, section, pass));
        }
      }
  }
  void check_number(std::size_t s, const Action& of, bool is_there) {
    const std::size_t found = done(s, of.kind, of.chunk), expected = is_there ? pipeline_.items : 0;
    ensure(found == expected, "section {} of {} has {} of {} items, not of {}", s, sections_.size(),
           kWords[static_cast<std::size_t>(of.kind)], found, expected);
  }

  const Pipeline pipeline_;
  const std::span<const std::vector<Action>> lists_;
  const std::span<const SectionSeconds> seconds_;
  std::vector<OnceSeconds> once_;  // by section
  std::vector<Section> sections_;
  std::vector<std::vector<Message>> inputs_, gradients_;  // of chunks in the model's order, by item
  std::vector<PipelineClock::Event>* events_ = nullptr;
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
bool splits_backward(PipelineOrder order) { return order == PipelineOrder::kZeroBubbleH1; }

// An output waits for its turn while the next one is made. A gradient lands in one border while another one
// is computed with, and one more leaves. Where groups have more items than there are sections, what a section
// sends may have to wait for so many more passes.
PipelineBuffers buffers_of(const Pipeline& pipeline, int section) {
  const std::size_t all = pipeline.items * pipeline.chunks;
  const bool is_first = section == 0, is_last = section + 1 == pipeline.sections;
  PipelineBuffers buffers;
  if (pipeline.chunks == 1) {
    buffers.outputs = is_last ? 0 : std::min<std::size_t>(all, 2);
    buffers.borders = std::min<std::size_t>(all, 3 - (is_first ? 1 : 0) - (is_last ? 1 : 0));
  } else {
    const std::size_t size = group_of(pipeline, 0).size,
                      sections = static_cast<std::size_t>(pipeline.sections);
    const std::size_t more = size - std::min(size, sections);
    buffers.outputs = std::min(all, 2 + more);
    buffers.borders = std::min(all, 3 + more);
  }
  if (splits_backward(pipeline.order)) {
    buffers.kept_for_weights = std::min(all, static_cast<std::size_t>(pipeline.sections));
    buffers.left_for_weights = std::min(all, static_cast<std::size_t>(section) + 1);
  }
  return buffers;
}

std::size_t number_of(const Pipeline& pipeline, const Action& pass) {
  const Group group = group_of(pipeline, pass.item);
  const std::size_t chunk = pass.kind == Kind::kForward ? pass.chunk : pipeline.chunks - 1 - pass.chunk;
  return group.first * pipeline.chunks + chunk * group.size + (pass.item - group.first);
}

std::vector<std::size_t> items_held(const Pipeline& pipeline, int section) {
  std::vector<std::size_t> held(pipeline.chunks), most(pipeline.chunks);
  for (const Action& pass : passes_of(pipeline, section)) {
    if (pass.kind == Kind::kForward) most[pass.chunk] = std::max(most[pass.chunk], ++held[pass.chunk]);
    if (pass.kind == Kind::kBackward) --held[pass.chunk];
  }
  return most;
}

std::vector<Action> awaited_by(const Pipeline& pipeline, int section, const Action& action) {
  const Awaited awaited(pipeline, section, buffers_of(pipeline, section), action);
  return {awaited.begin(), awaited.end()};
}

std::vector<Action> actions_of(const Pipeline& pipeline, int section) {
  const PipelineBuffers buffers = buffers_of(pipeline, section);
  const std::vector<std::size_t> held = items_held(pipeline, section);
  const std::size_t all = pipeline.items * pipeline.chunks;
  std::vector<Action> actions;
  std::vector<std::size_t> inputs(pipeline.chunks),
      done(pipeline.chunks);  // by chunk: received; passes backward
  std::size_t gradients = 0;  // received
  // A border from which a gradient is sent becomes free during the next backward pass.
  const auto receive = [&](std::size_t backward) {
    const bool sends_none = pipeline.chunks == 1 && section == 0;
    const std::size_t leaving = sends_none ? 0 : std::min<std::size_t>(backward, 1);
    for (std::size_t chunk = 0; chunk < pipeline.chunks; ++chunk)
      for (; !pipeline.begins(section, chunk) &&
             inputs[chunk] < std::min(pipeline.items, done[chunk] + held[chunk]);
           ++inputs[chunk])
        actions.push_back({Kind::kReceiveInput, inputs[chunk], chunk});
    for (; gradients < std::min(all, backward + buffers.borders - leaving); ++gradients) {
      const Action pass = pass_of(pipeline, Kind::kBackward, gradients);
      if (receives(pipeline, section, pass)) actions.push_back(receive_of(pass));
    }
  };
  receive(0);
  std::size_t backward = 0;
  for (const Action& pass : passes_of(pipeline, section)) {
    actions.push_back(pass);
    if (pass.kind == Kind::kWeights) continue;
    if (sends(pipeline, section, pass)) actions.push_back(send_of(pass));
    if (pass.kind == Kind::kForward) continue;
    ++done[pass.chunk];
    receive(++backward);
  }
  return actions;
}

PipelineTime simulate(const Pipeline& pipeline, std::span<const SectionSeconds> seconds,
                      std::span<const OnceSeconds> once) {
  std::vector<std::vector<Action>> lists;
  for (int section = 0; section < pipeline.sections; ++section)
    lists.push_back(actions_of(pipeline, section));
  return simulate(pipeline, lists, seconds, once);
}

PipelineTime simulate(const Pipeline& pipeline, std::span<const std::vector<Action>> lists,
                      std::span<const SectionSeconds> seconds, std::span<const OnceSeconds> once) {
  return Simulation(pipeline, lists, seconds, once).run();
}

PipelineClock::PipelineClock(const Pipeline& pipeline) : pipeline_(pipeline) {
  std::vector<std::vector<Action>> lists;
  for (int section = 0; section < pipeline.sections; ++section)
    lists.push_back(actions_of(pipeline, section));
  const std::vector<SectionSeconds> any(pipeline.all_chunks());
  Simulation(pipeline, lists, any, {}).run(&events_);
}

double PipelineClock::step(std::span<const SectionSeconds> seconds) const {
  std::vector<double> now(static_cast<std::size_t>(pipeline_.sections));
  // When both ends have begun a message, which takes as long as its border says.
  std::vector<double> begun(2 * pipeline_.all_chunks() * pipeline_.items);
  for (const Event& event : events_) {
    double& own = now[event.section];
    for (std::uint32_t i = 0; i < event.count; ++i) {
      const std::uint32_t message = event.awaited[i];
      own =
          std::max(own, begun[message] + seconds[message / pipeline_.items % pipeline_.all_chunks()].message);
    }
    if (is_pass(event.kind))
      own += seconds_of(pipeline_.order, seconds[event.chunk], event.kind);
    else
      begun[event.message] = std::max(begun[event.message], own);
  }
  return *std::ranges::max_element(now);
}

double least_step(const Pipeline& pipeline, std::span<const SectionSeconds> seconds) {
  double least = 0, others = 0;  // others: for an item to come to the section, and its gradient back
  for (int section = 0; section < pipeline.sections; ++section) {
    double each = 0;
    for (std::size_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
      const SectionSeconds& own = seconds[pipeline.number(section, chunk)];
      each += own.forward + own.backward;
    }
    least = std::max(least, others + static_cast<double>(pipeline.items) * each);
    const SectionSeconds& first = seconds[pipeline.number(section, 0)];
    // Gradients of weights may be made while the last gradient passes the sections before.
    others += first.forward + (splits_backward(pipeline.order) ? 0 : first.backward);
  }
  return least;
}

}  // namespace sluice::engine
