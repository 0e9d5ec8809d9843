#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include "core/error.h"
#include "testing.h"

// These functions call CUDA's own functions as clients do, of the driver on which the tests run.
namespace sluice {

template <class Function>
Function driver_function(const char* symbol) {
  void* const library = ::dlopen(std::getenv("SLUICE_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  void* const found = library == nullptr ? nullptr : ::dlsym(library, symbol);
  if (found == nullptr) fail(ErrorCode::kNotFound, "the driver has no function {}", symbol);
  return reinterpret_cast<Function>(found);
}
// CUDA's header has macros that give functions the names of their versions.
#define SLUICE_TEXT_OF(name) #name
#define SLUICE_OF_DRIVER(name) sluice::driver_function<decltype(&::name)>(SLUICE_TEXT_OF(name))

// Sets the calling thread's mode, and returns the one before.
inline CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode) {
  SLUICE_OF_DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
  return mode;
}

// The context of GPU 0, which is the calling thread's current one for as long as this object lives.
class ClientContext {
 public:
  ClientContext() {
    const CUstreamCaptureMode before = exchange_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
    SLUICE_OF_DRIVER(cuDevicePrimaryCtxRetain)(&context_, 0);
    SLUICE_OF_DRIVER(cuCtxPushCurrent)(context_);
    exchange_capture_mode(before);
  }
  ~ClientContext() {
    const CUstreamCaptureMode before = exchange_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
    SLUICE_OF_DRIVER(cuCtxPopCurrent)(&context_);
    SLUICE_OF_DRIVER(cuDevicePrimaryCtxRelease)(0);
    exchange_capture_mode(before);
  }
  ClientContext(const ClientContext&) = delete;
  ClientContext& operator=(const ClientContext&) = delete;

 private:
  CUcontext context_ = nullptr;
};

// A stream that waits for CUDA's default one, as that does for it. Device makes none of these.
class BlockingStream {
 public:
  BlockingStream() {
    if (SLUICE_OF_DRIVER(cuStreamCreate)(&stream_, CU_STREAM_DEFAULT) != CUDA_SUCCESS)
      fail(ErrorCode::kIo, "no stream is made");
  }
  ~BlockingStream() { SLUICE_OF_DRIVER(cuStreamDestroy)(stream_); }
  BlockingStream(const BlockingStream&) = delete;
  BlockingStream& operator=(const BlockingStream&) = delete;
  CUstream_st* get() const { return stream_; }

 private:
  const ClientContext context_;
  CUstream_st* stream_ = nullptr;
};

// A stream is captured into a graph, in PyTorch's default mode, until end() or the end of this object.
class Capture {
 public:
  explicit Capture(CUstream_st* stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL)
      : stream_(stream) {
    if (SLUICE_OF_DRIVER(cuStreamBeginCapture)(stream, mode) != CUDA_SUCCESS)
      fail(ErrorCode::kIo, "the capture does not begin");
  }
  ~Capture() { (void)end(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  // How many nodes the graph has; nothing where something has ended the capture before.
  std::optional<std::size_t> end() {
    CUstream_st* const stream = std::exchange(stream_, nullptr);
    CUgraph graph = nullptr;
    if (stream == nullptr || SLUICE_OF_DRIVER(cuStreamEndCapture)(stream, &graph) != CUDA_SUCCESS)
      return std::nullopt;
    std::size_t nodes = 0;
    SLUICE_OF_DRIVER(cuGraphGetNodes)(graph, nullptr, &nodes);
    SLUICE_OF_DRIVER(cuGraphDestroy)(graph);
    return nodes;
  }

 private:
  const ClientContext context_;
  CUstream_st* stream_;
};

}  // namespace sluice
