#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace sluice::offload {

// Called once, on a thread of the File, when the transfer has ended; null: every byte was moved. It must be
// short and must not throw. The buffer may be used again from then on.
using Done = std::function<void(std::exception_ptr error)>;

// A file that is read and written past the page cache (O_DIRECT), many transfers at a time.
// Offsets, sizes and buffer addresses are multiples of kDiskBlock, or the call throws
// Error(kInvalidArgument). A transfer is whole or an error: interruptions and short transfers are continued,
// anything else (also a read past the end, and a device that does not answer) is an Error(kIo) that names
// file, offset, expected and found.
// Order: transfers run in any order; who needs one after another waits in between.
// Thread rule: any thread. Destruction waits for all transfers.
class File {
 public:
  virtual ~File() = default;
  virtual void read(std::uint64_t offset, std::span<std::byte> into, Done done) = 0;
  virtual void write(std::uint64_t offset, std::span<const std::byte> from, Done done) = 0;
  // What was written before (its Done called) is durable when this returns.
  virtual void sync() = 0;
  // Makes room for `bytes` in all (fallocate), so that no later write inside can fail for lack of space; also
  // shrinks. Throws Error(kBudget) where the disk has no room, and says how much is free.
  virtual void allocate(std::uint64_t bytes) = 0;
  virtual std::uint64_t size() const = 0;
  virtual const std::string& name() const = 0;
};

// The transfers that somebody waits for together. The first error is thrown by wait(), after all have ended.
// Thread rule: add() and wait() from one thread; the Done functions from any.
class Batch {
 public:
  Batch();
  ~Batch();  // waits
  Batch(Batch&&) noexcept;
  Batch& operator=(Batch&&) = delete;
  Done add();  // a Done to hand to one transfer
  bool finished() const;
  void wait();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

enum class OpenMode {
  kRead,       // an existing file
  kReadWrite,  // an existing file
  kCreate,     // a new file; Error(kInvalidArgument) where there is one
  kUnnamed,    // path is a folder: a file without a name in it (O_TMPFILE), which no kill can leave behind
};

// What runs transfers for any number of files: an io_uring with its thread, or a pool of threads where
// io_uring is forbidden. Outlives its files.
class IoService {
 public:
  virtual ~IoService() = default;
  // Throws Error(kNotFound | kIo | kInvalidArgument); a file system without O_DIRECT is
  // Error(kInvalidArgument), with what to do. Where O_TMPFILE is not known, kUnnamed makes a named file and
  // removes the name at once.
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  virtual std::string name() const = 0;  // "io_uring" or "threads"
};

enum class IoWay : std::uint8_t { kUring, kThreads };

// disk_cache.h knows which are best for a disk.
struct IoOptions {
  IoWay way = IoWay::kUring;             // of make_io_service
  unsigned queue_depth = 16;             // blocks given to an io_uring at a time
  std::size_t block_bytes = 512 * 1024;  // a longer transfer is cut into blocks of this size
  unsigned threads = 16;                 // of the pool
  // How long nothing of a file may move while transfers of it are under way, and how long sync() and
  // allocate() may take, before they are an Error(kIo). The kernel itself tries for some minutes to bring a
  // device back.
  std::chrono::milliseconds patience = std::chrono::minutes(5);
};

std::unique_ptr<IoService> make_uring_service(
    const IoOptions& options);  // throws Error(kIo) where it is forbidden
std::unique_ptr<IoService> make_thread_service(const IoOptions& options);
// By options.way; where io_uring cannot be used, threads with a warning that says why.
std::unique_ptr<IoService> make_io_service(const IoOptions& options);
// Whether io_uring can be used here; `why` says why not ("kernel.io_uring_disabled is 2", "forbidden by
// seccomp", ...).
bool uring_available(std::string* why);

// In memory, for tests: transfers run at once, on the caller's thread.
std::unique_ptr<File> make_memory_file(std::string name);

// What a fault-injecting file does wrong. Transfers are counted from 0 over reads and writes together.
struct Faults {
  std::uint64_t seed = 0;
  double read_error = 0, write_error = 0;  // probability of an EIO
  double read_flip = 0, write_flip = 0;    // probability of one flipped bit
  double lost_write = 0;                   // reported as done, never written (a stale block is read later)
  std::uint64_t fail_after =
      UINT64_MAX;  // every transfer from this one on fails with ENOSPC (writes) or EIO (reads)
  std::uint64_t truncate_after = UINT64_MAX;  // with this transfer the file loses its second half
  unsigned delay_microseconds = 0;            // each transfer ends this much later, on another thread
};
// Forwards to `inner`, with faults. `inner` outlives it, and `injected`, where it is not null, which counts
// them.
std::unique_ptr<File> make_faulty_file(File& inner, const Faults& faults,
                                       std::atomic<std::uint64_t>* injected = nullptr);

// In memory; writes are durable only after sync(). power_cut() loses a pseudo-random subset of the unsynced
// blocks.
class VolatileFile : public File {
 public:
  virtual void power_cut(std::uint64_t seed) = 0;
};
std::unique_ptr<VolatileFile> make_volatile_file(std::string name);

}  // namespace sluice::offload
