#include "tests/bindings/c/support.h"
#include "tests/comm/under_mpirun.h"

// Tests of ranks that mpirun has started.
namespace sluice_c_test::mpi_test {

constexpr uint32_t kElements = 1u << 20;  // large enough to be partitioned

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

sluice_engine* engine_of(sluice_ranks* ranks) {
  sluice_model* model = nullptr;
  sluice_engine* engine = nullptr;
  EXPECT_OK(sluice_model_create(&model));
  EXPECT_OK(sluice_model_add_unit(model, "unit", nullptr));
  const uint64_t shape[] = {kElements};
  sluice_parameter parameter = SLUICE_INIT(sluice_parameter);
  parameter.name = "weight";
  parameter.shape = shape;
  parameter.dimensions = 1;
  EXPECT_OK(sluice_model_add_parameter(model, &parameter, nullptr));
  sluice_engine_options options = SLUICE_INIT(sluice_engine_options);
  options.memory = 128u << 20;
  options.threads = 1;
  options.ranks = ranks;
  options.stage = SLUICE_STAGE(3);
  EXPECT_OK(sluice_engine_create(model, &options, &engine));
  sluice_model_destroy(model);
  return engine;
}

// Trains some steps with gradients of the rank's own, destroys the ranks, and returns the values.
std::vector<float> trained(sluice_ranks* ranks) {
  uint32_t rank = 0;
  EXPECT_OK(sluice_ranks_rank(ranks, &rank));
  sluice_engine* const engine = engine_of(ranks);
  if (engine == nullptr) return {};
  std::vector<float> values(kElements, 0.25f);
  const sluice_array array = {values.data(), SLUICE_F32};
  sluice_arrays arrays = SLUICE_INIT(sluice_arrays);
  arrays.parameters = arrays.arrays = 1;
  arrays.data = &array;
  EXPECT_OK(sluice_engine_set_values(engine, 0, sluice_read_values_from_arrays, &arrays));
  const sluice_group_settings group = {sizeof group, 0.01, 0, nullptr, 0};
  sluice_step_settings settings = SLUICE_INIT(sluice_step_settings);
  settings.groups = &group;
  settings.group_count = 1;
  for (uint32_t step = 0; step < 3; ++step) {
    EXPECT_OK(sluice_engine_begin_step(engine, nullptr));
    EXPECT_OK(sluice_engine_acquire(engine, 0, SLUICE_GRADIENT));
    const void* data = nullptr;
    EXPECT_OK(sluice_engine_parameter(engine, 0, &data));
    std::vector<float> gradient(static_cast<const float*>(data), static_cast<const float*>(data) + kElements);
    for (uint32_t i = 0; i < kElements; ++i)
      gradient[i] -= static_cast<float>((i * 31 + rank * 131 + step * 17) % 101) * 0.01f;
    EXPECT_OK(sluice_engine_add_gradient(engine, 0, gradient.data(), SLUICE_F32));
    EXPECT_OK(sluice_engine_release(engine, 0));
    EXPECT_OK(sluice_engine_step(engine, &settings, nullptr));
  }
  EXPECT_OK(sluice_engine_acquire(engine, 0, SLUICE_READ));
  const void* data = nullptr;
  EXPECT_OK(sluice_engine_parameter(engine, 0, &data));
  std::memcpy(values.data(), data, kElements * sizeof(float));
  EXPECT_OK(sluice_engine_release(engine, 0));
  EXPECT_OK(sluice_ranks_barrier(ranks, "nobody reads from another rank any more"));
  sluice_engine_destroy(engine);
  sluice_ranks_destroy(ranks);
  return values;
}

std::vector<float> trained_by_threads(uint32_t size) {
  int memory = -1;
  EXPECT_OK(sluice_ranks_memory(size, &memory));
  std::vector<float> values;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      sluice_ranks* ranks = nullptr;
      EXPECT_OK(sluice_ranks_create_local(memory, rank, nullptr, &ranks));
      std::vector<float> own = trained(ranks);
      if (rank == 0) values = std::move(own);
    });
  for (std::thread& thread : threads) thread.join();
  ::close(memory);
  return values;
}

TEST_F(RanksOfMpi, HaveTheBitsOfThreads) {
  if (!is_launched()) return sluice::comm::expect_success_under_mpirun(3);
  sluice_ranks* ranks = nullptr;
  ASSERT_OK(sluice_ranks_create_mpi(nullptr, &ranks));
  uint32_t rank = 0, size = 0;
  EXPECT_OK(sluice_ranks_rank(ranks, &rank));
  EXPECT_OK(sluice_ranks_size(ranks, &size));
  EXPECT_EQ(size, 3u);
  EXPECT_EQ(std::to_string(rank), std::getenv("OMPI_COMM_WORLD_RANK"));
  const std::vector<float> values = trained(ranks);
  EXPECT_NE(values, std::vector<float>(kElements, 0.25f));
  EXPECT_TRUE(values == trained_by_threads(size));
  sluice_ranks* again = nullptr;
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
