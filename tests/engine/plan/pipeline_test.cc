#include "engine/plan/pipeline.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "thrown.h"

namespace sluice::engine {
namespace pipeline_test {

using Kind = Action::Kind;
using Lists = std::vector<std::vector<Action>>;

std::vector<SectionSeconds> alike(const Pipeline& pipeline, SectionSeconds seconds) {
  return std::vector<SectionSeconds>(pipeline.all_chunks(), seconds);
}

Lists lists_of(const Pipeline& pipeline) {
  Lists lists;
  for (int section = 0; section < pipeline.sections; ++section)
    lists.push_back(actions_of(pipeline, section));
  return lists;
}

void for_all(const std::function<void(const Pipeline&)>& call, int most_sections = 8,
             std::size_t most_items = 32, std::size_t most_chunks = 4) {
  for (const PipelineOrder order : {PipelineOrder::kGPipe, PipelineOrder::k1F1B})
    for (int sections = 1; sections <= most_sections; ++sections)
      for (std::size_t items = 1; items <= most_items; ++items)
        for (std::size_t chunks = 1; chunks <= (sections > 1 ? most_chunks : 1); ++chunks) {
          SCOPED_TRACE(
              fmt::format("{}, {} sections, {} items, {} chunks", name_of(order), sections, items, chunks));
          call({order, sections, items, chunks});
        }
}

// simulate() itself checks that nothing is missing, out of order, without a buffer, or waited for in vain.
TEST(Pipeline, EndsAndTakesAsLongAsItsBubbleSays) {
  for_all([](const Pipeline& pipeline) {
    const PipelineTime time = simulate(pipeline, alike(pipeline, {1, 2, 0}));
    const auto sections = static_cast<std::size_t>(pipeline.sections);
    const std::size_t passes = pipeline.items * pipeline.chunks;
    // With fewer items than sections, the first section waits for what comes back to its next chunk.
    const std::size_t waits = sections - std::min(sections, pipeline.items);
    EXPECT_EQ(time.step, 3.0 * static_cast<double>(passes + sections - 1 + (pipeline.chunks - 1) * waits));
    for (const double busy : time.busy) EXPECT_EQ(busy, 3.0 * static_cast<double>(passes));
  });
}

TEST(Pipeline, HoldsWhatItsBuffersAreFor) {
  for_all([](const Pipeline& pipeline) {
    const PipelineTime time = simulate(pipeline, alike(pipeline, {1, 2, 0.1}));
    for (int section = 0; section < pipeline.sections; ++section) {
      const auto later = static_cast<std::size_t>(pipeline.sections - section) - 1;
      const std::size_t all = pipeline.items * pipeline.chunks;
      const std::vector<std::size_t> by_chunk = items_held(pipeline, section);
      const std::size_t held = time.held[static_cast<std::size_t>(section)];
      EXPECT_LE(held, std::accumulate(by_chunk.begin(), by_chunk.end(), std::size_t{0}));
      if (pipeline.chunks == 1) {
        EXPECT_EQ(by_chunk.front(), held);
      }
      const auto sections = static_cast<std::size_t>(pipeline.sections);
      if (pipeline.chunks > 1 && pipeline.items % sections != 0) continue;
      const std::size_t ahead = pipeline.chunks == 1 ? later : 2 * later + (pipeline.chunks - 1) * sections;
      EXPECT_EQ(held, pipeline.order == PipelineOrder::kGPipe ? all : std::min(all, ahead + 1));
    }
  });
}

// Whatever takes long: a section, a pass, a message.
TEST(Pipeline, EndsWhateverTakesLong) {
  for_all(
      [](const Pipeline& pipeline) {
        for (int slow = 0; slow < pipeline.sections; ++slow) {
          std::vector<SectionSeconds> seconds = alike(pipeline, {1, 2, 0.5});
          SectionSeconds& own = seconds[pipeline.number(slow, pipeline.chunks - 1)];
          own = slow % 3 == 0   ? SectionSeconds{9, 2, 0.5}
                : slow % 3 == 1 ? SectionSeconds{1, 30, 0.5}
                                : SectionSeconds{1, 2, 20};
          EXPECT_GE(simulate(pipeline, seconds).step,
                    static_cast<double>(pipeline.items) * (own.forward + own.backward));
        }
      },
      6, 14);
}

TEST(Pipeline, OfOneSectionIsAStepOfOneRank) {
  const Pipeline one{PipelineOrder::k1F1B, 1, 3};
  const std::vector<Action> expected{{Kind::kForward, 0},  {Kind::kBackward, 0}, {Kind::kForward, 1},
                                     {Kind::kBackward, 1}, {Kind::kForward, 2},  {Kind::kBackward, 2}};
  EXPECT_EQ(actions_of(one, 0), expected);
  EXPECT_EQ(items_held(one, 0), std::vector<std::size_t>{1});

  EXPECT_EQ(buffers_of(one, 0).outputs, 0u);
  EXPECT_EQ(buffers_of(one, 0).borders, 1u);
}

// There are buffers enough that a message costs time only while the pipeline fills and empties.
TEST(Pipeline, HidesMessagesOfGPipe) {
  for (int sections = 2; sections <= 8; ++sections)
    for (const std::size_t items : {8u, 32u}) {
      const Pipeline pipeline{PipelineOrder::kGPipe, sections, items};
      const double bare = simulate(pipeline, alike(pipeline, {1, 2, 0})).step;
      EXPECT_LE(simulate(pipeline, alike(pipeline, {1, 2, 0.05})).step,
                bare + 0.05 * 2 * (sections - 1) + 1e-9);
    }
}

// Wrong lists are found, wherever they can be made.
class Mutants {
 public:
  using Change = std::function<bool(std::vector<Action>& list)>;  // false: the list has no place for it
  explicit Mutants(const Change& change) {
    const auto mutate = [&](const Pipeline& pipeline) {
      for (std::size_t section = 0; section < static_cast<std::size_t>(pipeline.sections); ++section) {
        Lists lists = lists_of(pipeline);
        if (!change(lists[section])) continue;
        ++made_;
        expect_error(ErrorCode::kInternal, {"section"}, [&] {
          simulate(pipeline, lists, alike(pipeline, {1, 2, 0}));
        });
      }
    };
    for_all(mutate, 4, 9, 2);
  }
  int made() const { return made_; }

