#include "bindings/ranks_runs.h"
#include "testing.h"

// Runs that choose their mesh, as users start them.
namespace sluice::cli::mesh_auto_test {

class MeshAutoTest : public RanksTest {
 protected:
  // The mesh of the table that the run has shown.
  static std::string mesh_of(const Outcome& outcome) {
    const std::string before = "mesh              ", text = outcome.out + outcome.error;
    const std::size_t at = text.find(before);
    if (at == std::string::npos) return "";
    return text.substr(at + before.size(), text.find(", of", at) - at - before.size());
  }
};

// Of 3 ranks that share one micro-batch, no two have data of their own; with 4, two may.
TEST_F(MeshAutoTest, HasTheBitsOfTheMeshThatItChooses) {
  for (const auto& [ranks, flags] : {std::pair(3, "--accumulate 1"), {4, "--accumulate 2 --dtype bf16"}}) {
    SCOPED_TRACE(flags);
    const std::string number = std::to_string(ranks), own = "auto" + number, stated = "stated" + number;
    const auto trained = [&](const std::string& name, const std::string& mesh) {
      std::vector<std::string> all = words(name, ranks, 2, flags + std::string(" --mesh ") + mesh);
      const auto given = std::ranges::find(all, "--accumulate");
      all.erase(given, given + 2);
      return run_sluice(all);
    };
    const Outcome outcome = trained(own, "auto");
    expect_done(outcome);
    const std::string mesh = mesh_of(outcome);
    ASSERT_FALSE(mesh.empty()) << outcome.out;
    expect_done(trained(stated, mesh));
    EXPECT_EQ(losses(own), losses(stated));
    EXPECT_TRUE(tensors(own, 2) == tensors(stated, 2));
    EXPECT_LE(rows(own).back().at("peak_memory"), rows(own).back().at("predicted_peak"));
  }
}

TEST_F(MeshAutoTest, IsToldByThePlan) {
  std::vector<std::string> all = words("plan", 4, 2, "--mesh auto --json --link 10Gbit/s,20us");
  all[0] = "plan";
  const Outcome outcome = run_sluice(all);
  ASSERT_EQ(outcome.status, 0) << outcome.error;
  const Json meshes = Json::parse(outcome.out).at("meshes");
  ASSERT_EQ(meshes.at("tried").size(), 10u);
  EXPECT_EQ(meshes.at("tried")[0].at("mesh"), "data=4");
  EXPECT_GT(meshes.at("tried")[0].at("step_seconds"), 0);
}

TEST_F(MeshAutoTest, IsRefusedWithWhatIsWrong) {
  const struct {
    int ranks;
    std::string flags;
    int status;
    std::vector<std::string> words;
  } cases[] = {
      {0, "--mesh auto", 2, {"--mesh auto", "give --ranks N", "mpirun"}},
      {2, "--mesh auto --stages 0,1-2", 2, {"--stages '0,1-2'", "--mesh auto", "state the mesh"}},
      {2, "--mesh auto,data=2", 2, {"'auto'", "data=2,pipeline=4"}},
      {7, "--mesh auto", 2, {"no mesh of 7 ranks is possible", "7 ranks cannot share"}},
      {2, "--mesh auto --memory 30MiB", 3, {"no mesh of 2 ranks fits", "lacks least"}},
  };
  for (const auto& c : cases)
    for (const char* command : {"plan", "train"}) {
      SCOPED_TRACE(command + (" " + c.flags));
      std::vector<std::string> all = words("run", c.ranks, 1, c.flags);
      all[0] = command;
      const auto erase = [&](const char* flag) {
        const auto given = std::ranges::find(all, flag);
        all.erase(given, given + 2);
      };
      if (c.ranks == 0) erase("--ranks");
      if (c.flags.find("--memory") != std::string::npos) erase("--memory");
      const Outcome outcome = run_sluice(all);
      EXPECT_EQ(outcome.status, c.status);
      for (const std::string& word : c.words) EXPECT_THAT(outcome.error, HasSubstr(word));
      EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
    }
}

}  // namespace sluice::cli::mesh_auto_test
