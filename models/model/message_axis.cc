#include "models/model/message_axis.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "core/transfers.h"
#include "engine/ranks/call_id.h"

namespace sluice::models {

MessageAxis::MessageAxis(comm::Communicator& ranks, Trace* trace, std::function<void()> meanwhile)
    : ranks_(ranks), waits_(trace), meanwhile_(std::move(meanwhile)) {}

template <class Begin>
void MessageAxis::wait_for(const std::string& name, Begin&& begin) {
  waits_.during(engine::Waits::For::kRanks, name, [&] {
    TransferGroup group;
    begin(group.add());
    group.wait(meanwhile_);
  });
}

void MessageAxis::all_reduce(const std::string& name, std::span<float> values) {
  static const std::uint64_t kSums = engine::call_id("sums over pieces of a layer");
  wait_for(name, [&](Done done) {
    ranks_.all_reduce(kSums, name, Array{values.data()}, values.size(), std::move(done));
  });
}

void MessageAxis::all_gather(const std::string& name, Array values, std::size_t count) {
  static const std::uint64_t kParts = engine::call_id("parts of pieces of a layer");
  const auto size = static_cast<std::size_t>(ranks_.size());
  std::vector<std::size_t> borders;
  for (std::size_t rank = 0; rank <= size; ++rank) borders.push_back(count / size * rank);
  wait_for(name, [&](Done done) { ranks_.all_gather(kParts, name, values, borders, std::move(done)); });
}

}  // namespace sluice::models
