#include <fmt/core.h>
#include <fmt/ranges.h>

#include "cuda/fake/control.h"

// The fake driver for callers in C or Python: see control.h.
namespace {

const char* kept(const std::vector<std::string>& lines) {
  static std::string text;
  text = fmt::format("{}", fmt::join(lines, "\n"));
  return text.c_str();
}

}  // namespace

void sluice_fake_cuda_share_memory(std::uint64_t memory, int schedule, std::uint64_t seed, int devices,
                                   int has_peers) {
  sluice::fake_cuda::Settings settings;
  settings.memory = memory;
  settings.schedule = static_cast<sluice::fake_cuda::Schedule>(schedule);
  settings.seed = seed;
  settings.devices = devices;
  settings.has_peers = has_peers != 0;
  if (has_peers > 1) settings.peers = has_peers;
  settings.shares_memory = true;
  sluice_fake_cuda()->begin(settings);
}
void sluice_fake_cuda_capture(int begins) { sluice_fake_cuda()->capture_default(begins != 0); }
void sluice_fake_cuda_fail(const char* function, std::uint64_t n, int result) {
  sluice_fake_cuda()->fail(function, n, result);
}
int sluice_fake_cuda_shares_memory(void) { return sluice_fake_cuda()->shares_memory() ? 1 : 0; }
const char* sluice_fake_cuda_misuses(void) { return kept(sluice_fake_cuda()->take_misuses()); }
const char* sluice_fake_cuda_alive(void) { return kept(sluice_fake_cuda()->alive()); }
