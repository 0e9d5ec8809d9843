#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "offload/file.h"

// Files in memory and files with faults. Every test that needs a disk to behave in some way uses these.
namespace sluice::offload {

// Makes a file in memory. Its transfers run at once, on the caller's thread.
std::unique_ptr<File> make_memory_file(std::string name);

// The files of a disk that has one.
inline std::vector<std::unique_ptr<File>> alone(std::unique_ptr<File> file) {
  std::vector<std::unique_ptr<File>> files;
  files.push_back(std::move(file));
  return files;
}

// A file that hands all calls on to another one, which outlives it. Tests derive files that do more.
class ForwardingFile : public File {
 public:
  explicit ForwardingFile(File& inner) : inner_(inner) {}
  void read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency urgency) override {
    inner_.read(offset, into, std::move(done), urgency);
  }
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency urgency) override {
    inner_.write(offset, from, std::move(done), urgency);
  }
  void sync() override { inner_.sync(); }
  void allocate(std::uint64_t bytes) override { inner_.allocate(bytes); }
  std::uint64_t size() const override { return inner_.size(); }
  const std::string& name() const override { return inner_.name(); }

 protected:
  File& inner_;
};

// The faults of a fault-injecting file. Transfers are counted from 0, reads and writes together.
struct Faults {
  std::uint64_t seed = 0;
  double read_error = 0, write_error = 0;  // probability of an EIO
  double read_flip = 0, write_flip = 0;    // probability of one flipped bit
  double lost_write = 0;                   // probability of a write that is reported as done but never made
  std::uint64_t fail_after =
      UINT64_MAX;  // from this transfer on, all fail with ENOSPC (writes) or EIO (reads)
  std::uint64_t truncate_after = UINT64_MAX;  // at this transfer the file loses its second half
  unsigned delay_microseconds = 0;            // each transfer ends so much later, on another thread
};
// Makes a file that forwards to `inner`, with faults. `injected` counts them, if it is not null. Both outlive
// it.
std::unique_ptr<File> make_faulty_file(File& inner, const Faults& faults,
                                       std::atomic<std::uint64_t>* injected = nullptr);

// A file in memory whose writes are durable only after sync(). power_cut() loses a pseudo-random subset of
// the blocks that were not synced.
class VolatileFile : public File {
 public:
  virtual void power_cut(std::uint64_t seed) = 0;
};
std::unique_ptr<VolatileFile> make_volatile_file(std::string name);

}  // namespace sluice::offload
