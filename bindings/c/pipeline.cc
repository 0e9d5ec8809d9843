#include "bindings/c/sluice_pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bindings/c/ranks_handle.h"
#include "core/json.h"
#include "core/transfers.h"
#include "engine/plan/cut.h"
#include "engine/plan/pipeline.h"
#include "engine/ranks/call_id.h"

struct sluice_message {
  sluice_ranks& ranks;
  sluice::TransferGroup group = {};
};

namespace sluice::c {
namespace {

constexpr std::array<const char*, engine::Action::kKinds> kActions{
    "receive_input", "forward", "send_output", "receive_gradient", "backward", "send_gradient", "weights"};
constexpr std::uint32_t kMostStages = 4096, kMostChunks = 1024;
constexpr std::uint64_t kMostItems = std::uint64_t{1} << 20;

engine::Pipeline pipeline_of(const char* order, uint32_t stages, uint32_t chunks, uint64_t items) {
  if (stages == 0 || stages > kMostStages || items == 0 || items > kMostItems)
    fail(ErrorCode::kInvalidArgument,
         "a pipeline of {} stages and {} items is asked for; state 1 to {} and 1 to {}", stages, items,
         kMostStages, kMostItems);
  if (chunks == 0 || chunks > kMostChunks)
    fail(ErrorCode::kInvalidArgument, "{} chunks of each stage are asked for; state 1 to {}", chunks,
         kMostChunks);
  const engine::PipelineOrder known = engine::pipeline_order(&required(order, "order"));
  if (chunks > 1 && engine::splits_backward(known))
    fail(ErrorCode::kInvalidArgument,
         "'{}' is for stages of one chunk each, and {} are asked for: leave one of them out", order, chunks);
  return {known, static_cast<int>(stages), items, chunks};
}

std::string in_chunks(const engine::Pipeline& pipeline) {
  return pipeline.chunks > 1 ? fmt::format(" of {} chunks each", pipeline.chunks) : "";
}

std::vector<engine::UnitRange> cut_of(const engine::Pipeline& pipeline, const char* text,
                                      std::span<const double> work) {
  const std::size_t blocks = work.size() - 2, chunks = pipeline.all_chunks();
  if (blocks < chunks)
    fail(
        ErrorCode::kInvalidArgument,
        "a pipeline of {} stages{} is asked for, and the model has {} blocks, of which each needs one: state "
        "fewer stages{}",
        pipeline.sections, in_chunks(pipeline), blocks, pipeline.chunks > 1 ? ", or fewer chunks" : "");
  if (text != nullptr) {
    std::vector<engine::UnitRange> cut = engine::parse_cut(text, blocks);
    if (cut.size() != chunks)
      fail(ErrorCode::kInvalidArgument,
           "the cut '{}' has {} groups of blocks, and there are {} stages{}: give {}{}", text, cut.size(),
           pipeline.sections, in_chunks(pipeline), chunks,
           pipeline.chunks > 1 ? ", the first ones of all stages, then the second ones" : "");
    return cut;
  }
  std::vector<engine::SectionSeconds> seconds;
  for (const double each : work) seconds.push_back({.forward = each, .backward = 2 * each});
  return engine::cut(pipeline, seconds, [&](int, engine::UnitRange units) {
    return std::any_of(work.begin() + units.first, work.begin() + units.end,
                       [](double each) { return each > 0; });
  });
}

// begin: the communicator's call with the message's id and group. Its arguments are checked before, since a
// Done that is never called would be waited for.
template <class Begin>
sluice_status begin_message(sluice_ranks* handle, uint32_t other, const char* name, const void* data,
                            sluice_message** message, Begin&& begin) {
  return guarded([&] {
    sluice_ranks& ranks = required(handle, "ranks");
    sluice_message*& out = required(message, "message");
    const std::string text = &required(name, "name");
    required(static_cast<const std::byte*>(data), "data");
    const comm::Communicator& all = ranks.communicator;
    if (other >= static_cast<uint32_t>(all.size()) || static_cast<int>(other) == all.rank())
      fail(ErrorCode::kInvalidArgument,
           "a message between rank {} and rank {} is begun; there are ranks 0 to {}", all.rank(), other,
           all.size() - 1);
    std::unique_ptr<sluice_message> made(new sluice_message{ranks});
    begin(ranks.communicator, engine::call_id(engine::CallKind::kOfCaller, text), text, made->group);
    out = made.release();
  });
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_pipeline_actions(const char* order, uint32_t stages, uint32_t chunks, uint64_t items,
                                      uint32_t stage, char** json) {
  return guarded([&] {
    const sluice::engine::Pipeline pipeline = pipeline_of(order, stages, chunks, items);
    if (stage >= stages)
      sluice::fail(sluice::ErrorCode::kInvalidArgument, "stage {} is asked for, and they are 0 to {}", stage,
                   stages - 1);
    sluice::Json actions = sluice::Json::array();
    for (const auto& action : actions_of(pipeline, static_cast<int>(stage)))
      actions.push_back({kActions[static_cast<std::size_t>(action.kind)], action.item, action.chunk});
    required(json, "json") = new_text(actions.dump());
  });
}

sluice_status sluice_pipeline_stages(const char* order, uint32_t stages, uint32_t chunks, uint64_t items,
                                     const char* cut, const double* work, size_t blocks, char** json) {
  return guarded([&] {
    const std::span<const double> given(&required(work, "work"), blocks + 2);
    const sluice::engine::Pipeline pipeline = pipeline_of(order, stages, chunks, items);
    const auto found = cut_of(pipeline, cut, given);
    if (found.empty())
      sluice::fail(sluice::ErrorCode::kInvalidArgument,
                   "of the {} blocks too few have parameters for {} stages{}, each of which needs some",
                   blocks, stages, in_chunks(pipeline));
    sluice::Json of_stages = sluice::Json::array();
    for (const sluice::engine::UnitRange& units : found)
      of_stages.push_back(
          {units.first == 0 ? 0 : units.first - 1, std::min<std::size_t>(units.end - 1, blocks)});
    required(json, "json") = new_text(of_stages.dump());
  });
}

sluice_status sluice_ranks_send(sluice_ranks* ranks, uint32_t to, const char* name, const void* data,
                                uint64_t bytes, sluice_message** message) {
  return begin_message(ranks, to, name, data, message,
                       [&](auto& others, std::uint64_t id, auto& text, auto& group) {
                         others.send(static_cast<int>(to), id, text,
                                     {static_cast<const std::byte*>(data), bytes}, group.add());
                       });
}

sluice_status sluice_ranks_receive(sluice_ranks* ranks, uint32_t from, const char* name, void* data,
                                   uint64_t bytes, sluice_message** message) {
  return begin_message(
      ranks, from, name, data, message, [&](auto& others, std::uint64_t id, auto& text, auto& group) {
        others.receive(static_cast<int>(from), id, text, {static_cast<std::byte*>(data), bytes}, group.add());
      });
}

// A waiting rank is alive, although others may have begun to wait for it long before.
sluice_status sluice_message_wait(sluice_message* message) {
  const std::unique_ptr<sluice_message> ended(message);
  return guarded([&] {
    sluice_message& begun = required(message, "message");
    begun.group.wait([&] { begun.ranks.communicator.report_work(); });
  });
}
