#pragma once
#include <memory>
#include <string>

#include "offload/transfer.h"

namespace sluice::offload {

// An open file descriptor, closed with it.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();
  int number() const { return number_; }

 private:
  int number_;
};

struct OpenedFile {
  Descriptor descriptor;
  std::string name;    // for messages
  std::string folder;  // where it lies
};

// Opens past the page cache, as IoService::open describes.
OpenedFile open_direct(const std::string& path, OpenMode mode);
// What kUnnamed does where O_TMPFILE is not known: a named file in the folder, whose name is removed at once.
OpenedFile open_and_unlink(const std::string& folder);

// A file of an I/O service; `sink` runs its transfers and outlives it.
std::unique_ptr<File> make_disk_file(OpenedFile opened, std::size_t block_bytes, TransferSink& sink);

// A service, or none of its destructor where the system still works on what its watch has given up: its
// threads then go on waiting, and nobody waits for them.
template <class Service>
class Leavable final : public IoService {
 public:
  explicit Leavable(const IoOptions& options) : service_(std::make_unique<Service>(options)) {}
  ~Leavable() override {
    if (service_->watch().waits_for_system()) static_cast<void>(service_.release());
  }
  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    return service_->open(path, mode);
  }
  std::string name() const override { return service_->name(); }

 private:
  std::unique_ptr<Service> service_;
};

}  // namespace sluice::offload
