#include "core/printable.h"
#include "testing.h"

namespace sluice::printable_test {

TEST(Printable, LeavesTextAsItIs) {
  for (const char* text :
       {"", "model.layers.0.weight", "caf\u00e9 \u65e5\u672c \U0001f642", "C:\\n \\x1b", "\u00a0"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(printable("a\x1b[2Jb"), "a\\x1b[2Jb");
  EXPECT_EQ(printable(std::string_view("\0\x07\r\x7f", 4)), "\\x00\\x07\\x0d\\x7f");
  EXPECT_EQ(printable("\u009b0m"), "\\xc2\\x9b0m");
}

TEST(Printable, ShowsBytesThatAreNoText) {
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xe2\x82 \x9b"), "\\xe2\\x82 \\x9b");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");  // an overlong form
}

TEST(Printable, KeepsLinesWhereThereAreSeveral) {
  EXPECT_EQ(printable("a\nb"), "a\\nb");
  EXPECT_EQ(printable("a\nb\r", Lines::kKeep), "a\nb\\x0d");
}

}  // namespace sluice::printable_test
