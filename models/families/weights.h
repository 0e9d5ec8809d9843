#pragma once
#include <string>
#include <vector>

#include "engine/checkpoint/safetensors.h"
#include "engine/steps/engine.h"
#include "models/families/config.h"
#include "offload/file.h"

namespace sluice::models {

// The parameters of a model in a Hugging Face folder: in f32, f16 or bf16, with or without the
// family's prefix. Thread rule: one thread at a time.
class HuggingFaceWeights {
 public:
  // Reads the headers. Throws Error(kInvalidArgument), with all names, for tensors that are missing, unknown
  // to the model, or of another shape or an unusable type, and Error(kNotFound | kIo | kCorrupt) for the
  // files. A tied head in the files must equal the embedding. The family's buffers are ignored.
  HuggingFaceWeights(offload::IoService& io, const std::string& folder, const ModelConfig& config,
                     const engine::Layout& layout, engine::ReadAhead& ahead);

  engine::UnitSource source();  // valid as long as this

 private:
  void match(const Family& family, const engine::Layout& layout);
  void match_head(const Family& family, const engine::Layout& layout);

  engine::SafetensorsFolder folder_;
  std::vector<std::string> names_;      // by ParameterId
  std::vector<std::string> left_over_;  // tensors in the files that are no parameter
};

// Throws as the constructor of HuggingFaceWeights would, before a run allocates memory or writes; frees its
// own buffer.
void check_hugging_face_folder(offload::IoService& io, const std::string& folder, const ModelConfig& config,
                               const engine::Layout& layout);

}  // namespace sluice::models
