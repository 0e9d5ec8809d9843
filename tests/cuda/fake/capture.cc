#include "cuda/fake/capture.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "cuda/fake/memory.h"

namespace sluice::fake_cuda {
namespace {

thread_local CUstreamCaptureMode mode_of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Says whether a function is safe while a client captures. The first launch of a kernel may load it, so that
// launches are not.
bool is_safe(std::string_view function) {
  static constexpr std::string_view kSafe[] = {"cuInit",
                                               "cuCtxGetCurrent",
                                               "cuCtxPushCurrent",
                                               "cuCtxPopCurrent",
                                               "cuCtxGetStreamPriorityRange",
                                               "cuMemGetAllocationGranularity",
                                               "cuStreamIsCapturing",
                                               "cuStreamWaitEvent",
                                               "cuEventRecord",
                                               "cuMemsetD8Async",
                                               "cuLaunchHostFunc",
                                               "cuThreadExchangeStreamCaptureMode"};
  const auto begins = [&](std::string_view with) { return function.starts_with(with); };
  return begins("cuDeviceGet") || begins("cuDeviceTotal") || begins("cuMemcpy") ||
         begins("cuStreamBeginCapture") || begins("cuStreamEndCapture") || begins("cuGraph") ||
         std::ranges::count(kSafe, function) > 0;
}

}  // namespace

void Captures::begin(CUstream stream, CUstreamCaptureMode mode, bool is_blocking) {
  captures_[stream] = {mode, std::this_thread::get_id(), is_blocking, true};
}
void Captures::end(CUstream stream) {
  const auto ended = captures_.extract(stream);
  if (ended.empty()) throw Refusal{CUDA_ERROR_ILLEGAL_STATE, "a capture ends that has not begun"};
  const Capture& capture = ended.mapped();
  if (capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture.thread != std::this_thread::get_id())
    throw Refusal{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "another thread ends a capture"};
  if (!capture.is_valid) throw Refusal{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, {}};
}
CUstreamCaptureStatus Captures::status(CUstream stream) const {
  const auto is_blocking = [](const auto& each) { return each.second.is_blocking; };
  if (stream == CU_STREAM_LEGACY && std::ranges::any_of(captures_, is_blocking))
    throw Refusal{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, {}};
  const auto found = captures_.find(stream);
  if (found == captures_.end()) return CU_STREAM_CAPTURE_STATUS_NONE;
  return found->second.is_valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

void Captures::refuse_use(CUstream stream, const char* use) {
  bool is_implicit = false;
  for (auto& [captured, capture] : captures_) {
    if (stream != CU_STREAM_LEGACY || !capture.is_blocking) continue;
    capture.is_valid = false;
    is_implicit = true;
  }
  if (is_implicit)
    throw Refusal{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                  "the default stream is used, which would wait for one that a client captures"};
  const auto found = captures_.find(stream);
  if (found == captures_.end()) return;
  found->second.is_valid = false;
  throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, fmt::format("{} that a client captures", use)};
}
void Captures::refuse_unsafe(std::string_view function) {
  if (is_safe(function) || mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED) return;
  bool is_refused = false;
  for (auto& [stream, capture] : captures_) {
    const bool is_own = capture.thread == std::this_thread::get_id();
    if (is_own ? capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED
               : capture.mode != CU_STREAM_CAPTURE_MODE_GLOBAL ||
                     mode_of_thread != CU_STREAM_CAPTURE_MODE_GLOBAL)
      continue;
    capture.is_valid = false;
    is_refused = true;
  }
  if (is_refused)
    throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                  "a call that may be unsafe comes while a client captures"};
}
void Captures::exchange_mode(CUstreamCaptureMode& mode) { std::swap(mode, mode_of_thread); }

}  // namespace sluice::fake_cuda
