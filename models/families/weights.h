#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/engine.h"
#include "models/families/config.h"
#include "offload/file.h"
#include "optim/optimizer.h"

namespace sluice::models {

// Whether the tensor is F32, F16 or BF16.
bool is_float(const engine::StoredTensor& tensor);

// Reads `out.size()` elements from `first` on as f32; `read` gives bytes of the tensor from an offset on.
// REQUIRES: is_float() of the tensor.
using ReadBytes = std::function<void(std::size_t first_byte, std::span<std::byte> out)>;
void read_as_f32(Dtype type, std::size_t first, std::span<float> out, const ReadBytes& read);
void read_as_f32(engine::SafetensorsReader& reader, const engine::StoredTensor& tensor, std::size_t first,
                 std::span<float> out);

// The parameters of a model as a Hugging Face folder holds them: in f32, f16 or bf16, with or without the
// prefix "transformer." or "model.". Thread rule: one thread at a time.
class HuggingFaceWeights {
 public:
  // Reads the headers. Throws Error(kInvalidArgument) that names each tensor that is missing, that the model
  // does not have, or that has another shape or an unusable type, and Error(kNotFound | kIo | kCorrupt) for
  // the files. A head that is there though it is tied must equal the embedding. Buffers (attn.bias, rotary
  // inv_freq) are ignored.
  HuggingFaceWeights(offload::IoService& io, const std::string& folder, const ModelConfig& config,
                     const engine::Layout& layout, engine::ReadAhead& ahead);

  engine::UnitSource source();  // valid as long as this

 private:
  void match(const engine::Layout& layout);
  void match_head(const ModelConfig& config);

  engine::SafetensorsFolder folder_;
  std::vector<std::string> names_;      // by ParameterId
  std::vector<std::string> left_over_;  // tensors of the files that no parameter took
};

// Throws what HuggingFaceWeights would, before anything is begun or written. The buffer that it takes goes
// back.
void check_hugging_face_folder(offload::IoService& io, const std::string& folder, const ModelConfig& config,
                               const engine::Layout& layout);

// The whole of a training run's values as a checkpoint holds them: parameters, masters and optimizer state. A
// frozen unit has parameters alone.
// Thread rule: one thread at a time.
class CheckpointValues {
 public:
  // The parameters alone; or the f32 masters, where there are any, and the optimizer's arrays, of whatever
  // type. Throws Error(kInvalidArgument) where the files do not fit the layout: they are of another model, or
  // of an optimizer with other arrays.
  CheckpointValues(const engine::CheckpointReader& checkpoint, const engine::Layout& layout);
  CheckpointValues(const engine::CheckpointReader& checkpoint, const engine::Layout& layout,
                   const optim::Optimizer& optimizer);
  engine::UnitSource source();  // valid as long as this; every byte is verified

 private:
  struct State {
    std::unique_ptr<engine::SafetensorsReader> values, scales;  // scales: null where values are no codes
    optim::CodeMap map;
  };
  bool has_master(engine::ParameterId parameter) const;
  // has: the parameters that it is to hold.
  void check(const engine::SafetensorsReader& reader,
             const std::function<bool(engine::ParameterId)>& has) const;
  void check_codes(const State& state, const std::vector<bool>& held) const;
  static void read_codes(const State& state, const std::string& name, std::size_t first,
                         std::span<float> out);
  engine::SafetensorsReader& values_of(engine::ParameterId parameter);

  const engine::Layout& layout_;
  std::unique_ptr<engine::SafetensorsReader> parameters_, masters_;  // masters_: null where there are none
  std::vector<State> state_;
  std::vector<std::unique_ptr<engine::SafetensorsReader>> wholes_;  // null where no parameter has the array
};

// The tensor files of a checkpoint that are written side by side, unit by unit in the layout's order.
class CheckpointTensors {
 public:
  CheckpointTensors(const engine::Layout& layout, const optim::Optimizer& optimizer);
  std::vector<std::uint64_t> file_bytes() const;
  std::size_t files() const { return headers_.size(); }
  std::uint64_t buffer_bytes() const;  // what they are all written or read through
  // In what order units are to be saved: of wider types first, so that no file has a tensor that begins
  // within an element.
  const std::vector<engine::UnitId>& units() const { return units_; }
  void open(engine::CheckpointWriter& writer);
  engine::UnitSink sink();  // REQUIRES: open(); valid as long as this and the writer

 private:
  struct Named {
    std::string file;
    engine::SafetensorsHeader header;
  };
  std::vector<engine::UnitId> units_;
  std::vector<Named> headers_;       // parameters, masters where there are any, state, each with its scales
  std::vector<std::size_t> state_;   // by array: the file of its values
  std::vector<std::size_t> wholes_;  // by array that is not by elements: its file
  std::vector<engine::SafetensorsWriter*> writers_;
};

}  // namespace sluice::models
