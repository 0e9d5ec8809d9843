#pragma once

namespace sluice {

inline constexpr const char* kVersion = "0.1.0";  // CMakeLists.txt has the same

}  // namespace sluice
