#include "engine/plan/pipeline.h"

#include <fmt/format.h>

#include "testing.h"
#include "thrown.h"

namespace sluice::engine::pipeline_test {

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

constexpr std::array kOrders{PipelineOrder::kGPipe, PipelineOrder::k1F1B, PipelineOrder::kZeroBubbleH1};

void for_all(const std::function<void(const Pipeline&)>& call, int most_sections = 8,
             std::size_t most_items = 32, std::size_t most_chunks = 4) {
  for (const PipelineOrder order : kOrders)
    for (int sections = 1; sections <= most_sections; ++sections)
      for (std::size_t items = 1; items <= most_items; ++items)
        for (std::size_t chunks = 1; chunks <= (sections > 1 && !splits_backward(order) ? most_chunks : 1);
             ++chunks) {
          SCOPED_TRACE(
              fmt::format("{}, {} sections, {} items, {} chunks", name_of(order), sections, items, chunks));
          call({order, sections, items, chunks});
        }
}

// simulate() itself checks that nothing is missing, out of order, without a buffer, or waited for in vain.
TEST(Pipeline, EndsAndTakesAsLongAsItsBubbleSays) {
  for_all([](const Pipeline& pipeline) {
    const PipelineTime time = simulate(pipeline, alike(pipeline, {1, 2, 0, 1}));
    const auto sections = static_cast<std::size_t>(pipeline.sections);
    const std::size_t passes = pipeline.items * pipeline.chunks;
    // With fewer items than sections, the first section waits for what comes back to its next chunk; and
    // there is less to fill bubbles with.
    const std::size_t waits = sections - std::min(sections, pipeline.items);
    const std::size_t step = splits_backward(pipeline.order)
                                 ? 3 * passes + sections - 1 + waits  // as published
                                 : 3 * (passes + sections - 1 + (pipeline.chunks - 1) * waits);
    EXPECT_EQ(time.step, static_cast<double>(step));
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

// The most items that a list holds from one pass of theirs up to another one.
std::size_t most_between(const std::vector<Action>& list, Kind from, Kind until) {
  std::size_t held = 0, most = 0;
  for (const Action& action : list) {
    if (action.kind == from) most = std::max(most, ++held);
    if (action.kind == until) --held;
  }
  return most;
}

// No section holds more items than the first one of 1F1B does, whatever of them it holds.
TEST(Pipeline, HoldsForWeightsWhatItsBuffersAreFor) {
  for_all([](const Pipeline& pipeline) {
    if (!splits_backward(pipeline.order)) return;
    const auto sections = static_cast<std::size_t>(pipeline.sections);
    for (std::size_t section = 0; section < sections; ++section) {
      const std::vector<Action> list = actions_of(pipeline, static_cast<int>(section));
      const PipelineBuffers buffers = buffers_of(pipeline, static_cast<int>(section));
      EXPECT_EQ(most_between(list, Kind::kForward, Kind::kWeights), std::min(pipeline.items, sections));
      EXPECT_EQ(buffers.kept_for_weights, std::min(pipeline.items, sections));
      EXPECT_EQ(most_between(list, Kind::kBackward, Kind::kWeights), std::min(pipeline.items, section + 1));
      EXPECT_EQ(buffers.left_for_weights, std::min(pipeline.items, section + 1));
    }
  });
}

TEST(Pipeline, WithWeightsApartIsShorter) {
  for (int sections = 2; sections <= 8; ++sections)
    for (std::size_t items = 1; items <= 32; ++items)
      for (const SectionSeconds each : {SectionSeconds{1, 2, 0.05, 1}, SectionSeconds{1, 2.5, 0, 0.8},
                                        SectionSeconds{1, 2, 0, 1.2}, SectionSeconds{1, 3, 0.1, 0.9}}) {
        const Pipeline apart{PipelineOrder::kZeroBubbleH1, sections, items};
        const auto seconds = alike(apart, each);
        EXPECT_LT(simulate(apart, seconds).step,
                  simulate({PipelineOrder::k1F1B, sections, items}, seconds).step)
            << sections << " sections, " << items << " items, " << each.weights;
      }
}

// One item passes each border twice, and the last chunk has none behind it.
TEST(Pipeline, CountsEachMessageAtItsBorder) {
  for_all(
      [](const Pipeline& pipeline) {
        if (pipeline.items > 1) return;
        std::vector<SectionSeconds> seconds = alike(pipeline, {1, 2, 0, 0});
        double expected = 3 * static_cast<double>(seconds.size());
        for (std::size_t chunk = 0; chunk < seconds.size(); ++chunk) {
          seconds[chunk].message = static_cast<double>(std::size_t{1} << chunk);
          if (chunk + 1 < seconds.size()) expected += 2 * seconds[chunk].message;
        }
        EXPECT_EQ(simulate(pipeline, seconds).step, expected);
      },
      8, 1);
}

TEST(Pipeline, IsNoShorterThanItsLeast) {
  unsigned state = 1;
  const auto random = [&] { return static_cast<double>((state = state * 1103515245 + 12345) >> 16 & 15); };
  for_all(
      [&](const Pipeline& pipeline) {
        std::vector<SectionSeconds> seconds = alike(pipeline, {});
        for (SectionSeconds& own : seconds) {
          own = {1 + random(), 1 + random(), random() / 8, 0};
          own.weights = own.backward / 2;
        }
        EXPECT_LE(least_step(pipeline, seconds), simulate(pipeline, seconds).step + 1e-9);
      },
      8, 20);
  const Pipeline equal{PipelineOrder::k1F1B, 8, 20};
  EXPECT_EQ(least_step(equal, alike(equal, {1, 2, 0})), simulate(equal, alike(equal, {1, 2, 0})).step);
}

// A section, a pass or a message takes long here.
TEST(Pipeline, EndsWhateverTakesLong) {
  for_all(
      [](const Pipeline& pipeline) {
        for (int slow = 0; slow < pipeline.sections; ++slow) {
          std::vector<SectionSeconds> seconds = alike(pipeline, {1, 2, 0.5, 1});
          SectionSeconds& own = seconds[pipeline.number(slow, pipeline.chunks - 1)];
          own = slow % 3 == 0   ? SectionSeconds{9, 2, 0.5}
                : slow % 3 == 1 ? SectionSeconds{1, 30, 0.5, 20}
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

TEST(PipelineMutants, WhatAPassIsMadeOfBehindIt) {
  for (const auto& [receive, pass] :
       {std::pair(Kind::kReceiveInput, Kind::kForward), std::pair(Kind::kReceiveGradient, Kind::kBackward),
        std::pair(Kind::kBackward, Kind::kWeights)}) {
    const Mutants mutants([&](std::vector<Action>& list) {
      const auto from = first_of(list, receive);
      const auto made = first_of(list, pass);
      if (from == list.end() || made == list.end()) return false;
      std::rotate(from, from + 1, made + 1);
      return true;
    });
    EXPECT_GT(mutants.made(), 30);
  }
}

TEST(PipelineMutants, TwoPassesOfAKindSwapped) {
  for (const Kind kind : {Kind::kForward, Kind::kBackward, Kind::kSendOutput, Kind::kSendGradient,
                          Kind::kReceiveInput, Kind::kReceiveGradient, Kind::kWeights}) {
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

// The buffers that weights need are still there when another item takes their place.
TEST(PipelineMutants, WeightsAfterTheirBuffersAreTaken) {
  const Mutants mutants([&](std::vector<Action>& list) {
    const auto weights = first_of(list, Kind::kWeights);
    const auto taken = std::find_if(weights, list.end(), [](const Action& action) {
      return action.kind == Kind::kForward || action.kind == Kind::kBackward;
    });
    if (weights == list.end() || taken == list.end()) return false;
    std::rotate(weights, weights + 1, taken + 1);
    return true;
  });
  EXPECT_GT(mutants.made(), 30);
}

// An input lands where an item still is.
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
  for (const PipelineOrder order : kOrders) EXPECT_EQ(pipeline_order(name_of(order)), order);
  EXPECT_EQ(message_of([] { pipeline_order("zb"); }),
            "'zb' is not an order of a pipeline; there are gpipe, 1f1b, zb-h1");
}

}  // namespace sluice::engine::pipeline_test
