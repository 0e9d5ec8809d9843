#pragma once
#include <cuda.h>

#include <map>
#include <string_view>
#include <thread>

namespace sluice::fake_cuda {

// Which streams are captured into graphs, and what CUDA refuses meanwhile. The streams that are named are
// there. While a blocking one is captured, of any thread, CUDA's default stream, which would have to wait for
// it, cannot be used.
class Captures {
 public:
  void begin(CUstream stream, CUstreamCaptureMode mode, bool is_blocking);
  void end(CUstream stream);
  // Refuses to say it of the default stream while a blocking one is captured. No capture ends by that.
  CUstreamCaptureStatus status(CUstream stream) const;
  // Refuses to use a stream that is captured, or has to wait for one, and ends the capture. CUDA would take
  // into the graph what is queued, for each replay. Sluice queues it for once.
  void refuse_use(CUstream stream, const char* use);
  // Refuses a call of this thread that may be unsafe, in the mode of this thread, and ends the captures in
  // whose way it is.
  void refuse_unsafe(std::string_view function);
  // The mode of the calling thread takes the place of this one.
  static void exchange_mode(CUstreamCaptureMode& mode);

 private:
  struct Capture {
    CUstreamCaptureMode mode;
    std::thread::id thread;
    bool is_blocking, is_valid;
  };
  std::map<CUstream, Capture> captures_;
};

}  // namespace sluice::fake_cuda
