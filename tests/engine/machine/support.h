#pragma once
#include "core/support.h"
#include "core/text_file.h"
#include "engine/machine/machine.h"
#include "testing.h"

namespace sluice::engine::machines {

inline Json small_machine() {
  return Json::parse(
      R"({"version": 2, "cores": {"usable": 4}, "memory": {"usable": "64GiB", "bandwidth": 5e10},
    "products": [{"type": "f32", "m": 1024, "n": 768, "k": 768, "flops": 2e11}],
    "disks": [{"folder": "/nowhere/at/all", "free": "8TiB", "read": 6e9, "write": 5e9}]})");
}

// Writes a machine as a file: docs/formats/machine.md.
class MachineFile : public ::testing::Test {
 protected:
  Machine read(const std::string& text) const {
    write_text_file(path_, text);
    return read_machine(path_);
  }
  Machine read(const Json& json) const { return read(json.dump()); }
  const TemporaryFolder folder_;
  const std::string path_ = folder_.path("machine.json");
};

}  // namespace sluice::engine::machines
