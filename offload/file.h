#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/transfers.h"

namespace sluice::offload {

// When a transfer's turn comes: kNow, before all others of its service that are kLater; kLater, for what is
// streamed, so that it does not keep a caller from what it waits for.
enum class Urgency : std::uint8_t { kNow, kLater };

// A file that is read and written with O_DIRECT, past the page cache, with many transfers in flight. Offsets,
// sizes and buffer addresses are multiples of kDiskBlock, or the call throws Error(kInvalidArgument). A
// transfer ends complete or with an error: interrupted and short system calls are continued. Anything else
// (also a read past the end, and a device that does not respond) is an Error(kIo) that names file, offset,
// expected and found. Transfers run in any order: a caller that needs an order waits in between. The
// destructor waits for all transfers. Thread rule: any thread.
class File {
 public:
  virtual ~File() = default;
  virtual void read(std::uint64_t offset, std::span<std::byte> into, Done done,
                    Urgency urgency = Urgency::kNow) = 0;
  virtual void write(std::uint64_t offset, std::span<const std::byte> from, Done done,
                     Urgency urgency = Urgency::kNow) = 0;
  // Makes durable all writes whose Done was called before.
  virtual void sync() = 0;
  // Preallocates disk space for `bytes` in all (fallocate), so that no later write within it can fail for
  // lack of space; may also shrink the file. Throws Error(kBudget), with the free space, where the disk is
  // too full.
  virtual void allocate(std::uint64_t bytes) = 0;
  virtual std::uint64_t size() const = 0;
  virtual const std::string& name() const = 0;
};

enum class OpenMode {
  kRead,       // opens an existing file
  kReadWrite,  // opens an existing file
  kCreate,     // makes a new file; Error(kInvalidArgument) where there is one
  kUnnamed,    // makes an unnamed file in the folder `path` (O_TMPFILE), which vanishes with the process
};

// Runs the transfers of any number of files: by io_uring with a thread, or by a thread pool where io_uring is
// forbidden. Outlives its files.
class IoService {
 public:
  virtual ~IoService() = default;
  // Throws Error(kNotFound | kIo | kInvalidArgument); a file system without O_DIRECT is kInvalidArgument,
  // with a text that says what to do. Where the system lacks O_TMPFILE, kUnnamed creates a named file and
  // unlinks it at once.
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  virtual std::string name() const = 0;  // "io_uring" or "threads"
};

enum class IoWay : std::uint8_t { kUring, kThreads };

// How a service moves bytes. disk_cache.h finds the best options for a disk.
struct IoOptions {
  IoWay way = IoWay::kUring;             // which service make_io_service() makes
  unsigned queue_depth = 16;             // blocks that an io_uring has in flight
  std::size_t block_bytes = 512 * 1024;  // a longer transfer is cut into blocks of this size
  unsigned threads = 16;                 // size of the thread pool
  // A file's transfers fail with Error(kIo) where none of them has made progress for this long; so do sync()
  // and allocate() that take this long. (The kernel tries for some minutes to bring a device back.)
  std::chrono::milliseconds patience = std::chrono::minutes(5);
};

std::unique_ptr<IoService> make_uring_service(const IoOptions& options);  // Error(kIo) where it is forbidden
std::unique_ptr<IoService> make_thread_service(const IoOptions& options);
// Makes the service that options.way names. Where io_uring cannot be used, warns and uses threads.
std::unique_ptr<IoService> make_io_service(const IoOptions& options);
// Returns whether io_uring can be used here. If not, `why` gets the reason ("kernel.io_uring_disabled is 2",
// "forbidden by seccomp", ...).
bool uring_available(std::string* why);

}  // namespace sluice::offload
