#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
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
  // communicator: null for a run that trains alone; otherwise outlives it. sections: into so many the model
  // is cut, of which each rank has one; 1: every rank has all of it.
  explicit RunRanks(comm::Communicator* communicator, int sections = 1)
      : communicator_(communicator), sections_(sections) {}

  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  int size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  bool is_first() const { return rank() == 0; }
  comm::Communicator* communicator() const { return communicator_; }
  // The communicator where its ranks share the micro-batches out, and where they share the model out; else
  // null.
  comm::Communicator* data() const { return sections_ == 1 ? communicator_ : nullptr; }
  comm::Communicator* sections() const { return sections_ == 1 ? nullptr : communicator_; }
  int data_rank() const { return sections_ == 1 ? rank() : 0; }
  int data_size() const { return sections_ == 1 ? size() : 1; }

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
  void wait_for_all(const std::string& what) { from_all(what, {}); }
  std::vector<std::string> from_all(const std::string& name, const std::string& own);  // by rank
  std::uint64_t sum(std::uint64_t count);  // over all ranks with other micro-batches
  // What each rank knows of a step once its gradients are there; returns what all of them know.
  struct Outcome {
    std::vector<double> losses;  // of its micro-batches; sections before the last one know none
    bool stop = false;           // whether it is asked to stop
  };
  Outcome combine(Outcome own);
  // Losses of validation by micro-batch, of which each rank has measured those with index % data_size() ==
  // data_rank().
  double mean(const std::vector<double>& own, std::uint64_t count);
  // Ends the run of all ranks with this error. A program ends with the same exit status on all of them where
  // it was asked for what is wrong or does not fit.
  void fail(const std::exception& error) noexcept;

 private:
  // Of what the ranks have told: what those tell that have the losses.
  std::span<const std::string> of_last(const std::vector<std::string>& all) const;

  comm::Communicator* communicator_;
  const int sections_;
  std::function<void()> meanwhile_;
};

}  // namespace sluice::models
