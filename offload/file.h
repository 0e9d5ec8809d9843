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

// A file that is read and written past the page cache (O_DIRECT), many transfers at a time. Offsets, sizes
// and buffer addresses are multiples of kDiskBlock, or the call throws Error(kInvalidArgument). A transfer is
// whole or an error: interrupted and short ones are continued; anything else (also a read past the end, and a
// device that does not answer) is an Error(kIo) that names file, offset, expected and found. Transfers run in
// any order: a caller that needs an order waits in between. The destructor waits for all transfers. Thread
// rule: any thread.
class File {
 public:
  virtual ~File() = default;
  virtual void read(std::uint64_t offset, std::span<std::byte> into, Done done) = 0;
  virtual void write(std::uint64_t offset, std::span<const std::byte> from, Done done) = 0;
  // When it returns, all writes whose Done was called before are durable.
  virtual void sync() = 0;
  // Reserves disk space for `bytes` in all (fallocate), so that no later write inside can fail for lack of
  // space; also shrinks. Throws Error(kBudget) that says how much is free where the disk has no room.
  virtual void allocate(std::uint64_t bytes) = 0;
  virtual std::uint64_t size() const = 0;
  virtual const std::string& name() const = 0;
};

enum class OpenMode {
  kRead,       // opens an existing file
  kReadWrite,  // opens an existing file
  kCreate,     // makes a new file; Error(kInvalidArgument) where there is one
  kUnnamed,    // makes a file without a name in the folder `path` (O_TMPFILE), which no kill can leave behind
};

// Runs the transfers of any number of files: by an io_uring with a thread, or by a pool of threads where
// io_uring is forbidden. Outlives its files.
class IoService {
 public:
  virtual ~IoService() = default;
  // Throws Error(kNotFound | kIo | kInvalidArgument); for a file system without O_DIRECT it is
  // kInvalidArgument, and the text says what to do. Where the system does not know O_TMPFILE, kUnnamed makes
  // a named file and removes its name at once.
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  virtual std::string name() const = 0;  // "io_uring" or "threads"
};

enum class IoWay : std::uint8_t { kUring, kThreads };

// How a service moves bytes. disk_cache.h finds the best options for a disk.
struct IoOptions {
  IoWay way = IoWay::kUring;             // which service make_io_service() makes
  unsigned queue_depth = 16;             // how many blocks an io_uring is given at a time
  std::size_t block_bytes = 512 * 1024;  // a longer transfer is cut into blocks of this size
  unsigned threads = 16;                 // how many threads the pool has
  // Transfers of a file fail with Error(kIo) where nothing of the file has moved for so long, and sync() and
  // allocate() where they take so long. (The kernel tries for some minutes to bring a device back.)
  std::chrono::milliseconds patience = std::chrono::minutes(5);
};

std::unique_ptr<IoService> make_uring_service(const IoOptions& options);  // Error(kIo) where it is forbidden
std::unique_ptr<IoService> make_thread_service(const IoOptions& options);
// Makes the service of options.way. Where io_uring cannot be used, warns and uses threads.
std::unique_ptr<IoService> make_io_service(const IoOptions& options);
// Says whether io_uring can be used here. If not, `why` gets the reason ("kernel.io_uring_disabled is 2",
// "forbidden by seccomp", ...).
bool uring_available(std::string* why);

}  // namespace sluice::offload
