#include "core/cuda/kernel_file.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "kernels_id.h"

namespace sluice::cuda {
namespace {

constexpr const char* kFile = "libsluice_kernels.fatbin";

std::string remedy(const std::string& path) {
  return fmt::format(
      "install the wheel again, or in a build make the file anew, with nvcc: `scripts/kernels.sh {}`", path);
}

// The header of a fat binary, as CUDA's tools write it.
struct FatBinaryHeader {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t code_bytes;
};
constexpr std::uint32_t kFatBinaryMagic = 0xBA55ED50;

// The driver reads as many bytes as the header states, even if there are fewer.
bool is_whole(std::string_view image) {
  FatBinaryHeader header{};
  if (image.size() < sizeof header) return false;
  std::memcpy(&header, image.data(), sizeof header);
  if (header.magic != kFatBinaryMagic) return true;  // left for the driver to judge
  return header.header_bytes <= image.size() && header.code_bytes <= image.size() - header.header_bytes;
}

}  // namespace

KernelFile read_kernels() {
  Dl_info here{};
  if (dladdr(reinterpret_cast<const void*>(&read_kernels), &here) == 0 || here.dli_fname == nullptr)
    fail(ErrorCode::kInternal, "the system does not tell from which file this plug-in was loaded");
  const std::string path = (std::filesystem::path(here.dli_fname).parent_path() / kFile).string();
  std::ifstream file(path, std::ios::binary);
  if (!file)
    fail(ErrorCode::kNotFound, "the GPU's kernels are missing: there is no file {}; {}", path, remedy(path));
  std::string all{std::istreambuf_iterator<char>(file), {}};
  const std::string_view id = kKernelsId;
  if (!std::string_view(all).starts_with(id))
    fail(ErrorCode::kNotFound, "the GPU's kernels in {} are of another build; {}", path, remedy(path));
  // The driver needs the image aligned, as the string's own memory is.
  all.erase(0, id.size());
  if (!is_whole(all))
    fail(ErrorCode::kCorrupt,
         "the GPU's kernels in {} are damaged, as the {} bytes of the file are not what its header says; {}",
         path, id.size() + all.size(), remedy(path));
  return {path, std::move(all)};
}

void check_loaded(const Driver& driver, CUresult result, const KernelFile& kernels) {
  if (result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_INVALID_PTX ||
      result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
    fail(ErrorCode::kNotFound,
         "the GPU's driver cannot load the kernels in {}: {}; the file is damaged, or made by a CUDA newer "
         "than the driver: {}, or install a newer driver",
         kernels.path, driver.words(result), remedy(kernels.path));
  driver.check(result, "cuModuleLoadData({})", kernels.path);
}

}  // namespace sluice::cuda
