#pragma once
#include <memory>
#include <string>

#include "core/descriptor.h"
#include "offload/transfer.h"

namespace sluice::offload {

struct OpenedFile {
  Descriptor descriptor;
  std::string name;    // for messages
  std::string folder;  // the folder that it is in
};

// Opens a file past the page cache, as IoService::open() describes.
OpenedFile open_direct(const std::string& path, OpenMode mode);
// Makes a named file in the folder and removes its name at once, where the system lacks O_TMPFILE.
OpenedFile open_and_unlink(const std::string& folder);

// Makes a file of an I/O service. `sink` runs its transfers and outlives it.
std::unique_ptr<File> make_disk_file(OpenedFile opened, std::size_t block_bytes, TransferSink& sink);

// Owns a service, but leaks it where the system still works on transfers that its watch has given up: the
// service's threads go on waiting for them, and nobody waits for the threads.
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
