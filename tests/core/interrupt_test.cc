#include "core/interrupt.h"

#include "testing.h"

namespace sluice::interrupt_test {

using std::chrono::steady_clock;

void look_for(std::chrono::milliseconds time) {
  for (const auto until = steady_clock::now() + time; steady_clock::now() < until;) look_for_interrupt();
}

TEST(Interrupt, EndsTheWorkOfItsThreadAlone) {
  look_for(std::chrono::milliseconds(1));  // nobody looks
  int looks = 0;
  {
    const Interruptible outer([&] { ++looks; });
    std::thread([] { look_for(std::chrono::milliseconds(120)); }).join();
    EXPECT_EQ(looks, 0);
    look_for(std::chrono::milliseconds(120));
    EXPECT_GE(looks, 1);
    EXPECT_LE(looks, 4);
    const int before = looks;
    {
      const Interruptible inner([] { throw 7; });
      EXPECT_THROW(look_for(std::chrono::seconds(10)), int);
    }
    EXPECT_EQ(looks, before);
    look_for(std::chrono::milliseconds(120));
    EXPECT_GT(looks, before);
  }
  const int before = looks;
  look_for(std::chrono::milliseconds(120));
  EXPECT_EQ(looks, before);
}

}  // namespace sluice::interrupt_test
