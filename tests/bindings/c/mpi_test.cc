#include "tests/bindings/c/support.h"
#include "tests/comm/under_mpirun.h"

// Tests of ranks that mpirun has started.
namespace sluice_c_test::mpi_test {

class RanksOfMpi : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = sluice::comm::missing_for_mpi(); !missing.empty())
      GTEST_SKIP() << missing;
  }
  static bool is_launched() { return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr; }
  static std::string example() {
    return (std::filesystem::path(sluice::comm::own_program()).parent_path() / "c_example_of_ranks").string();
  }
};

TEST_F(RanksOfMpi, AreNumberedByTheLauncherAndMadeOnce) {
  if (!is_launched()) return sluice::comm::expect_success_under_mpirun(3);
  sluice_ranks *ranks = nullptr, *again = nullptr;
  ASSERT_OK(sluice_ranks_create_mpi(nullptr, &ranks));
  uint32_t rank = 0, size = 0;
  EXPECT_OK(sluice_ranks_rank(ranks, &rank));
  EXPECT_OK(sluice_ranks_size(ranks, &size));
  EXPECT_EQ(size, 3u);
  EXPECT_EQ(std::to_string(rank), std::getenv("OMPI_COMM_WORLD_RANK"));
  EXPECT_OK(sluice_ranks_barrier(ranks, "all have begun"));
  sluice_ranks_destroy(ranks);
  expect_error(sluice_ranks_create_mpi(nullptr, &again), SLUICE_STATE, {"MPI", "before"});
}

TEST_F(RanksOfMpi, ThatAreOneTrainAlone) {
  if (!is_launched()) return sluice::comm::expect_success_under_mpirun(1);
  sluice_ranks* ranks = nullptr;
  expect_error(sluice_ranks_create_mpi(nullptr, &ranks), SLUICE_STATE, {"mpirun has started one process"});
}

TEST_F(RanksOfMpi, NeedALauncher) {
  sluice_ranks* ranks = nullptr;
  expect_error(sluice_ranks_create_mpi(nullptr, &ranks), SLUICE_STATE, {"no launcher of MPI", "mpirun"});
  expect_error(sluice_ranks_create_mpi(nullptr, nullptr), SLUICE_INVALID_ARGUMENT, {"ranks"});
}

TEST_F(RanksOfMpi, AreWhatTheExampleTrainsWith) {
  sluice::comm::MpirunProcess process(3, {example(), "mpi"});
  EXPECT_EQ(process.wait(), 0) << process.output();
  EXPECT_NE(process.output().find("all 3 ranks have the same values"), std::string::npos) << process.output();
}

}  // namespace sluice_c_test::mpi_test
