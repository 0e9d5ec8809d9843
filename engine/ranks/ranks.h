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
#include "engine/ranks/state_reads.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// The ranks that train one model together, as the engine of one of them sees them: their shards, and the
// messages for a unit. An engine that trains alone has none. Where a unit's optimizer state is partitioned,
// each rank sums and updates its own shard of the unit; otherwise all of it. Calls that name a unit are
// collective, in any order of units. Thread rule: any thread; `done` is called on the communicator's.
class Ranks {
 public:
  // partitioned: by unit, whether its state is. The other arguments outlive it.
  Ranks(comm::Communicator& communicator, const Layout& layout, const optim::Optimizer& optimizer,
        std::vector<bool> partitioned);

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  bool partitioned(UnitId unit) const { return partitioned_[unit]; }
  bool any_partitioned() const { return any_partitioned_; }
  // Whether ranks that compute on GPUs may read others' data of the unit in place (DeviceRanks): in host
  // memory, or in GPU memory, as they have agreed. Without a unit: whether they may in host memory, for any
  // unit.
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

  // Sums one use of the unit's gradients over all ranks, in f32: a reduce-scatter where its state is
  // partitioned, else an all-reduce. This rank contributes as many arrays as `order` says. Afterwards its own
  // elements of the first one are sums; the rest is unspecified if state is partitioned. packing: that of all
  // arrays, on all ranks; null: none. given: what each rank contributes of an array, as packed; null: all.
  void sum_gradient(UnitId unit, int use, std::span<const Array> sums, const comm::SumOrder& order,
                    const Packing* packing, std::shared_ptr<const comm::Given> given, Done done);
  // The same for some elements of a unit's gradient, which are all that the arrays have.
  void sum_gradient_in(UnitId unit, ElementRange elements, std::span<const Array> sums,
                       const comm::SumOrder& order, Done done);
  // A barrier for a piece of a unit's gradient, or of its parameters, at which this rank states the type in
  // which it gives them. Calls `done` when all ranks have begun it, or with an error if they give the piece
  // different numbers. Returns where the types of all ranks are then.
  using Types = std::vector<Dtype>;
  std::shared_ptr<const Types> meet(UnitId unit, bool gradient, std::size_t piece, Dtype type, Done done);
  // All-gathers these elements of a unit's summed gradient; `sum` has nothing else. REQUIRES: the unit's
  // state is partitioned.
  void gather_gradient_in(UnitId unit, ElementRange elements, Array sum, Done done);
  // A barrier: waits until every rank has ended its edit of the unit.
  void wait_for_edit(UnitId unit, const std::function<void()>& meanwhile);
  // All-gathers these elements of an updated unit; `values` has nothing else. REQUIRES: the unit's state is
  // partitioned.
  void gather_in(UnitId unit, ElementRange elements, Array values, Done done);
  // Send the state of a chunk from the rank that has it to rank 0. Both calls wait.
  void send_state(UnitId unit, std::size_t chunk, std::span<const std::byte> state);
  void receive_state(int rank, UnitId unit, std::size_t chunk, std::span<std::byte> state);
  // The same for an optimizer's arrays of a whole parameter.
  void send_whole(ParameterId parameter, std::span<const std::byte> values);
  void receive_whole(int rank, ParameterId parameter, std::span<std::byte> values);
  // Reads state of another rank, which makes no call for that. Waits until that rank is as far. Throws
  // StateRefused where it cannot give it.
  void read_state(int rank, const StateRead& read, std::span<std::byte> into);
  // Asks rank 0 whether it has taken the state after so many steps for the number-th time; it answers when it
  // has. wait_for_answer() throws what read_state() does.
  void ask_whether_taken(std::uint64_t number, std::uint64_t steps, Done done);
  void wait_for_answer(int rank, TransferGroup& answer);
  // From now on state_reads() gets the other ranks' reads of state, and `shards`, if not null, all others.
  void serve(comm::Server shards);
  StateReads& state_reads() const { return *state_reads_; }
  // All-reduces the sums of an optimizer's round. All ranks call it for the same parameters in the same
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
  const std::shared_ptr<StateReads> state_reads_ = std::make_shared<StateReads>();
};

}  // namespace sluice::engine
