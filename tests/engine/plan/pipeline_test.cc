#include "engine/plan/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "thrown.h"

namespace sluice::engine {
namespace pipeline_test {

using Kind = Action::Kind;
using Lists = std::vector<std::vector<Action>>;

std::vector<SectionSeconds> alike(int sections, SectionSeconds seconds) {
  return std::vector<SectionSeconds>(static_cast<std::size_t>(sections), seconds);
}

Lists lists_of(const Pipeline& pipeline) {
  Lists lists;
  for (int section = 0; section < pipeline.sections; ++section)
    lists.push_back(actions_of(pipeline, section));
  return lists;
}

void for_all(const std::function<void(const Pipeline&)>& call, int most_sections = 8,
             std::size_t most_items = 32) {
  for (const PipelineOrder order : {PipelineOrder::kGPipe, PipelineOrder::k1F1B})
    for (int sections = 1; sections <= most_sections; ++sections)
      for (std::size_t items = 1; items <= most_items; ++items) {
        SCOPED_TRACE(std::string(name_of(order)) + ", " + std::to_string(sections) + " sections, " +
                     std::to_string(items) + " items");
        call({order, sections, items});
      }
}

// simulate() itself checks that nothing is missing, out of order, without a buffer, or waited for in vain.
TEST(Pipeline, EndsAndTakesAsLongAsItsBubbleSays) {
  for_all([](const Pipeline& pipeline) {
    const PipelineTime time = simulate(pipeline, alike(pipeline.sections, {1, 2, 0}));
    const auto sections = static_cast<std::size_t>(pipeline.sections);
    EXPECT_EQ(time.step, 3.0 * static_cast<double>(pipeline.items + sections - 1));
    for (const double busy : time.busy) EXPECT_EQ(busy, 3.0 * static_cast<double>(pipeline.items));
  });
}

TEST(Pipeline, HoldsWhatItsBuffersAreFor) {
  for_all([](const Pipeline& pipeline) {
    const PipelineTime time = simulate(pipeline, alike(pipeline.sections, {1, 2, 0.1}));
    for (int section = 0; section < pipeline.sections; ++section) {
      const auto later = static_cast<std::size_t>(pipeline.sections - section);
      const std::size_t held =
          pipeline.order == PipelineOrder::kGPipe ? pipeline.items : std::min(pipeline.items, later);
      EXPECT_EQ(time.held[static_cast<std::size_t>(section)], held);
      EXPECT_EQ(buffers_of(pipeline, section).items, held);
    }
  });
}

// Whatever takes long: a section, a pass, a message.
TEST(Pipeline, EndsWhateverTakesLong) {
  for_all([](const Pipeline& pipeline) {
    for (int slow = 0; slow < pipeline.sections; ++slow) {
      std::vector<SectionSeconds> seconds = alike(pipeline.sections, {1, 2, 0.5});
      SectionSeconds& own = seconds[static_cast<std::size_t>(slow)];
      own = slow % 3 == 0   ? SectionSeconds{9, 2, 0.5}
            : slow % 3 == 1 ? SectionSeconds{1, 30, 0.5}
                            : SectionSeconds{1, 2, 20};
      EXPECT_GE(simulate(pipeline, seconds).step,
                static_cast<double>(pipeline.items) * (own.forward + own.backward));
    }
  });
}

TEST(Pipeline, OfOneSectionIsAStepOfOneRank) {
  const Pipeline one{PipelineOrder::k1F1B, 1, 3};
  const std::vector<Action> expected{{Kind::kForward, 0},  {Kind::kBackward, 0}, {Kind::kForward, 1},
                                     {Kind::kBackward, 1}, {Kind::kForward, 2},  {Kind::kBackward, 2}};
  EXPECT_EQ(actions_of(one, 0), expected);
  EXPECT_EQ(buffers_of(one, 0).items, 1u);
  EXPECT_EQ(buffers_of(one, 0).outputs, 0u);
  EXPECT_EQ(buffers_of(one, 0).borders, 1u);
}

// There are buffers enough that a message costs time only while the pipeline fills and empties.
TEST(Pipeline, HidesMessagesOfGPipe) {
  for (int sections = 2; sections <= 8; ++sections)
    for (const std::size_t items : {8u, 32u}) {
      const Pipeline pipeline{PipelineOrder::kGPipe, sections, items};
      const double bare = simulate(pipeline, alike(sections, {1, 2, 0})).step;
      EXPECT_LE(simulate(pipeline, alike(sections, {1, 2, 0.05})).step,
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
          simulate(pipeline, lists, alike(pipeline.sections, {1, 2, 0}));
        });
      }
    };
    for_all(mutate, 4, 9);
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
      const auto pass = first_of(list, frees);
      const auto late =
          std::find_if(pass, list.end(), [&](const Action& action) { return action.kind == receive; });
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
                 simulate(pipeline, lists, alike(2, {1, 2, 0}));
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
