#pragma once
#include <string>

#include "core/json.h"

// The report of `sluice inspect` on one file or folder. All functions throw sluice::Error, with its name.
namespace sluice::cli {

struct Report {
  Json json;
  std::string text;
};

// Reports a safetensors file; with `values` also the smallest and largest value of each tensor.
Report inspect_tensors(const std::string& path, bool values);
Report inspect_checkpoint(const std::string& folder, bool verify);
// Reports a folder of checkpoints. With `verify` it reads all of them, and throws for the first damaged one.
Report inspect_run(const std::string& out, bool verify);
Report inspect_metrics(const std::string& path);
Report inspect_trace(const std::string& path);
Report inspect_tokens(const std::string& path);

}  // namespace sluice::cli
