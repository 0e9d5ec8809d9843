#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "offload/test_files.h"
#include "offload/transfer.h"

namespace sluice::offload {
namespace {

// A file's bytes, with the transfers of File's contract. Thread rule: its owner guards it.
class Content {
 public:
  std::uint64_t size() const { return bytes_.size(); }
  void resize(std::uint64_t bytes) { bytes_.resize(bytes); }

  std::exception_ptr read(const std::string& name, std::uint64_t offset, std::span<std::byte> into) const {
    const std::uint64_t there = offset < size() ? std::min<std::uint64_t>(into.size(), size() - offset) : 0;
    if (there < into.size()) return read_past_end(name, offset, into.size(), there);
    copy(into, offset);
    return nullptr;
  }
  void write(std::uint64_t offset, std::span<const std::byte> from) {
    if (offset + from.size() > size()) resize(offset + from.size());
    if (!from.empty()) std::memcpy(bytes_.data() + offset, from.data(), from.size());
  }
  // Bytes beyond the end are zeros.
  void copy(std::span<std::byte> into, std::uint64_t offset) const {
    const std::uint64_t there = offset < size() ? std::min<std::uint64_t>(into.size(), size() - offset) : 0;
    if (there > 0) std::memcpy(into.data(), bytes_.data() + offset, there);
    std::fill(into.begin() + static_cast<std::ptrdiff_t>(there), into.end(), std::byte{0});
  }

 private:
  std::vector<std::byte> bytes_;
};

// The common part of both kinds of files: bytes behind a lock, and transfers on the caller's thread.
template <class Interface>
class InMemoryFile : public Interface {
 public:
  explicit InMemoryFile(std::string name) : name_(std::move(name)) {}

  void read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency /*urgency*/) override {
    check_aligned(name_, Direction::kRead, offset, into.data(), into.size());
    std::unique_lock lock(mutex_);
    std::exception_ptr error = content_.read(name_, offset, into);
    lock.unlock();
    done(std::move(error));
  }
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency /*urgency*/) override {
    check_aligned(name_, Direction::kWrite, offset, from.data(), from.size());
    std::unique_lock lock(mutex_);
    content_.write(offset, from);
    written(offset, from.size());
    lock.unlock();
    done(nullptr);
  }
  void allocate(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    content_.resize(bytes);
    resized(bytes);
  }
  std::uint64_t size() const override {
    const std::lock_guard lock(mutex_);
    return content_.size();
  }
  const std::string& name() const override { return name_; }

 protected:
  // These are called with the lock held.
  virtual void written(std::uint64_t /*offset*/, std::size_t /*bytes*/) {}
  virtual void resized(std::uint64_t /*bytes*/) {}

  const std::string name_;
  mutable std::mutex mutex_;
  Content content_;
};

class MemoryFile final : public InMemoryFile<File> {
 public:
  using InMemoryFile::InMemoryFile;
  void sync() override {}
};

class VolatileMemoryFile final : public InMemoryFile<VolatileFile> {
 public:
  using InMemoryFile::InMemoryFile;
  void sync() override {
    const std::lock_guard lock(mutex_);
    durable_ = content_;
    unsynced_.clear();
  }
  void power_cut(std::uint64_t seed) override;

 private:
  void written(std::uint64_t offset, std::size_t bytes) override {
    for (std::uint64_t block = offset; block < offset + bytes; block += kDiskBlock) unsynced_.insert(block);
  }
  void resized(std::uint64_t bytes) override {
    unsynced_.erase(unsynced_.lower_bound(bytes), unsynced_.end());
  }

  Content durable_;
  std::set<std::uint64_t> unsynced_;  // the offsets of disk blocks that were written since the last sync
};

void VolatileMemoryFile::power_cut(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  const CounterRandom random(seed, 0);
  Content kept = durable_;
  for (const std::uint64_t offset : unsynced_) {
    const bool survives = (random.block(offset / kDiskBlock)[0] & 1) != 0;
    if (!survives) continue;
    const std::size_t bytes = std::min<std::uint64_t>(kDiskBlock, content_.size() - offset);
    std::vector<std::byte> block(bytes);
    content_.copy(block, offset);
    kept.write(offset, block);
  }
  durable_ = kept;
  content_ = std::move(kept);
  unsynced_.clear();
}

}  // namespace

std::unique_ptr<File> make_memory_file(std::string name) {
  return std::make_unique<MemoryFile>(std::move(name));
}

std::unique_ptr<VolatileFile> make_volatile_file(std::string name) {
  return std::make_unique<VolatileMemoryFile>(std::move(name));
}

}  // namespace sluice::offload
