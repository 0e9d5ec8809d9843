#pragma once
#include "testing.h"
#include "tests/temporary_folder.h"
#include "tests/thrown.h"

namespace sluice {

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace sluice
