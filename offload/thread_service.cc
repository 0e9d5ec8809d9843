#include <unistd.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "offload/disk_file.h"
#include "offload/watch.h"

namespace sluice::offload {
namespace {

class ThreadService final : public IoService, public TransferSink {
 public:
  explicit ThreadService(const IoOptions& options)
      : block_bytes_(options.block_bytes), watch_(options.patience) {
    check_options(options);
    try {
      for (unsigned i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadService() override { stop(); }

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    return make_disk_file(open_direct(path, mode), block_bytes_, *this);
  }
  std::string name() const override { return "threads"; }
  Watch& watch() override { return watch_; }

 private:
  void submit(std::shared_ptr<Transfer> transfer) override {
    const bool several = transfer->blocks() > 1;
    {
      const std::lock_guard lock(mutex_);
      queue_.push(std::move(transfer));
    }
    if (several)
      changed_.notify_all();
    else
      changed_.notify_one();
  }

  std::optional<Block> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    return queue_.take();
  }

  void work() {
    while (std::optional<Block> block = take()) run(*block);
  }

  static void run(Block& block) {
    std::exception_ptr error;
    if (block.needs_io())
      while (block.advance(call_system(block), &error) == Block::Outcome::kAgain) {
      }
    if (block.transfer->end_block(std::move(error))) block.transfer->finish();
  }

  static std::int64_t call_system(const Block& block) {
    const Extent& extent = block.transfer->extent();
    const auto offset = static_cast<off_t>(block.offset + block.moved);
    std::byte* data = block.data + block.moved;
    const std::size_t bytes = block.bytes - block.moved;
    const ssize_t result = extent.direction == Direction::kRead
                               ? ::pread(extent.descriptor, data, bytes, offset)
                               : ::pwrite(extent.descriptor, data, bytes, offset);
    return result < 0 ? -std::int64_t{errno} : result;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const std::size_t block_bytes_;
  Watch watch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  BlockQueue queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoService> make_thread_service(const IoOptions& options) {
  return std::make_unique<Leavable<ThreadService>>(options);
}

}  // namespace sluice::offload
