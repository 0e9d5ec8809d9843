#include "kernels/limits.h"

#include "kernels/harness.h"

namespace sluice::kernels::limits_test {
using namespace sluice::test;

constexpr std::size_t kBytes = 64 * kStreamBlocks;

// 64 bytes that are aligned as a cache line.
struct alignas(64) Line {
  std::uint32_t words[16];
};

class Limits : public testing::Test {
 protected:
  static std::vector<Line> filled(std::size_t bytes, std::uint32_t seed) {
    std::vector<Line> lines(bytes / sizeof(Line));
    std::mt19937 random(seed);
    for (Line& line : lines)
      for (std::uint32_t& word : line.words) word = random();
    return lines;
  }
  static MemoryStream stream(std::vector<Line>& lines, MemoryStream::Touch touch) {
    return {reinterpret_cast<std::byte*>(lines.data()), lines.size() * sizeof(Line), touch};
  }
  static std::uint32_t all_words(const std::vector<Line>& lines) {
    std::uint32_t result = 0;
    for (const Line& line : lines)
      for (const std::uint32_t word : line.words) result ^= word;
    return result;
  }
  static bool same(const std::vector<Line>& a, const std::vector<Line>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(Line)) == 0;
  }
  Threads threads_{3};
};

TEST_F(Limits, EveryByteIsTouchedAsAsked) {
  for (int way = 0; way < 4; ++way) {
    const Stores stores = way % 2 == 0 ? Stores::kPlain : Stores::kPastCaches;
    const Turns turns = way / 2 == 0 ? Turns::kPages : Turns::kLines;
    std::vector<Line> read = filled(2 * kBytes, 1), wide = filled(kBytes * 13, 2), update = filled(kBytes, 3),
                      write = filled(kBytes, 4);
    const std::vector<Line> read_before = read, update_before = update;
    const std::vector<MemoryStream> streams = {
        stream(read, MemoryStream::Touch::kRead), stream(update, MemoryStream::Touch::kUpdate),
        stream(write, MemoryStream::Touch::kWrite), stream(wide, MemoryStream::Touch::kRead)};
    EXPECT_EQ(go_through(threads_, streams, stores, turns), all_words(read) ^ all_words(wide));
    EXPECT_TRUE(same(read, read_before));
    EXPECT_TRUE(same(update, update_before));
    EXPECT_TRUE(same(write, std::vector<Line>(write.size(), Line{})));
  }
}

TEST_F(Limits, StreamsThatCannotBeCutEvenlyAreRefused) {
  std::vector<Line> lines(kStreamBlocks + 1);
  const MemoryStream uneven = stream(lines, MemoryStream::Touch::kRead);
  EXPECT_THROW(go_through(threads_, {&uneven, 1}, Stores::kPlain), Error);
  const MemoryStream shifted = {uneven.data + 4, kBytes, MemoryStream::Touch::kRead};
  EXPECT_THROW(go_through(threads_, {&shifted, 1}, Stores::kPlain), Error);
}

TEST_F(Limits, AnUpdateMovesItsBytesTwice) {
  EXPECT_EQ((MemoryStream{nullptr, 100, MemoryStream::Touch::kUpdate}.moved()), 200u);
  EXPECT_EQ((MemoryStream{nullptr, 100, MemoryStream::Touch::kWrite}.moved()), 100u);
}

TEST_F(Limits, MultiplyAddsAreCounted) {
  const double once = multiply_add(threads_, 1000);
  EXPECT_GT(once, 2.0 * 1000 * 3);
  EXPECT_EQ(multiply_add(threads_, 3000), 3 * once);
}

}  // namespace sluice::kernels::limits_test
