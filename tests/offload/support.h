#pragma once
#include <stdlib.h>

#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "offload/file.h"
#include "offload/records.h"
#include "testing.h"

namespace sluice::offload::testing {

// Memory that is aligned for O_DIRECT.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(std::aligned_alloc(kDiskBlock, round_up(bytes + 1, kDiskBlock)))) {
    std::fill_n(data_.get(), bytes, std::byte{0xEE});
  }
  std::span<std::byte> all() { return {data_.get(), bytes_}; }
  std::span<std::byte> part(std::size_t offset, std::size_t bytes) { return all().subspan(offset, bytes); }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Fills with bytes that depend on the seed and their index, so that a misplaced or older block is seen.
inline void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  const CounterRandom random(seed, 7);
  for (std::size_t i = 0; i < bytes.size(); i += 16) {
    const auto words = random.block(i / 16);
    std::memcpy(bytes.data() + i, words.data(), std::min<std::size_t>(16, bytes.size() - i));
  }
}

inline bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// A temporary folder on a file system with O_DIRECT: in SLUICE_TEST_FOLDER, gtest's TempDir or the working
// folder.
class DirectFolder {
 public:
  DirectFolder() {
    const char* named = std::getenv("SLUICE_TEST_FOLDER");
    for (const std::string& base :
         {std::string(named != nullptr ? named : ""), ::testing::TempDir(), std::string(".")})
      if (!base.empty() && try_in(base)) return;
  }
  ~DirectFolder() {
    if (found()) std::filesystem::remove_all(path_);
  }
  DirectFolder(const DirectFolder&) = delete;
  DirectFolder& operator=(const DirectFolder&) = delete;

  bool found() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  bool try_in(const std::string& base) {
    std::string folder = base + "/sluice-offload-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) return false;
    try {
      make_thread_service({})->open(folder, OpenMode::kUnnamed);
      path_ = folder;
      return true;
    } catch (const Error&) {
      std::filesystem::remove_all(folder);
      return false;
    }
  }
  std::string path_;
};

inline constexpr const char* kNoDirectFolder =
    "no folder with O_DIRECT: set SLUICE_TEST_FOLDER to one on a local disk";

// Returns the Error that a call throws, or one that no test expects where it throws none.
template <class Call>
Error error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kInternal, "(no error)");
}

inline void write_now(File& file, std::uint64_t offset, std::span<const std::byte> from) {
  TransferGroup group;
  file.write(offset, from, group.add());
  group.wait();
}

inline void read_now(File& file, std::uint64_t offset, std::span<std::byte> into) {
  TransferGroup group;
  file.read(offset, into, group.add());
  group.wait();
}

inline void put(RecordStore& store, RecordId record, std::uint64_t offset, std::span<const std::byte> from) {
  TransferGroup group;
  store.write(record, offset, from, group.add());
  group.wait();
}

inline void get(RecordStore& store, RecordId record, std::uint64_t offset, std::span<std::byte> into) {
  TransferGroup group;
  store.read(record, offset, into, group.add());
  group.wait();
}

}  // namespace sluice::offload::testing
