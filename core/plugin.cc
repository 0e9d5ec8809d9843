#include "core/plugin.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/error.h"

namespace sluice {
namespace {

std::vector<std::string> paths_of(const std::string& file) {
  std::vector<std::string> paths;
  if (const char* folder = std::getenv("SLUICE_LIBRARY_PATH"); folder && *folder)
    paths.push_back((std::filesystem::path(folder) / file).string());
  Dl_info here{};
  if (dladdr(reinterpret_cast<const void*>(&open_plugin), &here) && here.dli_fname) {
    const auto folder = std::filesystem::path(here.dli_fname).parent_path();
    paths.push_back((folder / file).string());
    paths.push_back((folder / ".." / "lib" / file).string());
  }
  paths.push_back(file);  // searched for on the loader's path
  return paths;
}

}  // namespace

const void* open_plugin(const std::string& file, const char* symbol, unsigned abi, int how,
                        const std::string& what, const std::string& remedy) {
  std::string reasons, path;
  void* handle = nullptr;
  for (const std::string& candidate : paths_of(file)) {
    path = candidate;
    handle = dlopen(candidate.c_str(), how);
    if (handle != nullptr) break;
    reasons += fmt::format("\n  {}", dlerror());
  }
  if (handle == nullptr)
    fail(ErrorCode::kNotFound,
         "{}'s plug-in {} cannot be loaded; {}, or set SLUICE_LIBRARY_PATH to the plug-in's folder. Tried:{}",
         what, file, remedy, reasons);
  const void* (*function)() = nullptr;
  void* const found = dlsym(handle, symbol);
  std::memcpy(&function, &found, sizeof(function));
  if (function == nullptr)
    fail(ErrorCode::kNotFound, "{} is not a plug-in of Sluice: it lacks {}", path, symbol);
  const void* const table = function();
  std::uint32_t version = 0;
  std::memcpy(&version, table, sizeof version);
  if (version != abi)
    fail(ErrorCode::kNotFound,
         "{} has interface version {}, but this library needs version {}; install both from one build", path,
         version, abi);
  return table;
}

}  // namespace sluice
