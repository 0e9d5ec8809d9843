#include <unistd.h>

#include "tests/bindings/c/support.h"

namespace sluice_c_test::pipeline_calls_test {

std::string actions(const char* order, uint32_t stages, uint64_t items, uint32_t stage, uint32_t chunks = 1) {
  char* text = nullptr;
  const sluice_status status = sluice_pipeline_actions(order, stages, chunks, items, stage, &text);
  return status == SLUICE_OK ? taken(text) : std::string(sluice_last_error());
}

TEST(PipelineCalls, GiveEachStageItsActions) {
  EXPECT_EQ(actions("1f1b", 1, 2, 0),
            R"([["forward",0,0],["backward",0,0],["forward",1,0],["backward",1,0]])");
  EXPECT_EQ(actions("gpipe", 1, 2, 0),
            R"([["forward",0,0],["forward",1,0],["backward",0,0],["backward",1,0]])");
  EXPECT_EQ(actions("1f1b", 2, 1, 0),
            R"([["receive_gradient",0,0],["forward",0,0],["send_output",0,0],["backward",0,0]])");
  EXPECT_EQ(actions("1f1b", 2, 1, 1),
            R"([["receive_input",0,0],["forward",0,0],["backward",0,0],["send_gradient",0,0]])");
  EXPECT_NE(actions("zb-h1", 2, 2, 1).find(R"(["weights",1,0])"), std::string::npos);
  EXPECT_EQ(actions("1f1b", 2, 1, 1, 2),
            R"([["receive_input",0,0],["receive_input",0,1],["receive_gradient",0,0],["forward",0,0],)"
            R"(["send_output",0,0],["forward",0,1],["backward",0,1],["send_gradient",0,1],["backward",0,0],)"
            R"(["send_gradient",0,0]])");
}

TEST(PipelineCalls, CutTheBlocks) {
  const auto cut = [](const char* given, const std::vector<double>& work, uint32_t stages,
                      uint32_t chunks = 1) {
    char* text = nullptr;
    const auto status =
        sluice_pipeline_stages("1f1b", stages, chunks, 8, given, work.data(), work.size() - 2, &text);
    return status == SLUICE_OK ? taken(text) : std::string(sluice_last_error());
  };
  EXPECT_EQ(cut(nullptr, {0, 1, 1, 1, 1, 0}, 2), "[[0,2],[2,4]]");
  EXPECT_EQ(cut(nullptr, {0, 1, 1, 1, 1, 2}, 2), "[[0,3],[3,4]]") << "what is after the blocks counts";
  EXPECT_EQ(cut(nullptr, {0, 1, 0, 0, 0, 1, 0}, 2).substr(0, 2), "[[");
  EXPECT_EQ(cut("0,1-3", {0, 1, 1, 1, 1, 0}, 2), "[[0,1],[1,4]]");
  EXPECT_EQ(cut(nullptr, {0, 1, 1, 0}, 1), "[[0,2]]");
  EXPECT_NE(cut(nullptr, {0, 1, 1, 0}, 3).find("3 stages"), std::string::npos);
  EXPECT_NE(cut(nullptr, {0, 1, 0, 0}, 2).find("too few have parameters"), std::string::npos);
  EXPECT_NE(cut("0-1", {0, 1, 1, 0}, 2).find("has 1 groups"), std::string::npos);
  EXPECT_EQ(cut("0,1,2-3,4", {0, 1, 1, 1, 1, 1, 0}, 2, 2), "[[0,1],[1,2],[2,4],[4,5]]");
  EXPECT_EQ(cut(nullptr, {0, 1, 1, 1, 1, 0}, 2, 2), "[[0,1],[1,2],[2,3],[3,4]]");
  EXPECT_NE(cut(nullptr, {0, 1, 1, 0}, 2, 2).find("2 stages of 2 chunks each"), std::string::npos);
  EXPECT_NE(cut("0,1-3", {0, 1, 1, 1, 1, 0}, 2, 2).find("give 4, the first ones of all stages"),
            std::string::npos);
}

TEST(PipelineCalls, RefuseWhatCannotBe) {
  char* text = nullptr;
  EXPECT_EQ(sluice_pipeline_actions("2f2b", 2, 1, 4, 0, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions(nullptr, 2, 1, 4, 0, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions("gpipe", 0, 1, 4, 0, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions("gpipe", 2, 0, 4, 0, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions("zb-h1", 2, 2, 4, 0, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions("gpipe", 2, 1, 0, 0, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions("gpipe", 2, 1, 4, 2, &text), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_pipeline_actions("gpipe", 2, 1, 4, 0, nullptr), SLUICE_INVALID_ARGUMENT);
}

// Two ranks of this process.
class PipelineRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    int descriptor = -1;
    ASSERT_EQ(sluice_ranks_memory(2, &descriptor), SLUICE_OK);
    for (uint32_t rank = 0; rank < 2; ++rank)
      ASSERT_EQ(sluice_ranks_create_local(descriptor, rank, nullptr, &ranks[rank]), SLUICE_OK);
    ::close(descriptor);
  }
  void TearDown() override {
    for (sluice_ranks* rank : ranks) sluice_ranks_destroy(rank);
  }
  sluice_ranks* ranks[2] = {};
};

TEST_F(PipelineRanks, GetMessagesInTheirOrder) {
  constexpr std::size_t kBytes = std::size_t{3} << 20;  // more than the rings have room for
  std::vector<std::string> sent{std::string(kBytes, 'a'), "b", std::string(kBytes, 'c')}, received;
  std::vector<sluice_message*> messages;
  for (const std::string& text : sent) received.emplace_back(text.size(), '\0');
  const auto begin = [&](auto function, sluice_ranks* of, uint32_t other, std::string& text) {
    ASSERT_EQ(function(of, other, "texts", text.data(), text.size(), &messages.emplace_back()), SLUICE_OK);
  };
  for (std::string& text : received) begin(sluice_ranks_receive, ranks[1], 0, text);
  for (std::string& text : sent) begin(sluice_ranks_send, ranks[0], 1, text);
  for (sluice_message* message : messages) EXPECT_EQ(sluice_message_wait(message), SLUICE_OK);
  EXPECT_EQ(received, sent);
}

TEST_F(PipelineRanks, RefuseWhatIsNoMessage) {
  char byte = 0;
  sluice_message* message = nullptr;
  for (const uint32_t other : {0u, 2u})
    EXPECT_EQ(sluice_ranks_send(ranks[0], other, "texts", &byte, 1, &message), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_ranks_receive(ranks[0], 1, "texts", nullptr, 1, &message), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_message_wait(nullptr), SLUICE_INVALID_ARGUMENT);
}

TEST_F(PipelineRanks, EndAMessageWithTheErrorOfTheOther) {
  char byte = 0;
  sluice_message* message = nullptr;
  ASSERT_EQ(sluice_ranks_receive(ranks[0], 1, "texts", &byte, 1, &message), SLUICE_OK);
  ASSERT_EQ(sluice_ranks_fail(ranks[1], "a layer has failed"), SLUICE_OK);
  EXPECT_NE(sluice_message_wait(message), SLUICE_OK);
  EXPECT_NE(std::string(sluice_last_error()).find("a layer has failed"), std::string::npos);
}

TEST_F(PipelineRanks, HaveGroupsAlongAMesh) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sluice_ranks *data = nullptr, *pipeline = nullptr;
    ASSERT_EQ(sluice_ranks_along(ranks[rank], "data=2,pipeline=1", "data", &data), SLUICE_OK);
    ASSERT_EQ(sluice_ranks_along(ranks[rank], "data=2,pipeline=1", "pipeline", &pipeline), SLUICE_OK);
    uint32_t size = 0, number = 9;
    EXPECT_EQ(sluice_ranks_size(data, &size), SLUICE_OK);
    EXPECT_EQ(sluice_ranks_rank(data, &number), SLUICE_OK);
    EXPECT_EQ(size, 2u);
    EXPECT_EQ(number, rank);
    EXPECT_EQ(pipeline, nullptr) << "it is alone along that axis";
    sluice_ranks_destroy(data);
  }
  sluice_ranks* group = nullptr;
  EXPECT_EQ(sluice_ranks_along(nullptr, "data=1", "data", &group), SLUICE_OK);
  EXPECT_EQ(group, nullptr);
  for (const char* mesh : {"data=2,pipeline=2", "data=3", "rows=2", ""})
    EXPECT_EQ(sluice_ranks_along(ranks[0], mesh, "data", &group), SLUICE_INVALID_ARGUMENT) << mesh;
}

TEST_F(PipelineRanks, RefuseSectionsThatAreNotTheModel) {
  constexpr uint64_t kElements = 8;
  const sluice_c_test::ModelHandle model = sluice_c_test::model_of(3, [&](uint32_t, sluice_parameter& given) {
    given.shape = &kElements;
    given.dimensions = 1;
  });
  const auto refused = [&](const std::vector<uint32_t>& units, sluice_ranks* others, uint32_t chunks = 0) {
    sluice_engine_options options = SLUICE_INIT(sluice_engine_options);
    options.memory = uint64_t{4} << 30;
    options.sections = ranks[0];
    options.section_units = units.empty() ? nullptr : units.data();
    options.section_chunks = chunks;
    options.ranks = others;
    char* text = nullptr;
    return sluice_plan(model.get(), &options, &text) == SLUICE_OK ? "planned: " + taken(text)
                                                                  : std::string(sluice_last_error());
  };
  EXPECT_NE(refused({1, 1}, nullptr).find("each is in one section"), std::string::npos);
  EXPECT_NE(refused({0, 3}, nullptr).find("each section has one at least"), std::string::npos);
  EXPECT_NE(refused({2, 2}, nullptr).find("of a model that has 3"), std::string::npos);
  EXPECT_NE(refused({}, nullptr).find("options.section_units"), std::string::npos);
  EXPECT_NE(refused({1, 2}, ranks[0]).find("options.ranks are 2, and options.sections 2, of 2 ranks"),
            std::string::npos);
  EXPECT_EQ(refused({1, 2}, nullptr).substr(0, 8), "planned:");
  EXPECT_NE(refused({1, 1, 0, 1}, nullptr, 2).find("one at least in each chunk"), std::string::npos);
  const std::string planned = refused({1, 1, 1, 0}, nullptr, 2);
  EXPECT_NE(planned.find("gives section 1 the units 3 to 3"), std::string::npos) << planned;
}

}  // namespace sluice_c_test::pipeline_calls_test
