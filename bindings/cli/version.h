#pragma once

namespace sluice {

inline constexpr const char* kVersion = "0.1.0";  // as in CMakeLists.txt

}  // namespace sluice
