#include "core/cuda/kernel_file.h"

#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/error.h"
#include "kernels_id.h"

namespace sluice::cuda {
namespace {

constexpr const char* kFile = "libsluice_kernels.fatbin";

}  // namespace

std::string read_kernels() {
  Dl_info here{};
  if (dladdr(reinterpret_cast<const void*>(&read_kernels), &here) == 0 || here.dli_fname == nullptr)
    fail(ErrorCode::kInternal, "the system does not tell from which file this plug-in was loaded");
  const auto path = std::filesystem::path(here.dli_fname).parent_path() / kFile;
  std::ifstream file(path, std::ios::binary);
  if (!file)
    fail(ErrorCode::kNotFound,
         "the GPU's kernels are missing: there is no file {}; `scripts/kernels.sh {}` makes it, with nvcc",
         path.string(), path.string());
  std::string all{std::istreambuf_iterator<char>(file), {}};
  const std::string_view id = kKernelsId;
  if (!std::string_view(all).starts_with(id) || all.size() == id.size())
    fail(ErrorCode::kNotFound,
         "the GPU's kernels in {} are of another build; `scripts/kernels.sh {}` makes them anew, with nvcc",
         path.string(), path.string());
  // The driver needs them aligned, as the string's own memory is.
  all.erase(0, id.size());
  return all;
}

}  // namespace sluice::cuda
