#include "kernels/targets.h"

#include <fmt/ranges.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "kernels/simd.h"
// kernels/simd.h disables targets, so it must come first.
#include <hwy/highway.h>
#include <hwy/targets.h>

namespace sluice::kernels {
namespace {

struct Target {
  const char* word;
  std::int64_t bits;
};

// The widest target first. Highway gives wider targets lower bits.
constexpr Target kTargets[] = {
#if HWY_ARCH_X86
    {"avx512", HWY_AVX3},
    {"avx2", HWY_AVX2},
#elif HWY_ARCH_ARM
    {"neon", HWY_NEON},
#endif
    {"scalar", HWY_EMU128 | HWY_SCALAR},
};

bool read_limit() {
  const char* const given = std::getenv("SLUICE_MAX_TARGET");
  if (given == nullptr || *given == 0) return true;
  std::int64_t wider = 0;
  std::vector<const char*> words;
  for (const Target& target : kTargets) {
    if (std::string_view(given) == target.word) {
      hwy::DisableTargets(wider);
      return true;
    }
    wider |= target.bits;
    words.push_back(target.word);
  }
  fail(ErrorCode::kInvalidArgument, "SLUICE_MAX_TARGET is '{}'; it may be {}, or not be set", given,
       fmt::join(words, ", "));
}

}  // namespace

// If read_limit() throws, the variable stays uninitialized, so the next call reads the environment again.
void limit_targets() { [[maybe_unused]] static const bool limited = read_limit(); }

std::string chosen_target() {
  for (const Target& target : kTargets)
    if ((hwy::SupportedTargets() & target.bits) != 0) return target.word;
  return "scalar";
}

}  // namespace sluice::kernels
