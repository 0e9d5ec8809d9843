#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/plan/plan.h"
#include "models/run/training_setup.h"

namespace sluice::models {

// What the ranks of one run tell each other beside what their engines do. A run that trains alone has a
// RunRanks of one, which sends nothing. Calls are collective, and wait. Thread rule: one thread at a time.
class RunRanks {
 public:
  // communicator: null for a run that trains alone; otherwise outlives it.
  explicit RunRanks(comm::Communicator* communicator) : communicator_(communicator) {}

  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  int size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  bool is_first() const { return rank() == 0; }
  comm::Communicator* communicator() const { return communicator_; }

  // Throws Error(kInvalidArgument) on every rank where ranks were given different settings, models or data,
  // or are of different versions; it names what differs.
  void compare(const Setup& setup);
  // What joins the ranks, as measured in so much memory; nothing where there is one rank.
  std::optional<engine::Link> link(std::uint64_t memory);
  // Makes what must be alike in the plans of all ranks so, and plans again where this rank's was not.
  void agree_on_plan(Setup& setup);

  // Is called from time to time while a call waits; the run's engine serves the others there.
  void set_meanwhile(std::function<void()> meanwhile) { meanwhile_ = std::move(meanwhile); }

  std::string from_first(const std::string& text);  // what rank 0 has given
  // Throws on every rank where not all read the same file at `path`, by which they go on with what `named`
  // says; the error says which rank does not, where that is, and what to do.
  void check_all_read(const std::string& path, const std::string& named);
  void wait_for_all(const std::string& what) { exchange(what, {}); }
  std::uint64_t sum(std::uint64_t count);  // over all ranks
  // What each rank knows of a step once its gradients are there; returns what all of them know.
  struct Outcome {
    std::vector<double> losses;  // of its micro-batches
    bool stop = false;           // whether it is asked to stop
  };
  Outcome combine(Outcome own);
  // Losses of validation by micro-batch, of which each rank has measured those with index % size() == rank().
  double mean(const std::vector<double>& own, std::uint64_t count);
  // Ends the run of all ranks with this error. A program ends with the same exit status on all of them where
  // it was asked for what is wrong or does not fit.
  void fail(const std::exception& error) noexcept;

 private:
  std::vector<std::string> exchange(const std::string& name, const std::string& own);

  comm::Communicator* communicator_;
  std::function<void()> meanwhile_;
};

}  // namespace sluice::models
