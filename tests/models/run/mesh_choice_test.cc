#include "models/run/mesh_choice.h"

#include "core/error.h"
#include "engine/machine/support.h"
#include "models/run/machine_plan.h"
#include "testing.h"

// The mesh that `--mesh auto` chooses, beside plans of stated meshes.
namespace sluice::models::mesh_choice_test {
using engine::Link;
using engine::machines::small_machine;

std::vector<std::string> texts(int ranks, bool on_several_hosts) {
  std::vector<std::string> all;
  for (const comm::Mesh& mesh : meshes_of(ranks, on_several_hosts)) all.push_back(mesh.text());
  return all;
}

TEST(MeshesOf, AreAllFactorizationsTheSimplestFirst) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts(1, true), Texts{"data=1"});
  EXPECT_EQ(texts(3, false), (Texts{"data=3", "pipeline=3", "sequence=3", "tensor=3"}));
  EXPECT_EQ(texts(4, true),
            (Texts{"data=4", "data=2,pipeline=2", "pipeline=2,data=2", "pipeline=4", "data=2,sequence=2",
                   "pipeline=2,sequence=2", "sequence=4", "data=2,tensor=2", "pipeline=2,tensor=2",
                   "sequence=2,tensor=2", "tensor=4"}));
  EXPECT_EQ(texts(8, false).size(), 20u);
  EXPECT_EQ(texts(8, true).size(), 24u);
}

struct Case {
  const char* name;
  int ranks, hosts;
  std::optional<Link> link;
  std::uint64_t memory;
  std::size_t accumulate, length;
  bool reproducible;
  engine::PipelineOrder pipeline;
};
const Case kCases[] = {
    {"a fast link", 8, 1, Link{1e11, 1e-6}, kGiB, 32, 256, false, engine::PipelineOrder::k1F1B},
    {"a slow link", 8, 2, Link{1e7, 1e-4}, kGiB, 32, 64, false, engine::PipelineOrder::k1F1B},
    {"few micro-batches", 8, 1, Link{1e9, 1e-5}, kGiB, 2, 256, false, engine::PipelineOrder::k1F1B},
    {"no link", 6, 1, {}, kGiB, 12, 64, false, engine::PipelineOrder::k1F1B},
    {"little memory", 4, 2, Link{1e9, 1e-5}, 135 * kMiB, 16, 256, false, engine::PipelineOrder::k1F1B},
    {"the same bits", 8, 4, Link{1e9, 1e-5}, kGiB, 8, 256, true, engine::PipelineOrder::k1F1B},
    {"a pipeline", 4, 1, Link{1e9, 1e-5}, kGiB, 4, 64, false, engine::PipelineOrder::kZeroBubbleH1},
};

TrainSettings settings_of(const Case& c) {
  TrainSettings s;
  s.model = "mini";
  s.memory = c.memory;
  s.batch = 1;
  s.accumulate = c.accumulate;
  s.length = c.length;
  s.threads = 1;
  s.link = c.link;
  s.plan.reproducible = c.reproducible;
  s.pipeline = c.pipeline;
  s.ranks = {0, c.ranks};
  s.ranks_here = c.ranks / c.hosts;
  for (int rank = 0; rank < c.ranks && c.hosts > 1; ++rank) s.ranks.hosts.push_back(rank / s.ranks_here);
  s.chooses_mesh = true;
  return s;
}

class MeshChoiceTest : public engine::machines::MachineFile {
 protected:
  PlanResult planned(const TrainSettings& s) const { return plan_for_machine(s, machine_); }
  // Nothing where the stated mesh is refused, or does not fit.
  std::optional<double> seconds_on(TrainSettings s, const comm::Mesh& mesh) const {
    s.chooses_mesh = false;
    s.mesh = mesh;
    try {
      const PlanResult plan = planned(s);
      return plan.pipeline ? plan.pipeline->time.step : plan.plan.time.step;
    } catch (const Error&) {
      return std::nullopt;
    }
  }
  const engine::Machine machine_ = read(small_machine());
};

