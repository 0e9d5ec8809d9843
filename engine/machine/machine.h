#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/json.h"
#include "engine/plan/rates.h"
#include "offload/disk_cache.h"

namespace sluice::engine {

// A machine, this one or another, as docs/formats/machine.md describes it.
struct Machine {
  struct Memory {
    std::uint64_t total = 0, usable = 0;  // usable: by one process, where --memory is not stated
    std::uint64_t process = 0;            // what a process holds before a run takes anything; 0: unknown
  };
  struct Attention {
    Dtype type = Dtype::kF32;
    double flops = 0;
  };
  // The rate of updates of parameters of `type`, with state and master as the flags of these names say.
  struct Update {
    std::string optimizer;
    Dtype type = Dtype::kF32, state = Dtype::kF32;
    bool master = true;
    double elements = 0;  // elements a second
  };
  struct Disk {
    std::string folder;
    std::uint64_t free = 0;
    offload::DiskKnowledge known;  // `together` and `processor_seconds` are 0 where the file does not say
  };
  std::string source;  // the file it was read from
  int cores = 1;
  std::string cpu;
  std::vector<std::string> instructions;
  bool bf16_products = false;
  Memory memory;
  double memory_bandwidth = 0;
  std::vector<ProductRate> products;
  std::vector<Attention> attention;
  std::vector<Update> updates;
  std::vector<Disk> disks;
};

// Measures this machine without its disks, in two seconds. Throws as kernels::load_matrix_library().
Machine measure_machine();

// The document, without `findings`.
Json to_json(const Machine& machine);
// Throws Error(kInvalidArgument) that names file, key and value for a violation of the format, and
// Error(kNotFound) for a file that does not exist.
Machine read_machine(const std::string& path);

}  // namespace sluice::engine
