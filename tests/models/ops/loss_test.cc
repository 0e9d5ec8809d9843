#include "models/ops/loss.h"
#include "testing.h"

namespace sluice::models::loss_test {

std::size_t rows_at_once(std::size_t rows, std::size_t width, std::size_t vocabulary) {
  LossShape shape;
  shape.rows = rows, shape.width = width, shape.vocabulary = vocabulary;
  return logit_rows(shape);
}

// A tile must not be so small that the head's weight is read many times.
TEST(LogitRows, LargeHeadsAreGoneThroughFewTimes) {
  EXPECT_EQ(rows_at_once(1024, 768, 50257), 352);
  EXPECT_EQ(rows_at_once(1024, 4096, 128256), 512);
}

TEST(LogitRows, LogitsTakeAtMostHalfOfTheHeadsGradientOrLittle) {
  for (const std::size_t width : {16, 64, 768, 1600, 4096})
    for (const std::size_t vocabulary : {256, 5000, 50257, 128256})
      for (const std::size_t rows : {1, 100, 1000, 8192}) {
        const std::size_t logits = rows_at_once(rows, width, vocabulary) * vocabulary * sizeof(float);
        const std::size_t sixteen_rows = 16 * vocabulary * sizeof(float);  // tiles are of whole panels
        EXPECT_LE(logits, std::max(vocabulary * width * sizeof(float) / 2, kLogitsBytes) + sixteen_rows)
            << rows << " rows of width " << width << ", vocabulary " << vocabulary;
      }
}

TEST(LogitRows, FewRowsAreOnePiece) { EXPECT_EQ(rows_at_once(100, 768, 50257), 100); }

}  // namespace sluice::models::loss_test
