#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh.h"
#include "core/error.h"
#include "engine/plan/plan.h"
#include "models/run/training_setup.h"

namespace sluice::models {

// What the ranks of one run tell each other beside what their engines do. A run that trains alone has a
// RunRanks of one, which sends nothing. Calls are collective, and wait. Thread rule: one thread at a time.
class RunRanks {
 public:
  // The ranks of a run's communicator and mesh. Without a communicator it trains alone.
  explicit RunRanks(const TrainSettings& settings);

  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  int size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  bool is_first() const { return rank() == 0; }
  comm::Communicator* communicator() const { return communicator_; }
  // The ranks that have the same section of the model as this one, and share its state; those that have its
  // other sections, and the same micro-batches; and those that compute other pieces of its layers. Null:
  // there are no others.
  comm::Communicator* of_section() const { return of_section_; }
  comm::Communicator* sections() const { return sections_.get(); }
  comm::Communicator* tensor() const { return tensor_.get(); }
  comm::Communicator* sequence() const { return sequence_.get(); }  // that have other parts of its sequences
  bool shares_layers() const { return tensor_ != nullptr || sequence_ != nullptr; }
  int section_size() const { return of_section_ == nullptr ? 1 : of_section_->size(); }
  int section() const { return sections_ == nullptr ? 0 : sections_->rank(); }
  // The number of this rank's part of the micro-batches, of so many.
  int data_rank() const { return data_rank_; }
  int data_size() const { return data_size_; }
  // The ranks that have this section, in the order of of_section().
  std::vector<int> ranks_of(int section) const;

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
  std::uint64_t sum(std::uint64_t count);  // over all ranks with other rows
  // What each rank knows of a step once its gradients are there; returns what all of them know.
  struct Outcome {
    std::vector<double> losses;  // of its micro-batches; sections before the last one know none
    bool stop = false;           // whether it is asked to stop
  };
  Outcome combine(Outcome own);
  // Losses of validation by micro-batch, of which each rank has measured those with index % data_size() ==
  // data_rank().
  double mean(const std::vector<double>& own, std::uint64_t count);
  std::string place()
      const;  // of this rank on the mesh: "pipeline stage 2 of 3"; nothing where no model is cut
  // Where on the mesh the rank is that has failed, as "; rank 1 is pipeline stage 2 of 3"; or nothing.
  std::string place_of_failure() const;
  // Of an error that came before the first step, and names a rank that has failed: throws it with that place.
  void throw_with_place(const Error& error) const;
  // Ends the run of all ranks with this error. A program ends with the same exit status on all of them where
  // it was asked for what is wrong or does not fit.
  void fail(const std::exception& error) noexcept;

 private:
  bool is_cut() const { return sections_ != nullptr || shares_layers(); }  // the model over ranks
  // Of the numbers that each rank has told, what those tell that have the losses, by data rank: sums over the
  // parts of a sequence.
  std::vector<std::vector<double>> of_last(const std::vector<std::string>& all, std::size_t count) const;

  comm::Communicator* communicator_;
  const std::optional<comm::Mesh> mesh_;
  std::vector<std::vector<int>> by_section_;  // the ranks of each, where there is a mesh
  std::unique_ptr<comm::Communicator> own_section_, sections_, tensor_, sequence_;
  comm::Communicator* of_section_ = nullptr;
  int data_rank_ = 0, data_size_ = 1;
  std::function<void()> meanwhile_;
};

}  // namespace sluice::models
