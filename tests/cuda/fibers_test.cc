#include "cuda/fake/fibers.h"

#include <cuda.h>

#include "cuda/fake/memory.h"
#include "testing.h"

// The fake's threads of a GPU find barriers that are left out, and those that not all threads of a block
// reach.
namespace sluice::fake_cuda::fibers_test {

constexpr unsigned kThreads = 256, kWarp = 32, kBlocks = 4;

enum class Barrier { kThere, kLeftOut, kDivergent };
struct Sums {
  const float* in;
  float* out;
  Barrier barrier;
};

// Each block sums as many values as it has threads: warps by shuffles, and these by shared memory.
void sum_blocks(const void* given) {
  const Sums& sums = *static_cast<const Sums*>(given);
  __shared__ float parts[kThreads / kWarp];
  float sum = sums.in[blockIdx.x * kThreads + threadIdx.x];
  const unsigned thread = threadIdx.x, block = blockIdx.x;
  for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if (thread % kWarp == 0) parts[thread / kWarp] = sum;
  if (sums.barrier == Barrier::kThere || (sums.barrier == Barrier::kDivergent && thread > 0)) __syncthreads();
  if (thread == 0) sums.out[block] = std::accumulate(std::begin(parts), std::end(parts), 0.0f);
}

int wrong_sums(Barrier barrier) {
  std::vector<float> in(kBlocks * kThreads), out(kBlocks);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 7 + i / kThreads);
  const Sums sums{in.data(), out.data(), barrier};
  int wrong = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    run_kernel({sum_blocks, sizeof sums}, kBlocks, kThreads, &sums, random);
    for (unsigned block = 0; block < kBlocks; ++block)
      wrong += out[block] != std::accumulate(&in[block * kThreads], &in[block * kThreads] + kThreads, 0.0f);
  }
  return wrong;
}

TEST(Fibers, ABarrierThatIsLeftOutShows) {
  EXPECT_EQ(wrong_sums(Barrier::kThere), 0);
  EXPECT_GT(wrong_sums(Barrier::kLeftOut), 0);
}

TEST(Fibers, ABarrierThatNotAllReachIsRefused) {
  try {
    wrong_sums(Barrier::kDivergent);
    FAIL() << "no refusal";
  } catch (const Refusal& refusal) {
    EXPECT_EQ(refusal.result, CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_NE(refusal.misuse.find("barrier"), std::string::npos) << refusal.misuse;
  }
}

}  // namespace sluice::fake_cuda::fibers_test
