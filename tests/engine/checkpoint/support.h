#pragma once
#include <fcntl.h>
#include <unistd.h>

#include "allocator/memory.h"
#include "core/descriptor.h"
#include "core/error.h"
#include "engine/checkpoint/part_writer.h"
#include "offload/file.h"
#include "testing.h"
#include "tests/temporary_folder.h"
#include "tests/thrown.h"

namespace sluice::engine {

inline std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_all(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Pseudo-random bytes that differ at each position.
inline std::string pattern(std::size_t size, std::uint32_t seed) {
  std::string bytes(size, '\0');
  std::uint32_t state = seed * 2654435761u + 1;
  for (char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

// Files whose transfers are held back, so that a test sees how many are under way. They may fail.
class HeldFiles : public offload::IoService {
 public:
  struct Counts {
    std::atomic<int> now{0}, most{0};
    std::atomic<int> transfers{0};
  };
  Counts reads, writes;
  std::atomic<int> fail_write{-1};  // the write with this number fails with ENOSPC
  std::chrono::milliseconds hold{0};

  std::unique_ptr<offload::File> open(const std::string& path, offload::OpenMode mode) override {
    return std::make_unique<HeldFile>(*this, path, mode);
  }
  std::string name() const override { return "held"; }

 private:
  class HeldFile : public offload::File {
   public:
    HeldFile(HeldFiles& owner, const std::string& path, offload::OpenMode mode)
        : owner_(owner),
          name_(path),
          file_(path, mode == offload::OpenMode::kRead     ? O_RDONLY
                      : mode == offload::OpenMode::kCreate ? O_RDWR | O_CREAT | O_EXCL
                                                           : O_RDWR) {}
    ~HeldFile() override {
      for (std::thread& thread : threads_) thread.join();
    }
    void read(std::uint64_t offset, std::span<std::byte> into, Done done,
              offload::Urgency /*urgency*/) override {
      require(offset, into.data(), into.size());
      run(owner_.reads, std::move(done), [this, offset, into](int) {
        const ssize_t n = ::pread(file_.get(), into.data(), into.size(), static_cast<off_t>(offset));
        if (n != static_cast<ssize_t>(into.size()))
          fail(ErrorCode::kIo, "'{}': read of {} at {}", name_, into.size(), offset);
      });
    }
    void write(std::uint64_t offset, std::span<const std::byte> from, Done done,
               offload::Urgency /*urgency*/) override {
      require(offset, from.data(), from.size());
      run(owner_.writes, std::move(done), [this, offset, from](int number) {
        if (number == owner_.fail_write) fail(ErrorCode::kIo, "'{}': no space left", name_);
        const ssize_t n = ::pwrite(file_.get(), from.data(), from.size(), static_cast<off_t>(offset));
        if (n != static_cast<ssize_t>(from.size())) fail(ErrorCode::kIo, "'{}': write", name_);
      });
    }
    void sync() override {}
    void allocate(std::uint64_t bytes) override {
      if (::ftruncate(file_.get(), static_cast<off_t>(bytes)) != 0) fail_system("allocate", name_);
    }
    std::uint64_t size() const override { return std::filesystem::file_size(name_); }
    const std::string& name() const override { return name_; }

   private:
    static void require(std::uint64_t offset, const void* data, std::size_t bytes) {
      EXPECT_EQ(offset % kDiskBlock, 0u);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % kDiskBlock, 0u);
      EXPECT_EQ(bytes % kDiskBlock, 0u);
      EXPECT_GT(bytes, 0u);
    }
    void run(Counts& counts, Done done, std::function<void(int)> transfer) {
      const int number = counts.transfers++;
      const int now = ++counts.now;
      for (int most = counts.most; now > most && !counts.most.compare_exchange_weak(most, now);) {
      }
      threads_.emplace_back(
          [&counts, number, hold = owner_.hold, done = std::move(done), transfer = std::move(transfer)] {
            std::exception_ptr error;
            std::this_thread::sleep_for(hold);
            try {
              transfer(number);
            } catch (...) {
              error = std::current_exception();
            }
            --counts.now;
            done(error);
          });
    }
    HeldFiles& owner_;
    std::string name_;
    Descriptor file_;
    std::vector<std::thread> threads_;
  };
};

// Writes a file, which exists with its length, by a PartWriter without other ranks, some bytes at a time.
// Returns its sum.
inline FileSum write_alone(offload::IoService& io, allocator::Ledger& ledger, const std::string& path,
                           const std::string& bytes, std::size_t buffer_bytes = kStreamBuffer) {
  constexpr std::size_t kPiece = 77'777;
  PartWriter writer(io, ledger, path, FileParts({{0, bytes.size()}}, 1), 0, {}, buffer_bytes);
  const auto all = std::as_bytes(std::span(bytes));
  for (std::size_t at = 0; at < all.size(); at += kPiece)
    writer.write(at, all.subspan(at, std::min(kPiece, all.size() - at)));
  FileSum sum{bytes.size(), {}};
  for (const BlockSum& block : writer.finish()) sum.blocks.push_back(block.sum);
  return sum;
}

// A folder, a service and a ledger, which all tests of files need.
class FilesTest : public ::testing::Test {
 protected:
  allocator::Ledger ledger_;
  HeldFiles io_;
  TemporaryFolder folder_;
  allocator::Region memory_{ledger_, allocator::Purpose::kStaging, kStreamBuffer};
  ReadAhead ahead_{memory_.bytes().first(kStreamBuffer)};
};

}  // namespace sluice::engine
