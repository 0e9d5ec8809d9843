#include "core/checksum.h"
#include "testing.h"

namespace sluice::checksum_test {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Published values of XXH3 (64 bits, no seed).
TEST(Checksum, KnownValues) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);
  EXPECT_EQ(checksum(bytes_of("a")), 0xe6c632b61e964e1fu);
  EXPECT_EQ(checksum(bytes_of("abc")), 0x78af5f94892f3950u);
}

TEST(Checksum, PartsGiveTheSameValue) {
  std::mt19937_64 random(7);
  std::vector<std::byte> data(10'000);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  const std::span<const std::byte> all(data);
  for (int round = 0; round < 200; ++round) {
    const auto part = all.first(random() % (data.size() + 1));
    Checksum sum;
    for (std::size_t at = 0; at < part.size();) {
      const std::size_t count = std::min<std::size_t>(random() % 700, part.size() - at);
      sum.add(part.subspan(at, count));
      at += count;
    }
    ASSERT_EQ(sum.value(), checksum(part)) << part.size();
  }
}

TEST(Checksum, EveryFlippedBitShows) {
  std::vector<std::byte> data(64, std::byte{0x5a});
  const std::uint64_t right = checksum(data);
  for (std::size_t bit = 0; bit < 512; ++bit) {
    data[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(checksum(data), right) << bit;
    data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(Checksum, ValueMayBeAskedBetweenPartsAndMoves) {
  Checksum first;
  first.add(bytes_of("a"));
  EXPECT_EQ(first.value(), checksum(bytes_of("a")));
  Checksum second = std::move(first);
  second.add(bytes_of("bc"));
  EXPECT_EQ(second.value(), checksum(bytes_of("abc")));
}

}  // namespace sluice::checksum_test
