#include "models/model/message_axis.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/ranks/call_id.h"

namespace sluice::models {

MessageAxis::MessageAxis(comm::Communicator& ranks, Trace* trace, std::function<void()> meanwhile)
    : ranks_(ranks), waits_(trace), meanwhile_(std::move(meanwhile)) {}

void MessageAxis::wait_for(const std::string& name, TransferGroup& group) {
  waits_.during(engine::Waits::For::kRanks, name, [&] { group.wait(meanwhile_); });
}

void MessageAxis::all_reduce(const std::string& name, std::span<float> values,
                             const std::function<void()>& beside) {
  static const std::uint64_t kSums = engine::call_id("sums over pieces of a layer");
  TransferGroup group;
  ranks_.all_reduce(kSums, name, Array{values.data()}, values.size(), group.add());
  if (beside) beside();
  wait_for(name, group);
}

void MessageAxis::all_gather(const std::string& name, Array values, std::size_t count) {
  static const std::uint64_t kParts = engine::call_id("parts of pieces of a layer");
  const auto size = static_cast<std::size_t>(ranks_.size());
  std::vector<std::size_t> borders;
  for (std::size_t rank = 0; rank <= size; ++rank) borders.push_back(count / size * rank);
  TransferGroup group;
  ranks_.all_gather(kParts, name, values, borders, group.add());
  wait_for(name, group);
}

}  // namespace sluice::models
