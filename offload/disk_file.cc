#include "offload/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <functional>

#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "offload/records.h"
#include "offload/watch.h"

namespace sluice::offload {
namespace {

class DiskFile final : public File {
 public:
  DiskFile(OpenedFile opened, std::size_t block_bytes, TransferSink& sink)
      : opened_(std::make_shared<const OpenedFile>(std::move(opened))),
        block_bytes_(block_bytes),
        sink_(sink) {}
  ~DiskFile() override { open_.wait(); }

  void read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency urgency) override {
    begin(Direction::kRead, urgency, offset, into.data(), into.size(), std::move(done));
  }
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency urgency) override {
    begin(Direction::kWrite, urgency, offset, const_cast<std::byte*>(from.data()), from.size(),
          std::move(done));
  }
  void sync() override;
  void allocate(std::uint64_t bytes) override;
  std::uint64_t size() const override { return static_cast<std::uint64_t>(status().st_size); }
  const std::string& name() const override { return opened_->name; }

 private:
  void begin(Direction direction, Urgency urgency, std::uint64_t offset, std::byte* data, std::size_t bytes,
             Done done);
  int call_system(const std::string& what, std::function<int(int descriptor)> call) const;
  struct stat status() const;
  void cut(std::uint64_t bytes);
  void check_room(std::uint64_t bytes) const;
  [[noreturn]] void fail_for_room(std::uint64_t bytes, std::uint64_t held, const std::string& reason) const;

  std::shared_ptr<const OpenedFile> opened_;
  std::size_t block_bytes_;
  TransferSink& sink_;
  OpenTransfers open_;
};

void DiskFile::begin(Direction direction, Urgency urgency, std::uint64_t offset, std::byte* data,
                     std::size_t bytes, Done done) {
  check_aligned(name(), direction, offset, data, bytes);
  const Extent extent{opened_->descriptor.get(), direction, urgency, offset, data, bytes};
  const auto transfer = std::make_shared<Transfer>(extent, opened_, block_bytes_, name(), open_,
                                                   sink_.watch(), std::move(done));
  sink_.watch().begun(transfer);
  sink_.submit(transfer);
}

// Runs the call with a duplicated descriptor, since it may continue after it was given up. Returns an errno;
// `what` begins the error's text.
int DiskFile::call_system(const std::string& what, std::function<int(int descriptor)> call) const {
  const int number = ::fcntl(opened_->descriptor.get(), F_DUPFD_CLOEXEC, 0);
  if (number < 0)
    fail(ErrorCode::kIo, "{}: its descriptor cannot be duplicated: {}", name(), errno_text(errno));
  const auto own = std::make_shared<Descriptor>(number);
  return call_with_patience(sink_.watch().patience(), name() + ": " + what, [own, call = std::move(call)] {
    int error_number = 0;
    do error_number = call(own->get()) == 0 ? 0 : errno;
    while (error_number == EINTR);
    return error_number;
  });
}

void DiskFile::sync() {
  const int error_number =
      call_system("making its writes durable", [](int file) { return ::fdatasync(file); });
  if (error_number != 0)
    fail(ErrorCode::kIo, "{}: its writes cannot be made durable: {}", name(), errno_text(error_number));
}

struct stat DiskFile::status() const {
  struct stat result {};
  if (::fstat(opened_->descriptor.get(), &result) != 0)
    fail(ErrorCode::kIo, "{}: its size cannot be read: {}", name(), errno_text(errno));
  return result;
}

void DiskFile::cut(std::uint64_t bytes) {
  if (::ftruncate(opened_->descriptor.get(), static_cast<off_t>(bytes)) != 0)
    fail(ErrorCode::kIo, "{}: its size cannot be set to {} bytes: {}", name(), bytes, errno_text(errno));
}

void DiskFile::fail_for_room(std::uint64_t bytes, std::uint64_t held, const std::string& reason) const {
  const std::uint64_t free = free_disk_bytes(opened_->folder);
  const std::uint64_t needed = bytes > held ? bytes - held : 0;
  fail(ErrorCode::kBudget,
       "{}: {} more are needed, but the disk of '{}' has {} free, {} too little ({}): free space or name "
       "another folder",
       name(), format_size(needed), opened_->folder, format_size(free),
       format_size(needed > free ? needed - free : 0), reason);
}

void DiskFile::check_room(std::uint64_t bytes) const {
  const std::uint64_t held = static_cast<std::uint64_t>(status().st_blocks) * 512;
  if (bytes > held && bytes - held > free_disk_bytes(opened_->folder))
    fail_for_room(bytes, held, errno_text(ENOSPC));
}

void DiskFile::allocate(std::uint64_t bytes) {
  if (bytes > static_cast<std::uint64_t>(INT64_MAX))
    fail(ErrorCode::kInvalidArgument, "{}: {} bytes are more than a file can have", name(), bytes);
  const struct stat before = status();
  const auto old_size = static_cast<std::uint64_t>(before.st_size);
  if (bytes < old_size) cut(bytes);
  if (bytes == 0) return;
  check_room(bytes);
  const int error_number = call_system(fmt::format("reserving {} bytes", bytes), [bytes](int file) {
    return ::fallocate(file, 0, 0, static_cast<off_t>(bytes));
  });
  if (error_number == 0) return;
  if (error_number == EOPNOTSUPP || error_number == ENOSYS) {
    log().warn(
        "{}: its file system cannot reserve space (no fallocate): another writer may fill the disk during "
        "the run",
        name());
    return cut(bytes);
  }
  if (bytes > old_size) cut(old_size);
  if (error_number == EFBIG)
    fail(ErrorCode::kBudget,
         "{}: a size of {} was asked for, but the process or the file system allows no file of that size: "
         "see 'ulimit -f' and the file system's largest file size",
         name(), format_size(bytes));
  if (error_number == ENOSPC || error_number == EDQUOT)
    fail_for_room(bytes, static_cast<std::uint64_t>(before.st_blocks) * 512, errno_text(error_number));
  fail(ErrorCode::kIo, "{}: {} bytes cannot be reserved: {}", name(), bytes, errno_text(error_number));
}

}  // namespace

std::unique_ptr<File> make_disk_file(OpenedFile opened, std::size_t block_bytes, TransferSink& sink) {
  return std::make_unique<DiskFile>(std::move(opened), block_bytes, sink);
}

}  // namespace sluice::offload
