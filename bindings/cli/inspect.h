#pragma once
#include <string>

#include "core/json.h"

// What `sluice inspect` says of one file or folder: for programs and for people. All throw sluice::Error that
// names it.
namespace sluice::cli {

struct Report {
  Json json;
  std::string text;
};

Report inspect_tensors(const std::string& path,
                       bool values);  // safetensors; values: least and greatest of each tensor
Report inspect_checkpoint(const std::string& folder, bool verify);
// A folder of checkpoints; `verify` reads them all, and throws for the first that is not whole.
Report inspect_run(const std::string& out, bool verify);
Report inspect_metrics(const std::string& path);
Report inspect_trace(const std::string& path);
Report inspect_tokens(const std::string& path);

}  // namespace sluice::cli