TEST_F(MeshChoiceTest, IsTheShortestOfAllStatedMeshes) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const TrainSettings s = settings_of(c);
    const PlanResult plan = planned(s);
    ASSERT_TRUE(plan.mesh_choice);
    const std::vector<comm::Mesh> meshes = meshes_of(c.ranks, c.hosts > 1);
    std::vector<std::optional<double>> seconds;
    double shortest = 1e9;
    for (const comm::Mesh& mesh : meshes) {
      seconds.push_back(seconds_on(s, mesh));
      shortest = std::min(shortest, seconds.back().value_or(1e9));
    }
    const auto first =
        std::ranges::find_if(seconds, [&](const auto& each) { return each && *each <= 1.1 * shortest; });
    EXPECT_EQ(plan.mesh_choice->mesh.text(),
              meshes[static_cast<std::size_t>(first - seconds.begin())].text());
    ASSERT_EQ(plan.mesh_choice->tried.size(), meshes.size());
    for (std::size_t i = 0; i < meshes.size(); ++i) {
      const MeshChoice::Tried& tried = plan.mesh_choice->tried[i];
      SCOPED_TRACE(meshes[i].text());
      EXPECT_EQ(tried.mesh, meshes[i]);
      if (tried.fits()) {
        EXPECT_EQ(tried.seconds, seconds[i]);
      } else if (tried.why_not.empty()) {
        EXPECT_GE(seconds[i].value_or(1e9), tried.at_least * (1 - 1e-9)) << "which was not planned";
      } else {
        EXPECT_FALSE(seconds[i]) << tried.why_not;
      }
    }
    EXPECT_EQ(seconds_on(s, plan.mesh_choice->mesh),
              plan.pipeline ? plan.pipeline->time.step : plan.plan.time.step);
  }
}

TEST_F(MeshChoiceTest, LeavesOutWhatAStatedMeshIsRefusedFor) {
  const auto why_not = [](const PlanResult& plan, const std::string& mesh) {
    for (const MeshChoice::Tried& tried : plan.mesh_choice->tried)
      if (tried.mesh.text() == mesh) return tried.why_not;
    return std::string("none such");
  };
  const PlanResult same_bits = planned(settings_of(kCases[5])), few = planned(settings_of(kCases[2])),
                   pipeline = planned(settings_of(kCases[6]));
  EXPECT_THAT(why_not(same_bits, "data=4,sequence=2"), HasSubstr("give --sequence-grain 2,"));
  TrainSettings in_pieces = settings_of(kCases[5]);
  in_pieces.sequence_grain = 2;
  EXPECT_EQ(why_not(planned(in_pieces), "data=4,sequence=2"), "");
  EXPECT_THAT(why_not(few, "data=8"), HasSubstr("8 ranks cannot share evenly"));
  EXPECT_THAT(why_not(pipeline, "data=4"), HasSubstr("there is no pipeline"));
  EXPECT_THAT(to_text(*few.mesh_choice), AllOf(HasSubstr(few.mesh_choice->mesh.text()), HasSubstr(" s, ")));
  const Json json = to_json(*few.mesh_choice);
  EXPECT_EQ(json.at("chosen"), few.mesh_choice->mesh.text());
  EXPECT_EQ(json.at("tried").size(), 20u);
}

std::string refusal(const std::function<void()>& plan, ErrorCode code) {
  try {
    plan();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "";
}

TEST_F(MeshChoiceTest, NamesTheMeshThatLacksLeastWhereNoneFits) {
  TrainSettings s = settings_of(kCases[4]);
  s.memory = 40 * kMiB;
  const std::string text = refusal([&] { planned(s); }, ErrorCode::kBudget);
  EXPECT_THAT(text, AllOf(HasSubstr("no mesh of 4 ranks fits. --mesh "), HasSubstr(" lacks least: "),
                          HasSubstr("memory is short by")));
  // The memory that the advice names is enough for that mesh.
  const std::size_t at = text.find("--mesh ", text.find("fits")) + 7, advice = text.find("--memory ");
  ASSERT_NE(advice, std::string::npos) << text;
  s.memory = std::stoul(text.substr(advice + 9)) * kMiB;
  s.disk.clear();
  const comm::Mesh mesh = comm::Mesh::parse(text.substr(at, text.find(' ', at) - at));
  EXPECT_TRUE(seconds_on(s, mesh)) << text;
}

TEST_F(MeshChoiceTest, IsRefusedWhereNoMeshIsPossible) {
  TrainSettings s = settings_of(kCases[0]);
  s.ranks = {0, 11};
  EXPECT_THAT(refusal([&] { planned(s); }, ErrorCode::kInvalidArgument),
              AllOf(HasSubstr("no mesh of 11 ranks is possible: data=11 is not, since"),
                    HasSubstr("11 ranks cannot share evenly"), HasSubstr("pipeline=11 is not, since"),
                    HasSubstr("the model has 6 blocks"), HasSubstr("tensor=11 is not")));
}

}  // namespace sluice::models::mesh_choice_test
