#pragma once
#include <string>

#include "core/json.h"

// What `sluice inspect` reports of one file or folder. All functions throw sluice::Error that names it.
namespace sluice::cli {

struct Report {
  Json json;
  std::string text;
};

// Reports a safetensors file, with `values` also the least and the greatest value of each tensor.
Report inspect_tensors(const std::string& path, bool values);
Report inspect_checkpoint(const std::string& folder, bool verify);
// Reports a folder of checkpoints. With `verify` it reads all, and throws for the first that is not whole.
Report inspect_run(const std::string& out, bool verify);
Report inspect_metrics(const std::string& path);
Report inspect_trace(const std::string& path);
Report inspect_tokens(const std::string& path);

}  // namespace sluice::cli