 private:
  int made_ = 0;
};

auto first_of(std::vector<Action>& list, Kind kind, std::size_t item = 0) {
  return std::ranges::find(list, Action{kind, item});
}

TEST(PipelineMutants, AReceiveBehindItsPass) {
  for (const auto& [receive, pass] :
       {std::pair(Kind::kReceiveInput, Kind::kForward), std::pair(Kind::kReceiveGradient, Kind::kBackward)}) {
    const Mutants mutants([&](std::vector<Action>& list) {
      const auto from = first_of(list, receive);
      if (from == list.end()) return false;
      std::rotate(from, from + 1, first_of(list, pass) + 1);
      return true;
    });
    EXPECT_GT(mutants.made(), 30);
  }
}

TEST(PipelineMutants, TwoPassesOfAKindSwapped) {
  for (const Kind kind : {Kind::kForward, Kind::kBackward, Kind::kSendOutput, Kind::kSendGradient,
                          Kind::kReceiveInput, Kind::kReceiveGradient}) {
    const Mutants mutants([&](std::vector<Action>& list) {
      const auto one = first_of(list, kind, 0), other = first_of(list, kind, 1);
      if (one == list.end() || other == list.end()) return false;
      std::iter_swap(one, other);
      return true;
    });
    EXPECT_GT(mutants.made(), 30);
  }
}

TEST(PipelineMutants, AnActionMissingOrTwice) {
  for (std::size_t kind = 0; kind < Action::kKinds; ++kind)
    for (const bool twice : {false, true}) {
      const Mutants mutants([&](std::vector<Action>& list) {
        const auto is = [&](const Action& action) { return action.kind == static_cast<Kind>(kind); };
        const auto last = std::find_if(list.rbegin(), list.rend(), is);
        if (last == list.rend()) return false;
        if (twice)
          list.push_back(*last);
        else
          list.erase(std::next(last).base());
        return true;
      });
      EXPECT_GT(mutants.made(), 30);
    }
}

// An input that lands where an item still is.
TEST(PipelineMutants, AReceiveBeforeItsBufferIsFree) {
  for (const auto& [receive, frees] : {std::pair(Kind::kReceiveInput, Kind::kBackward),
                                       std::pair(Kind::kReceiveGradient, Kind::kSendGradient)}) {
    const Mutants mutants([&](std::vector<Action>& list) {
      const auto first = [&](auto from, Kind kind) {
        return std::find_if(from, list.end(), [&](const Action& action) { return action.kind == kind; });
      };
      const auto pass = first(list.begin(), frees), late = first(pass, receive);
      if (pass == list.end() || late == list.end()) return false;
      std::rotate(pass, late, late + 1);
      return true;
    });
    EXPECT_GT(mutants.made(), 30);
  }
}

// Each section waits for the other one: the first for a gradient before it has sent what it is made of.
TEST(PipelineMutants, SectionsThatWaitForEachOther) {
  const Pipeline pipeline{PipelineOrder::k1F1B, 2, 2};
  Lists lists = lists_of(pipeline);
  const auto send = first_of(lists[0], Kind::kSendOutput, 1);
  std::rotate(send, send + 1, first_of(lists[0], Kind::kBackward, 1) + 1);
  expect_error(ErrorCode::kInternal,
               {"a pipeline of 2 sections and 2 items cannot go on",
                "section 0 has to wait before the backward pass of item 1",
                "section 1 has to wait before the forward pass of item 1"},
               [&] {
                 simulate(pipeline, lists, alike(pipeline, {1, 2, 0}));
               });
}

TEST(PipelineOrders, HaveWords) {
  for (const PipelineOrder order : {PipelineOrder::kGPipe, PipelineOrder::k1F1B})
    EXPECT_EQ(pipeline_order(name_of(order)), order);
  EXPECT_EQ(message_of([] { pipeline_order("zb"); }),
            "'zb' is not an order of a pipeline; there are gpipe, 1f1b");
}

}  // namespace pipeline_test
}  // namespace sluice::engine
