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

// Of 4 ranks that share two micro-batches, not all have data of their own.
TEST_F(MeshAutoTest, HasTheBitsOfTheMeshThatItChooses) {
  const auto trained = [&](const std::string& name, const std::string& mesh) {
    return run_sluice(words(name, 4, 2, "--accumulate 2 --dtype bf16 --mesh " + mesh));
  };
  const Outcome outcome = trained("auto", "auto");
  expect_done(outcome);
  const std::string mesh = mesh_of(outcome);
  ASSERT_FALSE(mesh.empty()) << outcome.out;
  expect_done(trained("stated", mesh));
  EXPECT_EQ(losses("auto"), losses("stated"));
  EXPECT_TRUE(tensors("auto", 2) == tensors("stated", 2));
  EXPECT_LE(rows("auto").back().at("peak_memory"), rows("auto").back().at("predicted_peak"));
}

TEST_F(MeshAutoTest, IsToldByThePlan) {
  const Json meshes = planned(words("plan", 4, 2, "--mesh auto --link 10Gbit/s,20us")).at("meshes");
  ASSERT_EQ(meshes.at("tried").size(), 10u);
  EXPECT_EQ(meshes.at("tried")[0].at("mesh"), "data=4");
  EXPECT_GT(meshes.at("tried")[0].at("step_seconds"), 0);
}

TEST_F(MeshAutoTest, IsRefusedWithWhatIsWrong) {
  expect_refused({{2, "--mesh auto --memory 30MiB", {"no mesh of 2 ranks fits", "lacks least"}, 3},
                  {0, "--mesh auto", {"--mesh auto", "give --ranks N", "mpirun"}},
                  {2, "--mesh auto --stages 0,1-2", {"--stages '0,1-2'", "--mesh auto", "state the mesh"}},
                  {2, "--mesh auto,data=2", {"'auto'", "data=2,pipeline=4"}},
                  {7, "--mesh auto", {"no mesh of 7 ranks is possible", "7 ranks cannot share"}}});
}

}  // namespace sluice::cli::mesh_auto_test
