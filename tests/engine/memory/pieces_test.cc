#include "engine/memory/pieces.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <vector>

namespace sluice::engine {
namespace pieces_test {

// Who reads learns of the end on the thread that brings, before that thread has come back from there.
TEST(Pieces, AreResizedAsSoonAsTheLastReaderHasWhatItWanted) {
  allocator::Ledger ledger;
  std::thread bringing;
  const auto bring = [&](const Pieces::Key&, std::byte* into, Done done) {
    bringing = std::thread([into, done] {
      *into = std::byte{7};
      done(nullptr);
    });
  };
  Pieces pieces(1, 1, bring);
  pieces.start(ledger);
  std::vector<std::byte> got(1);
  std::promise<void> has_it;
  pieces.read({}, got.size(), Pieces::copy_to(got, [&](const std::exception_ptr& error) {
                EXPECT_EQ(error, nullptr);
                has_it.set_value();
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
              }));
  has_it.get_future().wait();
  EXPECT_NO_THROW(pieces.resize(ledger, 2));
  bringing.join();
  EXPECT_EQ(got.front(), std::byte{7});
}

}  // namespace pieces_test
}  // namespace sluice::engine
