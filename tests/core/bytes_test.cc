#include "core/bytes.h"

#include "core/error.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::bytes_test {

TEST(Bytes, RoundingAndDividing) {
  static_assert(round_up(0, 8) == 0 && round_up(1, 8) == 8 && round_up(8, 8) == 8 && round_up(9, 8) == 16);
  static_assert(divide_up(0, 8) == 0 && divide_up(1, 8) == 1 && divide_up(16, 8) == 2 &&
                divide_up(17, 8) == 3);
  static_assert(kHugePage == 2097152 && kGiB == 1073741824);
}

TEST(ParseSize, AcceptedForms) {
  const std::vector<std::pair<const char*, std::uint64_t>> forms = {
      {"0", 0},
      {"100000", 100000},
      {"17B", 17},
      {"1KiB", 1024},
      {"1KB", 1000},
      {"512MiB", 536870912},
      {"4GiB", 4294967296},
      {"4Gi", 4294967296},
      {"1.5GB", 1500000000},
      {"1.5G", 1500000000},
      {"0.5MiB", 524288},
      {"2TiB", 2199023255552},
      {"3TB", 3000000000000},
      {"7M", 7000000},
  };
  for (const auto& [text, bytes] : forms) EXPECT_EQ(parse_size(text), bytes) << text;
}

TEST(ParseSize, PartsOfAByteLackAUnit) {
  for (const char* text : {"1.5", "0.5B"}) {
    EXPECT_THAT(message_of([&] { parse_size(text); }), testing::HasSubstr("the unit is missing")) << text;
  }
  EXPECT_EQ(parse_size("2.0"), 2u);
}

TEST(ParseSize, MalformedSizesAreRefusedWithTheForms) {
  for (const char* text : {"",
                           " ",
                           "GiB",
                           "x",
                           "-1",
                           "-1GiB",
                           "+1",
                           "1 GiB",
                           "1GiB ",
                           " 1GiB",
                           "1gib",
                           "1PiB",
                           "1Bi",
                           "1GiBB",
                           "1iB",
                           "1GB4",
                           "1e9",
                           "nan",
                           "inf",
                           "0x10",
                           "1..5G",
                           "1,5G",
                           "99999999999999999999",
                           "9000000TiB",
                           "1K\n",
                           "1BB"}) {
    EXPECT_THAT(message_of([&] { parse_size(text); }), testing::HasSubstr("512MiB")) << text;
  }
}

TEST(ParseSize, ManyDigitsKeepTheirValue) {
  EXPECT_EQ(parse_size("9007199254740992"), 9007199254740992u);
  EXPECT_EQ(parse_size("1099511627777"), 1099511627777u);
}

TEST(FormatSize, ForPeople) {
  EXPECT_EQ(format_size(0), "0 B");
  EXPECT_EQ(format_size(17), "17 B");
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(1024), "1.00 KiB");
  EXPECT_EQ(format_size(512 * kMiB), "512 MiB");
  EXPECT_EQ(format_size(kGiB + kGiB / 4), "1.25 GiB");
  EXPECT_EQ(format_size(25 * kGiB + kGiB / 2), "25.5 GiB");
  EXPECT_EQ(format_size(5000ull * 1024 * kGiB), "5000 TiB");
  EXPECT_THAT(format_size(std::numeric_limits<std::uint64_t>::max()), testing::EndsWith(" TiB"));
}

}  // namespace sluice::bytes_test
