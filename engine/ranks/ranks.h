#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/dtype.h"
#include "core/transfers.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/ranks/packing.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// The ranks that train one model together, as the engine of one of them sees them: who has which shard, and
// what is sent for a unit. An engine that trains alone has none. Where a unit's optimizer state is
// partitioned, each rank sums and updates its own shard of the unit; otherwise each has and does all of it.
// Calls that name a unit are collective: every rank makes them, in any order of units. Thread rule: any
// thread; `done` is called on the communicator's.
class Ranks {
 public:
  // partitioned: by unit, whether its state is. The other arguments outlive it.
  Ranks(comm::Communicator& communicator, const Layout& layout, const optim::Optimizer& optimizer,
        std::vector<bool> partitioned);

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  bool partitioned(UnitId unit) const { return partitioned_[unit]; }
  bool any_partitioned() const { return any_partitioned_; }
  // Whether ranks that compute on GPUs may read what others have of the unit where it is (DeviceRanks): in
  // the host's memory, and of any unit; or in their GPUs' memory, as they have agreed.
  bool reads_others(UnitId unit) const {
    return (partitioned(unit) && reads_others()) || (!summed_by_gpus_.empty() && summed_by_gpus_[unit]);
  }
  bool reads_others() const { return any_partitioned_ && communicator_.hosts().all_on_one(); }
  void set_summed_by_gpus(std::vector<bool> units) { summed_by_gpus_ = std::move(units); }
  ElementRange shard(UnitId unit, int rank) const { return shards_.shard(unit, rank); }
  // The rank whose shard has the element. REQUIRES: the unit's state is partitioned.
  int owner(UnitId unit, std::size_t element) const;
  // The elements of a unit that this rank sums and updates.
  ElementRange own(UnitId unit) const;

  // Adds up one use of the unit's gradients over all ranks, in f32. This rank gives as many arrays as `order`
  // says. Afterwards its own elements of the first one are sums; the rest is unspecified where its state
  // is partitioned. packing: that of all arrays, on all ranks; null: they are whole. given: what each rank
  // gives of an array as it is then; null: all.
  void sum_gradient(UnitId unit, int use, std::span<const Array> sums, const comm::SumOrder& order,
                    const Packing* packing, std::shared_ptr<const comm::Given> given, Done done);
  // The same for some elements of a unit's gradient, of which the arrays have nothing else.
  void sum_gradient_in(UnitId unit, ElementRange elements, std::span<const Array> sums,
                       const comm::SumOrder& order, Done done);
  // Ends when all ranks have begun it, for a piece of a unit: of its gradient, or of its parameters, which
  // this rank gives in that type. Returns where the types of all ranks are then. It is an error where ranks
  // give the piece different numbers.
  using Types = std::vector<Dtype>;
  std::shared_ptr<const Types> meet(UnitId unit, bool gradient, std::size_t piece, Dtype type, Done done);
  // Brings to each rank what the others have summed of these elements of a unit's gradient, of which `sum`
  // has nothing else. REQUIRES: its state is partitioned.
  void gather_gradient_in(UnitId unit, ElementRange elements, Array sum, Done done);
  // Waits until every rank has ended its edit of the unit.
  void wait_for_edit(UnitId unit, const std::function<void()>& meanwhile);
  // Brings to each rank what the others have updated of these elements of the unit, of which `values` has
  // nothing else. REQUIRES: its state is partitioned.
  void gather_in(UnitId unit, ElementRange elements, Array values, Done done);
  // The state of a chunk on its way from the rank that has it to rank 0. Both wait.
  void send_state(UnitId unit, std::size_t chunk, std::span<const std::byte> state);
  void receive_state(int rank, UnitId unit, std::size_t chunk, std::span<std::byte> state);
  // The same for what an optimizer keeps for a parameter as a whole.
  void send_whole(ParameterId parameter, std::span<const std::byte> values);
  void receive_whole(int rank, ParameterId parameter, std::span<std::byte> values);
  // Adds up what an optimizer's round has summed. All ranks call it for the same parameters in the same
  // order.
  void sum_round(std::span<double> f64, std::span<float> f32, TransferGroup& group);
  // As Communicator::exchange().
  std::vector<std::string> exchange(const std::string& name, const std::string& own,
                                    const std::function<void()>& meanwhile);
  comm::Communicator& communicator() const { return communicator_; }

 private:
  std::vector<std::size_t> borders(UnitId unit) const;
  std::vector<std::size_t> borders_in(UnitId unit, ElementRange elements) const;
  std::string name_of(UnitId unit) const;  // of its parameters
  std::string gradient_name(UnitId unit) const;
  std::string state_name(UnitId unit) const;
  void send(std::uint64_t id, const std::string& name, std::span<const std::byte> bytes);  // to rank 0
  void receive(int rank, std::uint64_t id, const std::string& name, std::span<std::byte> bytes);

  comm::Communicator& communicator_;
  const Layout& layout_;
  const std::vector<bool> partitioned_;  // by unit
  const bool any_partitioned_;
  std::vector<bool> summed_by_gpus_;  // by unit; empty: none is
  Shards shards_;                     // of all ranks
};

}  // namespace sluice::engine
