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

// Communication among the ranks of one run beside that of their engines. A run of one rank has a RunRanks
// that sends nothing. Calls are collective, and wait. Thread rule: one thread at a time.
class RunRanks {
 public:
  // Takes the run's communicator and mesh. Without a communicator the run has one rank. Where a model is cut,
  // errors that a rank has failed have its place() from then on.
  explicit RunRanks(const TrainSettings& settings);

  int rank() const { return communicator_ == nullptr ? 0 : communicator_->rank(); }
  int size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  bool is_first() const { return rank() == 0; }
  comm::Communicator* communicator() const { return communicator_; }
  // Groups of ranks: of_section() has the same section of the model as this rank, and shares its state;
  // sections() has the model's other sections with the same micro-batches; tensor() computes other pieces of
  // its layers. Null: there are no other ranks.
  comm::Communicator* of_section() const { return of_section_; }
  comm::Communicator* sections() const { return sections_.get(); }
  comm::Communicator* tensor() const { return tensor_.get(); }
  comm::Communicator* sequence() const { return sequence_.get(); }  // with other parts of its sequences
  bool shares_layers() const { return tensor_ != nullptr || sequence_ != nullptr; }
  int section_size() const { return of_section_ == nullptr ? 1 : of_section_->size(); }
  int section() const { return sections_ == nullptr ? 0 : sections_->rank(); }
  // The index of this rank's part of the micro-batches, and the number of parts.
  int data_rank() const { return data_rank_; }
  int data_size() const { return data_size_; }
  // Returns the ranks with this section, in the order of of_section().
  std::vector<int> ranks_of(int section) const;

  // Throws Error(kInvalidArgument) on every rank, with what differs, where ranks have different settings,
  // models, data or versions.
  void compare(const Setup& setup);
  // Returns the connection of the ranks, measured with buffers of `memory` bytes; nothing where there is one
  // rank.
  std::optional<engine::Link> link(std::uint64_t memory);
  // Makes the parts of the plan equal that must be so on all ranks, and plans again where this rank's
  // differed.
  void agree_on_plan(Setup& setup);

  // Sets a function that is called from time to time while a call waits; in it the run's engine serves the
  // other ranks.
  void set_meanwhile(std::function<void()> meanwhile) { meanwhile_ = std::move(meanwhile); }

  std::string from_first(const std::string& text);  // returns the text of rank 0
  // Throws on every rank where not all read the same file at `path`, which the setting `named` refers to. The
  // error names a rank that does not, its host, and what to do.
  void check_all_read(const std::string& path, const std::string& named);
  void wait_for_all(const std::string& what) { from_all(what, {}); }
  std::vector<std::string> from_all(const std::string& name, const std::string& own);  // by rank
  std::uint64_t sum(std::uint64_t count);  // over all ranks that have other rows
  // A rank's knowledge of a step once its gradients are complete; combine() returns that of all ranks
  // together.
  struct Outcome {
    std::vector<double> losses;  // by its micro-batch; sections before the last one have none
    bool stop = false;           // a stop was requested
  };
  Outcome combine(Outcome own);
  // Returns the mean of the validation losses of `count` micro-batches, each the mean over its targets. Given
  // are the sums of losses, and the numbers of targets, of those with index % data_size() == data_rank(), or
  // of this rank's part of them.
  double mean(const std::vector<double>& losses, const std::vector<double>& targets, std::uint64_t count);
  // Returns this rank's place on the mesh, as in "pipeline stage 2 of 3"; empty where no model is cut.
  std::string place() const;
  // Ends the run of all ranks with this error. All programs have the same exit status where the request was
  // invalid or does not fit.
  void fail(const std::exception& error) noexcept;

 private:
  bool is_cut() const { return sections_ != nullptr || shares_layers(); }  // the model is cut over ranks
  // Selects, of the numbers that each rank has sent, those of ranks with losses, by data rank, summed
  // pairwise over the parts of a sequence.
  std::vector<std::vector<double>> of_last(const std::vector<std::string>& all, std::size_t count) const;

  comm::Communicator* communicator_;
  const std::optional<comm::Mesh> mesh_;
  std::vector<std::vector<int>> by_section_;  // the ranks of each section, where there is a mesh
  std::unique_ptr<comm::Communicator> own_section_, sections_, tensor_, sequence_;
  comm::Communicator* of_section_ = nullptr;
  int data_rank_ = 0, data_size_ = 1;
  std::function<void()> meanwhile_;
};

}  // namespace sluice::models
