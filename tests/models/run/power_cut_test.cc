#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "core/descriptor.h"
#include "core/error.h"
#include "core/random.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/support.h"
#include "models/run/training_run.h"
#include "models/run/training_setup.h"
#include "offload/test_files.h"
#include "testing.h"

namespace sluice::models::testing {
namespace power_cut_test {

namespace fs = std::filesystem;

// A file of the system that also knows which bytes were synced. A power cut writes back what would be found
// afterwards, under whatever name the file has by then.
class Sector {
 public:
  Sector(const std::string& path, int flags)
      : shadow(offload::make_volatile_file(path)), descriptor(path, flags) {}

  void power_cut(std::uint64_t seed) {
    shadow->power_cut(seed);
    struct stat info = {};
    ASSERT_EQ(::fstat(descriptor.get(), &info), 0);
    const auto kept = std::min<std::uint64_t>(shadow->size(), static_cast<std::uint64_t>(info.st_size));
    const auto whole = round_up(kept, kDiskBlock);
    const std::unique_ptr<void, decltype(&std::free)> memory(
        std::aligned_alloc(kDiskBlock, whole + kDiskBlock), &std::free);
    auto* bytes = static_cast<std::byte*>(memory.get());
    TransferGroup batch;
    if (whole > 0) shadow->read(0, {bytes, whole}, batch.add());
    batch.wait();
    ASSERT_EQ(::ftruncate(descriptor.get(), 0), 0);
    ASSERT_EQ(::ftruncate(descriptor.get(), info.st_size), 0);
    ASSERT_EQ(::pwrite(descriptor.get(), bytes, kept, 0), static_cast<ssize_t>(kept));
  }

  std::unique_ptr<offload::VolatileFile> shadow;
  Descriptor descriptor;
};

// A disk that loses power at a given operation on its new files, and does nothing from then on.
class FailingDisk final : public offload::IoService {
 public:
  static constexpr std::uint64_t kNever = UINT64_MAX;
  FailingDisk(std::uint64_t cut_at, std::uint64_t seed) : cut_at_(cut_at), seed_(seed) {}

  std::unique_ptr<offload::File> open(const std::string& path, offload::OpenMode mode) override {
    if (mode == offload::OpenMode::kUnnamed) return offload::make_memory_file("swap");
    const bool is_new = mode == offload::OpenMode::kCreate;
    if (mode == offload::OpenMode::kReadWrite)
      return std::make_unique<FileOfDisk>(*this, path, made_.at(path));
    auto sector = std::make_shared<Sector>(path, is_new ? O_RDWR | O_CREAT | O_EXCL : O_RDONLY);
    if (is_new) sectors_.push_back(made_[path] = sector);
    return std::make_unique<FileOfDisk>(*this, path, std::move(sector));
  }
  std::string name() const override { return "failing"; }

  void power_cut() {
    if (std::exchange(dark_, true)) return;
    for (const auto& sector : sectors_) sector->power_cut(++seed_);
  }
  bool dark() const { return dark_; }
  std::uint64_t operations() const { return operations_; }

 private:
  class FileOfDisk final : public offload::File {
   public:
    FileOfDisk(FailingDisk& disk, std::string name, std::shared_ptr<Sector> sector)
        : disk_(disk), name_(std::move(name)), sector_(std::move(sector)) {}
    void read(std::uint64_t offset, std::span<std::byte> into, Done done,
              offload::Urgency /*urgency*/) override {
      const ssize_t n =
          ::pread(sector_->descriptor.get(), into.data(), into.size(), static_cast<off_t>(offset));
      done(n == static_cast<ssize_t>(into.size()) ? nullptr : failure());
    }
    void write(std::uint64_t offset, std::span<const std::byte> from, Done done,
               offload::Urgency /*urgency*/) override {
      if (disk_.fails()) return done(failure());
      const ssize_t n =
          ::pwrite(sector_->descriptor.get(), from.data(), from.size(), static_cast<off_t>(offset));
      sector_->shadow->write(offset, from, [](const std::exception_ptr&) {});
      done(n == static_cast<ssize_t>(from.size()) ? nullptr : failure());
    }
    void sync() override {
      if (disk_.fails()) std::rethrow_exception(failure());
      sector_->shadow->sync();
    }
    void allocate(std::uint64_t bytes) override {
      if (disk_.fails()) std::rethrow_exception(failure());
      sector_->shadow->allocate(bytes);
      if (::ftruncate(sector_->descriptor.get(), static_cast<off_t>(bytes)) != 0)
        fail_system("allocate", name_);
    }
    std::uint64_t size() const override { return sector_->shadow->size(); }
    const std::string& name() const override { return name_; }

   private:
    std::exception_ptr failure() const {
      return std::make_exception_ptr(Error(ErrorCode::kIo, name_ + ": the power is cut"));
    }
    FailingDisk& disk_;
    std::string name_;
    std::shared_ptr<Sector> sector_;
  };

