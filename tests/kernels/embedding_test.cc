#include "kernels/embedding.h"

#include "kernels/harness.h"

namespace sluice::kernels::embedding_test {
using namespace sluice::test;

constexpr std::int32_t kVocabulary = 50;

class Embedding : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(Embedding, ForwardGathersRowsAndAddsPositions) {
  const std::size_t length = 17, rows = 3 * length, first = 4;
  for (const Dtype type : kFloatTypes)
    for (const std::size_t width : {1, 16, 100}) {
      const auto tokens = random_tokens(rows, kVocabulary, 1);
      const TestArray table(type, random_values(kVocabulary * width, 2));
      const TestArray positions(type, random_values((first + length) * width, 3));
      TestArray y(type, rows * width), alone(type, rows * width);
      embedding_forward(threads_, tokens, length, width, table, positions, first, y);
      embedding_forward(threads_, tokens, length, width, table, ConstArray{}, first, alone);
      const auto row = [&](std::size_t i) { return table[tokens[i / width] * width + i % width]; };
      expect_close(alone, row, 0, 0, "without positions");
      expect_close(
          y, [&](auto i) { return row(i) + positions[(first + i / width % length) * width + i % width]; },
          tolerance(type), 0, "with positions");
    }
}

std::vector<double> table_gradient(const std::vector<std::int32_t>& tokens, std::size_t width,
                                   const TestArray& dy) {
  std::vector<double> sum(kVocabulary * width, 0.25);
  for (std::size_t i = 0; i < dy.size(); ++i) sum[tokens[i / width] * width + i % width] += dy[i];
  return sum;
}

TEST_F(Embedding, BackwardAddsEachTokensRows) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t rows : {0, 1, 64, 500})
      for (const std::size_t width : {1, 100, 600}) {
        // With few tokens, the rows of one token are more than a task has.
        const auto tokens = random_tokens(rows, rows == 500 ? 3 : kVocabulary, 1);
        const TestArray dy(type, random_values(rows * width, 2));
        TestArray dtable(Dtype::kF32, std::vector<float>(kVocabulary * width, 0.25f));
        std::vector<std::uint64_t> workspace(embedding_backward_workspace(rows) / 8);
        embedding_backward(threads_, tokens, width, dy, dtable.f32(), workspace.data());
        const auto expected = table_gradient(tokens, width, dy);
        expect_close(
            dtable, [&](auto i) { return expected[i]; }, 1e-6, 2e-5);
      }
}

TEST_F(Embedding, BackwardAddsATokensRowsInOrderBeforeTheTable) {
  const std::vector<std::int32_t> tokens = {1, 0, 1, 1};
  const TestArray dy(Dtype::kF32, std::vector<float>{1e8f, 5, 3, -1e8f});
  TestArray dtable(Dtype::kF32, std::vector<float>{0, 1});
  std::uint64_t workspace[4];
  embedding_backward(threads_, tokens, 1, dy, dtable.f32(), workspace);
  EXPECT_EQ(dtable[0], 5);
  EXPECT_EQ(dtable[1], 1 + ((1e8f + 3.0f) - 1e8f));
}

TEST_F(Embedding, PositionGradients) {
  const std::size_t batch = 5, length = 13, capacity = 20;
  for (const Dtype type : kFloatTypes)
    for (const std::size_t width : {1, 100, 600})
      for (const bool accumulate : {false, true}) {
        const TestArray dy(type, random_values(batch * length * width, 2));
        TestArray out(Dtype::kF32, std::vector<float>(capacity * width, 0.5f));
        position_backward(threads_, batch, length, capacity, width, dy, out.f32(), accumulate);
        expect_close(
            out,
            [&](std::size_t i) {
              double sum = accumulate ? 0.5 : 0;
              for (std::size_t b = 0; i / width < length && b < batch; ++b) sum += dy[b * length * width + i];
              return sum;
            },
            1e-6, 2e-6);
      }
}

TEST(SameBits, Embedding) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([type](Threads& threads) {
      const std::size_t length = 50, rows = 10 * length, width = 301;
      const auto tokens = random_tokens(rows, 20, 1);
      const TestArray table(type, random_values(20 * width, 2)),
          positions(type, random_values(length * width, 3));
      TestArray y(type, rows * width), dtable(Dtype::kF32, 20 * width),
          dpositions(Dtype::kF32, length * width);
      std::vector<std::uint64_t> workspace(embedding_backward_workspace(rows) / 8);
      embedding_forward(threads, tokens, length, width, table, positions, 0, y);
      embedding_backward(threads, tokens, width, y, dtable.f32(), workspace.data());
      position_backward(threads, 10, length, length, width, y, dpositions.f32(), false);
      return y.bytes() + dtable.bytes() + dpositions.bytes();
    });
}

}  // namespace sluice::kernels::embedding_test
