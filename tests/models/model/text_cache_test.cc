#include "models/model/text_cache.h"

#include "models/cases.h"
#include "testing.h"

namespace sluice::models::testing::text_cache_test {

constexpr int kThreads = 2;

class TextCacheTest : public ::testing::TestWithParam<ModelConfig> {
 protected:
  TextCacheTest() {
    randomize(kept_.source);
    randomize(plain_.source);
  }

  std::vector<float> logits(PlainRun& run, std::span<const std::int32_t> text, TextCache* cache) {
    std::vector<float> values(model_.config().vocabulary, std::nanf(""));
    run.executor.next_logits(text, values, cache);
    return values;
  }
  static float distance(const std::vector<float>& a, const std::vector<float>& b) {
    float most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return std::isnan(most) || a.empty() ? INFINITY : most;
  }

  Model model_{GetParam(), Dtype::kF32, 1, 12};
  Threads threads_{kThreads};
  std::unique_ptr<kernels::MatrixLibrary> library_ = kernels::load_matrix_library(kThreads);
  PlainRun kept_{model_, "none", 1, 1, threads_, *library_},
      plain_{model_, "none", 1, 1, threads_, *library_};
  GuardedMemory memory_{TextCache::bytes(model_.config(), Dtype::kF32, 10)};
  TextCache cache_{model_.config(), Dtype::kF32, 10, memory_.bytes()};
  std::vector<std::int32_t> text_ = {5, 1, 36, 7, 7, 0, 12, 30, 2, 9, 11, 4};
};

TEST_P(TextCacheTest, ATextThatGoesOnHasTheLogitsOfTheWholeText) {
  // The first two tokens at once, the rest one by one, up to the capacity and beyond.
  for (std::size_t count = 2; count <= text_.size(); ++count) {
    const std::span text = std::span(text_).first(count);
    EXPECT_EQ(cache_.is_continued_by(text), count > 2 && count <= 10) << count;
    EXPECT_LT(distance(logits(kept_, text, &cache_), logits(plain_, text, nullptr)), 2e-5f) << count;
    EXPECT_EQ(cache_.stored(), count <= 10 ? count : 0);
  }
  EXPECT_TRUE(memory_.guards_hold());
  EXPECT_TRUE(kept_.guards_hold());
}

TEST_P(TextCacheTest, WhatIsStoredIsUsed) {
  logits(kept_, std::span(text_).first(4), &cache_);
  std::ranges::fill(memory_.bytes(), std::byte{0});
  const std::span text = std::span(text_).first(5);
  EXPECT_GT(distance(logits(kept_, text, &cache_), logits(plain_, text, nullptr)), 1e-3f);
}

TEST_P(TextCacheTest, AnotherTextIsComputedWhole) {
  logits(kept_, std::span(text_).first(4), &cache_);
  const std::vector<std::int32_t> other = {5, 1, 36, 8, 7};
  EXPECT_EQ(logits(kept_, other, &cache_), logits(plain_, other, nullptr));
  EXPECT_EQ(cache_.stored(), other.size());
  const std::span shifted = std::span(text_).subspan(1, 5);
  EXPECT_EQ(logits(kept_, shifted, &cache_), logits(plain_, shifted, nullptr));
}

INSTANTIATE_TEST_SUITE_P(Families, TextCacheTest,
                         ::testing::Values(small_gpt2(), small_gpt2(false, 0.1f), small_llama(),
                                           small_llama(true, true), small_mixed()));

}  // namespace sluice::models::testing::text_cache_test
