#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/saving/section_values.h"
#include "engine/saving/shared_files.h"
#include "engine/steps/engine.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Reads all values of a training run from a checkpoint: parameters, masters and optimizer state. A frozen
// unit has parameters alone. Thread rule: one thread at a time.
class CheckpointValues {
 public:
  // The first constructor opens only the parameters; the second also opens the f32 masters, where there are
  // any, and the optimizer's arrays of whatever type. Throws Error(kInvalidArgument) where the files do not
  // fit the layout: they belong to another model, or to an optimizer with other arrays.
  CheckpointValues(const CheckpointReader& checkpoint, const Layout& layout);
  CheckpointValues(const CheckpointReader& checkpoint, const Layout& layout,
                   const optim::Optimizer& optimizer);
  UnitSource source();  // valid as long as this object; every byte is verified

 private:
  struct State {
    std::unique_ptr<SafetensorsReader> values, scales;  // scales: null where values are not codes
    optim::CodeMap map;
  };
  bool has_master(ParameterId parameter) const;
  // Checks that the file has the parameters for which `has` is true.
  void check(const SafetensorsReader& reader, const std::function<bool(ParameterId)>& has) const;
  void check_codes(const State& state, const std::vector<bool>& held) const;
  static void read_codes(const State& state, const std::string& name, std::size_t first,
                         std::span<float> out);
  SafetensorsReader& values_of(ParameterId parameter);

  const Layout& layout_;
  std::unique_ptr<SafetensorsReader> parameters_, masters_;  // masters_: null where there are none
  std::vector<State> state_;
  std::vector<std::unique_ptr<SafetensorsReader>> wholes_;  // null where no parameter has the array
};

// Writes the tensor files of a checkpoint side by side, unit after unit.
class CheckpointTensors {
 public:
  CheckpointTensors(const Layout& layout, const optim::Optimizer& optimizer);
  std::vector<std::uint64_t> file_bytes() const;
  // The bytes of the buffers through which one of so many ranks writes or reads all files.
  std::uint64_t buffer_bytes(int ranks = 1) const;
  struct Options {
    std::string out;
    std::uint64_t step = 0;
    std::size_t buffer_bytes = kStreamBuffer;  // of all files together
  };
  // Saves the engine's values and state as a checkpoint, with the caller's own files, and returns its folder.
  // Throws the errors of CheckpointWriter and Engine::save(), and then leaves nothing. REQUIRES: the engine
  // has this layout; or, with a section, that of its units, and the ranks are the sections in their order.
  //
  // With a communicator it is collective. If every rank finds rank 0's options.out under its own path, each
  // writes a part of the files; otherwise the others send theirs to rank 0. Only rank 0 commits; the others
  // need no `run` and no `own`, wait for the commit, and return rank 0's folder. An error of one rank ends
  // the work of all. Only during the commit can the outcome on the others differ from rank 0's; their error
  // says so. Sections can only write if all ranks see the folder; otherwise Error(kInvalidArgument) is
  // thrown.
  std::string save(Engine& engine, offload::IoService& io, allocator::Ledger& ledger, const Options& options,
                   const Json& run, std::span<const OwnFile> own = {},
                   comm::Communicator* communicator = nullptr, const SectionOfFiles* section = nullptr);

 private:
  // save() of this rank, before rank 0 sends the others its folder. Returns "" on the others.
  std::string write_own(Engine& engine, offload::IoService& io, allocator::Ledger& ledger,
                        const Options& options, const Json& run, std::span<const OwnFile> own,
                        comm::Communicator* communicator, const SectionOfFiles* section);
  // Writes the tensor files in that folder. writer: null on ranks other than 0; communicator: null where this
  // rank writes all of them.
  std::string write_files(Engine& engine, offload::IoService& io, allocator::Ledger& ledger,
                          const std::string& folder, std::size_t buffer_bytes, const Json& run,
                          CheckpointWriter* writer, comm::Communicator* communicator,
                          const SectionOfFiles* section);
  void send(Engine& engine);
  UnitSink sink();
  // Writes elements of a parameter, from `first` on, into the file with that index.
  void write(std::size_t file, ParameterId parameter, std::size_t first, std::size_t count,
             ConstArray values);

  const Layout& layout_;
  // Units of wider types come first, so that no file has a tensor that begins within an element.
  std::vector<UnitId> units_;
  // Parameters, masters where there are any, then state, each array followed by its scales.
  std::vector<TensorFile> files_;
  std::vector<std::size_t> state_;     // by array: the index of the file of its values
  std::vector<std::size_t> wholes_;    // by whole array: the index of its file
  std::optional<SharedFiles> shared_;  // while a checkpoint is written: the destination of the sink's bytes
};

}  // namespace sluice::engine
