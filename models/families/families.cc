#include "models/families/families.h"

#include "models/families/gpt2.h"
#include "models/families/llama.h"

namespace sluice::models {

std::span<const Family* const> families() {
  static constexpr const Family* kAll[] = {&kGpt2, &kLlama, &kMistral, &kQwen2};
  return kAll;
}

}  // namespace sluice::models