  bool fails() {
    if (operations_++ == cut_at_) power_cut();
    return dark_;
  }

  std::uint64_t cut_at_, seed_, operations_ = 0;
  bool dark_ = false;
  std::vector<std::shared_ptr<Sector>> sectors_;         // of closed files, too, which may not be synced
  std::map<std::string, std::shared_ptr<Sector>> made_;  // those by the path that they were made with last
};

class PowerCutTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kSteps = 3;

  PowerCutTest() {
    std::ofstream file(text_);
    for (int i = 0; i < 600; ++i)
      file << "the river runs to the sea for the " << i * 7919 % 1000 << "th time. ";
  }

  TrainSettings settings(const std::string& name) const {
    TrainSettings s;
    s.model = "tiny";
    s.data = {text_};
    s.memory = 2048 * kMiB;  // sanitizers need some of it
    s.batch = 2;
    s.length = 32;
    s.steps = kSteps;
    s.threads = 2;
    s.out = folder_.path(name);
    s.save_every = 1;
    return s;
  }

  // Trains to the end, or until the power is cut: at an operation of the disk, or after a step is saved.
  std::uint64_t train(const std::string& name, std::uint64_t cut_at, std::uint64_t cut_after_save = 0,
                      std::uint64_t seed = 1) {
    models::Setup setup = prepare(settings(name));
    auto owned = std::make_unique<FailingDisk>(cut_at, seed);
    FailingDisk& disk = *owned;
    setup.tools->io = std::move(owned);
    TrainEvents events;
    std::uint64_t saves = 0;
    events.saved = [&](const CheckpointReport&) {
      if (++saves == cut_after_save) disk.power_cut();
    };
    events.stop = [&] { return disk.dark(); };
    const engine::RunLock lock(setup.settings.out);
    engine::remove_leftovers(setup.settings.out);
    const auto whole = engine::list_checkpoints(setup.settings.out).whole;
    try {
      RunRanks alone{TrainSettings()};
      TrainingRun run(setup, alone, events);
      if (whole.empty())
        run.load_initial();
      else
        run.resume(whole.back().path);
      run.train();
    } catch (const Error& error) {
      EXPECT_TRUE(disk.dark()) << error.what();
    }
    EXPECT_EQ(disk.dark(), cut_at != FailingDisk::kNever || cut_after_save != 0);
    return disk.operations();
  }

  // Checks that every named checkpoint is whole to the last byte. Returns the newest step, or 0.
  std::uint64_t newest(const std::string& name) {
    const engine::CheckpointList list = engine::list_checkpoints(folder_.path(name));
    EXPECT_TRUE(list.broken.empty()) << list.broken.at(0).reason;
    FailingDisk disk(FailingDisk::kNever, 0);
    for (const auto& whole : list.whole) {
      EXPECT_NO_THROW(engine::CheckpointReader(disk, whole.path, ahead_).verify()) << whole.path;
    }
    return list.whole.empty() ? 0 : list.whole.back().step;
  }

  std::map<std::string, std::string> final_files(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder_.path(name) + "/step-00000003"))
      if (entry.path().extension() == ".safetensors")
        files[entry.path().filename()] = engine::read_all(entry.path());
    return files;
  }

  TemporaryFolder folder_;
  std::string text_ = folder_.path("text.txt");
  allocator::Ledger ledger_;
  allocator::Region memory_{ledger_, allocator::Purpose::kStaging, engine::kStreamBuffer};
  engine::ReadAhead ahead_{memory_.bytes().first(engine::kStreamBuffer)};
};

// It comes at any operation, or right after a save, whose checkpoint is there afterwards.
TEST_F(PowerCutTest, ACutLeavesWholeCheckpointsAndTheSameBitsAfterwards) {
  const std::uint64_t operations = train("never", FailingDisk::kNever);
  const auto expected = final_files("never");
  ASSERT_EQ(expected.size(), 3u);
  ASSERT_GT(operations, 20u);
  for (std::uint64_t i = 0; i < kSteps; ++i) {  // in each save
    const std::string name = fmt::format("cut{}", i);
    const std::uint64_t at = (2 * i + 1) * operations / (2 * kSteps);
    SCOPED_TRACE(fmt::format("cut at operation {} of {}", at, operations));
    train(name, at, 0, i);
    EXPECT_EQ(newest(name), i);  // all saves have as many operations
    train(name, FailingDisk::kNever);
    EXPECT_TRUE(final_files(name) == expected);
  }
  for (const std::uint64_t save : {std::uint64_t{1}, kSteps}) {
    const std::string name = fmt::format("saved{}", save);
    train(name, FailingDisk::kNever, save, save);
    EXPECT_EQ(newest(name), save);
    train(name, FailingDisk::kNever);
    EXPECT_TRUE(final_files(name) == expected);
  }
}

}  // namespace power_cut_test
}  // namespace sluice::models::testing
