#include "engine/ranks/call_id.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace sluice::engine {
namespace call_id_test {

TEST(CallId, KeepsPurposesApartWhateverNamesAndNumbersAre) {
  std::set<std::uint64_t> ids;
  std::size_t calls = 0;
  for (const std::uint64_t index : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 56) - 1})
    for (const CallKind purpose : {CallKind::kGradient, CallKind::kState, CallKind::kWholeGradient}) {
      ids.insert(call_id(purpose, index));
      ++calls;
    }
  for (int i = 0; i < 1000; ++i) {
    const std::string name = std::to_string(i);
    EXPECT_EQ(call_id(CallKind::kOfCaller, name) >> 56, static_cast<std::uint64_t>(CallKind::kOfCaller));
    EXPECT_EQ(call_id(name), call_id(CallKind::kNamed, name));
    ids.insert({call_id(name), call_id(CallKind::kOfCaller, name)});
    calls += 2;
  }
  EXPECT_EQ(ids.size(), calls);
}

}  // namespace call_id_test
}  // namespace sluice::engine
