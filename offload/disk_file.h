#pragma once
#include <memory>
#include <string>

#include "core/descriptor.h"
#include "offload/transfer.h"

namespace sluice::offload {

struct OpenedFile {
  Descriptor descriptor;
  std::string name;    // for error messages
  std::string folder;  // the folder that contains it
};

// Opens a file with O_DIRECT, as IoService::open() describes.
OpenedFile open_direct(const std::string& path, OpenMode mode);
// Creates a named file in the folder and unlinks it at once, for systems without O_TMPFILE.
OpenedFile open_and_unlink(const std::string& folder);

// Makes a File. `sink` runs its transfers and outlives it.
std::unique_ptr<File> make_disk_file(OpenedFile opened, std::size_t block_bytes, TransferSink& sink);

// Owns a service, but leaks it where the kernel still works on transfers that the service's watch has given
// up: joining its threads, which wait for those, might take for ever.
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
