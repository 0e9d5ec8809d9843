#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace sluice::engine {

// In which order the sections of a pipeline compute. GPipe (Huang et al. 2019): all forward passes, then all
// backward ones. 1F1B (PipeDream-flush, Narayanan et al. 2021): as soon as there is something to do backward,
// one pass backward and one forward in turn, so that few items are held. ZB-H1 (Qi et al. 2023): as 1F1B,
// with the gradients of weights apart from those of inputs, so that no section waits for the former.
enum class PipelineOrder : std::uint8_t { kGPipe, k1F1B, kZeroBubbleH1 };
// Users write "gpipe", "1f1b" and "zb-h1". Throws Error(kInvalidArgument) for other words.
PipelineOrder pipeline_order(std::string_view word);
std::string_view name_of(PipelineOrder order);
// Whether gradients of weights are computed in passes of their own.
bool splits_backward(PipelineOrder order);

// A step of a model that is cut into sections, which pass items to each other. An item is as many
// micro-batches as pass through a unit together. A section has so many chunks, which are consecutive units
// each: the first chunks of all sections follow each other in the model, then come the second ones. With more
// than one the order is interleaved (Narayanan et al. 2021): passes are shorter, and so is the time in which
// a pipeline fills and empties.
struct Pipeline {
  PipelineOrder order = PipelineOrder::k1F1B;
  int sections = 1;
  std::size_t items = 1;
  std::size_t chunks = 1;

  // The number of a section's chunk among all, in the model's order.
  std::size_t number(int section, std::size_t chunk) const {
    return chunk * static_cast<std::size_t>(sections) + static_cast<std::size_t>(section);
  }
  std::size_t all_chunks() const { return chunks * static_cast<std::size_t>(sections); }
  bool begins(int section, std::size_t chunk) const { return number(section, chunk) == 0; }
  bool ends(int section, std::size_t chunk) const { return number(section, chunk) + 1 == all_chunks(); }
};

// One action of a section. Receives and sends are begun, and not waited for: see awaited_by().
struct Action {
  enum class Kind : std::uint8_t {
    kReceiveInput,
    kForward,
    kSendOutput,
    kReceiveGradient,
    kBackward,
    kSendGradient,
    kWeights,  // the gradients of weights; backward passes of other orders have them, too
  };
  static constexpr std::size_t kKinds = 7;
  Kind kind = Kind::kForward;
  std::size_t item = 0;
  std::size_t chunk = 0;  // of the section
  bool operator==(const Action&) const = default;
};

// Returns the actions of section number `section` in a step. Actions of a kind and chunk ascend by items, so
// gradients are added in the order of micro-batches, and messages need no numbers. Receives stand where their
// buffer becomes free, the first ones before all else.
std::vector<Action> actions_of(const Pipeline& pipeline, int section);

// Returns the receives and sends of the section that must have ended before this action: the receive of the
// item's input for its forward pass, or of its output's gradient for its backward pass; and the send that
// empties the buffer that the action fills.
std::vector<Action> awaited_by(const Pipeline& pipeline, int section, const Action& action);

// How many buffers a section has for what goes to other sections: the outputs of forward passes; and
// borders, which take gradients of outputs, and become those of inputs. The pass with number n (among the
// section's passes of that kind) uses the buffer n modulo that.
struct PipelineBuffers {
  std::size_t outputs = 0, borders = 1;
  // Where gradients of weights are apart, by item as those of items_held(): for activations that they need,
  // from the forward pass on, and for what the backward pass leaves them.
  std::size_t kept_for_weights = 0, left_for_weights = 0;
};
PipelineBuffers buffers_of(const Pipeline& pipeline, int section);
std::size_t number_of(const Pipeline& pipeline, const Action& pass);
// The most items for which a section has inputs and activations at once, by chunk. Item i uses the buffer i
// modulo that.
std::vector<std::size_t> items_held(const Pipeline& pipeline, int section);

// Seconds of an item in a chunk of a section, and of a message between that chunk and the one after it, which
// take as long in both directions.
struct SectionSeconds {
  double forward = 0, backward = 0, message = 0;
  double weights = 0;  // the part of backward that makes gradients of weights
};
// Seconds that a section takes once in a step: before its first pass, in which it updates what waited for the
// step before; after its last one, until all sums over ranks have come; and, where the first and the last
// section have a table, what they then exchange.
struct OnceSeconds {
  double before = 0, after = 0, exchange = 0;
};
struct PipelineTime {
  double step = 0;
  std::vector<double> busy;       // by section: the seconds in which it does not wait for others
  std::vector<std::size_t> held;  // by section: the most items between forward and backward pass of a chunk
};

// Goes through what all sections do, and finds how long it takes. Throws Error(kInternal) where none can go
// on, with what each waits for; and where an action is missing, does not ascend, or has no buffer.
// REQUIRES: `seconds` has an entry for each chunk of all sections, in the model's order; `once` has one for
// each section, or none.
PipelineTime simulate(const Pipeline& pipeline, std::span<const SectionSeconds> seconds,
                      std::span<const OnceSeconds> once = {});
// The same for given lists, one for each section.
PipelineTime simulate(const Pipeline& pipeline, std::span<const std::vector<Action>> lists,
                      std::span<const SectionSeconds> seconds, std::span<const OnceSeconds> once = {});
// No step of this can be shorter: each section waits for the first item, computes all of them, and its last
// gradient passes the sections before it.
double least_step(const Pipeline& pipeline, std::span<const SectionSeconds> seconds);

}  // namespace sluice::engine
