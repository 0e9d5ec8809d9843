#include <cmath>
#include <optional>
#include <set>

#include "core/bytes.h"
#include "core/error.h"
#include "core/text_file.h"
#include "engine/machine/machine.h"
#include "optim/optimizer.h"

// Reads and writes machine files: docs/formats/machine.md.
namespace sluice::engine {
namespace {

constexpr int kMachineVersion = 2;
constexpr double kMostRate = 1e18;  // the largest rate of anything, per second
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60, kMostCores = 4096;
constexpr std::size_t kMostSize = std::size_t{1} << 31;  // the largest size of a product

// An object of the document. Each of its keys is read once; end() refuses keys that were not read.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) refuse("", "an object is needed", object);
  }

  const Json* find(const std::string& key) {
    asked_.push_back(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  const Json& at(const std::string& key) {
    const Json* const found = find(key);
    if (found == nullptr) fail(ErrorCode::kInvalidArgument, "{}: '{}' is missing", where_, name_of(key));
    return *found;
  }
  std::uint64_t whole(const std::string& key, std::uint64_t least, std::uint64_t most) {
    const Json& value = at(key);
    const bool fits = value.is_number_unsigned() && value >= least && value <= most;
    if (!fits) refuse(key, fmt::format("a whole number from {} to {} is needed", least, most), value);
    return value;
  }
  double rate(const std::string& key, bool or_none = false) {
    const Json& value = at(key);
    const double number = value.is_number() ? value.get<double>() : -1;
    const bool fits =
        std::isfinite(number) && number <= kMostRate && (number > 0 || (or_none && number == 0));
    if (!fits)
      refuse(key,
             fmt::format("a number {} 0, at most {:g}, is needed", or_none ? "from" : "above", kMostRate),
             value);
    return number;
  }
  // Reads a number of bytes, or a text such as --memory takes.
  std::uint64_t size(const std::string& key) {
    const Json& value = at(key);
    if (value.is_string()) {
      try {
        const std::uint64_t bytes = parse_size(value.get<std::string>());
        if (bytes <= kMostBytes) return bytes;
      } catch (const Error&) {  // reported below
      }
    } else if (value.is_number_unsigned() && value <= kMostBytes) {
      return value;
    }
    refuse(key, "bytes are needed, as a whole number or as \"512GiB\", at most 2^60", value);
  }
  bool truth(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_boolean()) refuse(key, "true or false is needed", value);
    return value;
  }
  std::string text(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_string() || value.get<std::string>().empty()) refuse(key, "a text is needed", value);
    return value;
  }
  template <class Read>
  auto word(const std::string& key, const Read& read, const char* known) {
    const auto found = read(text(key));
    if (!found) refuse(key, fmt::format("one of {} is needed", known), at(key));
    return *found;
  }
  template <class Body>
  void each(const std::string& key, const Body& body) {
    const Json& list = at(key);
    if (!list.is_array()) refuse(key, "a list is needed", list);
    for (std::size_t i = 0; i < list.size(); ++i) {
      Fields fields(list[i], fmt::format("{}: {}[{}]", where_, key, i));
      body(fields);
      fields.end();
    }
  }
  std::string place(const std::string& key) const { return where_ + ": " + key; }

  void end() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::ranges::find(asked_, key) != asked_.end()) continue;
      const std::string nearest = nearest_word(key, asked_);
      fail(ErrorCode::kInvalidArgument, "{}: '{}' is not known here{}; leave it out", where_, key,
           nearest.empty() ? "" : fmt::format(": did you mean '{}'?", nearest));
    }
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& wanted, const Json& found) const {
    fail(ErrorCode::kInvalidArgument, "{}: {}{}, and {} is given", where_,
         key.empty() ? "" : fmt::format("'{}': ", key), wanted,
         found.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 80));
  }

 private:
  static const std::string& name_of(const std::string& key) { return key; }
  const Json& object_;
  std::string where_;
  std::vector<std::string> asked_;
};

std::optional<offload::IoWay> way_from_name(const std::string& name) {
  if (name == "io_uring") return offload::IoWay::kUring;
  if (name == "threads") return offload::IoWay::kThreads;
  return std::nullopt;
}

std::optional<Dtype> float_from_name(const std::string& name) {
  const auto type = dtype_from_name(name);
  return type && is_float(*type) ? type : std::nullopt;
}

constexpr const char* kFloats = "f32, bf16, f16";

void read_cores(Fields fields, Machine& machine) {
  machine.cores = static_cast<int>(fields.whole("usable", 1, kMostCores));
  if (fields.find("model") != nullptr) machine.cpu = fields.text("model");
  fields.end();
}

void read_memory(Fields fields, Machine& machine) {
  machine.memory.usable = fields.size("usable");
  machine.memory_bandwidth = fields.rate("bandwidth");
  machine.memory.total = fields.find("total") != nullptr ? fields.size("total") : 0;
  machine.memory.process = fields.find("process") != nullptr ? fields.size("process") : 0;
  if (machine.memory.usable == 0) fields.refuse("usable", "more than nothing is needed", 0);
  fields.end();
}

ProductRate read_product(Fields& fields) {
  ProductRate rate;
  kernels::Product& product = rate.product;
  product.a.type = product.b.type = product.c.type = fields.word("type", float_from_name, kFloats);
  product.m = fields.whole("m", 1, kMostSize);
  product.n = fields.whole("n", 1, kMostSize);
  product.k = fields.whole("k", 1, kMostSize);
  product.transpose_a = fields.find("transpose_a") != nullptr && fields.truth("transpose_a");
  product.transpose_b = fields.find("transpose_b") != nullptr && fields.truth("transpose_b");
  rate.flops = fields.rate("flops");
  return rate;
}

Machine::Update read_update(Fields& fields) {
  Machine::Update update;
  update.optimizer = fields.text("optimizer");
  const std::vector<std::string> known = optim::optimizer_names();
  if (std::ranges::find(known, update.optimizer) == known.end())
    fields.refuse("optimizer", "the name of an optimizer is needed", update.optimizer);
  update.type = fields.word("type", float_from_name, kFloats);
  update.state = fields.word("state", optim::state_type_from_name, "f32, bf16, 8bit");
  update.master = fields.truth("master");
  update.elements = fields.rate("elements_per_second");
  return update;
}

Machine::Disk read_disk(Fields& fields) {
  Machine::Disk disk;
  disk.folder = fields.text("folder");
  disk.free = fields.size("free");
  offload::DiskKnowledge& known = disk.known;
  known.rates.read = fields.rate("read");
  known.rates.write = fields.rate("write");
  if (fields.find("together") != nullptr) known.rates.together = fields.rate("together");
  if (fields.find("processor_seconds_per_byte") != nullptr)
    known.processor_seconds = fields.rate("processor_seconds_per_byte", true);
  if (fields.find("service") != nullptr)
    known.io.way = fields.word("service", way_from_name, "io_uring, threads");
  if (fields.find("block") != nullptr) known.io.block_bytes = fields.size("block");
  if (fields.find("under_way") != nullptr)
    (known.io.way == offload::IoWay::kThreads ? known.io.threads : known.io.queue_depth) =
        static_cast<unsigned>(fields.whole("under_way", 1, kMostCores));
  if (known.io.block_bytes == 0 || known.io.block_bytes % kDiskBlock != 0)
    fields.refuse("block", fmt::format("a multiple of {} is needed", kDiskBlock), known.io.block_bytes);
  return disk;
}

void check_whole(const Machine& machine, const Fields& fields) {
  const auto is_f32 = [](const ProductRate& rate) { return rate.product.a.type == Dtype::kF32; };
  if (std::ranges::none_of(machine.products, is_f32))
    fields.refuse("products", "at least one of type f32 is needed", Json::array());
  std::set<std::string> folders;
  for (const Machine::Disk& disk : machine.disks)
    if (!folders.insert(disk.folder).second)
      fields.refuse("disks", "each folder once is needed", disk.folder);
}

Json json_of(const ProductRate& rate) {
  const kernels::Product& product = rate.product;
  return {{"type", name_of(product.a.type)},
          {"m", product.m},
          {"n", product.n},
          {"k", product.k},
          {"transpose_a", product.transpose_a},
          {"transpose_b", product.transpose_b},
          {"flops", rate.flops}};
}

Json json_of(const Machine::Disk& disk) {
  const offload::DiskKnowledge& known = disk.known;
  Json json = {{"folder", disk.folder},
               {"free", disk.free},
               {"read", known.rates.read},
               {"write", known.rates.write},
               {"processor_seconds_per_byte", known.processor_seconds},
               {"service", known.io.way == offload::IoWay::kThreads ? "threads" : "io_uring"},
               {"block", known.io.block_bytes},
               {"under_way", in_flight(known.io) / known.io.block_bytes}};
  if (known.rates.together > 0) json["together"] = known.rates.together;
  return json;
}

}  // namespace

Json to_json(const Machine& machine) {
  Json products = Json::array(), attention = Json::array(), updates = Json::array(), disks = Json::array();
  for (const ProductRate& rate : machine.products) products.push_back(json_of(rate));
  for (const Machine::Attention& rate : machine.attention)
    attention.push_back({{"type", name_of(rate.type)}, {"flops", rate.flops}});
  for (const Machine::Update& rate : machine.updates)
    updates.push_back({{"optimizer", rate.optimizer},
                       {"type", name_of(rate.type)},
                       {"state", optim::state_type_name(rate.state)},
                       {"master", rate.master},
                       {"elements_per_second", rate.elements}});
  for (const Machine::Disk& disk : machine.disks) disks.push_back(json_of(disk));
  Json cores = {{"usable", machine.cores}};
  if (!machine.cpu.empty()) cores["model"] = machine.cpu;
  return {{"version", kMachineVersion},
          {"cores", cores},
          {"instructions", machine.instructions},
          {"bf16_products", machine.bf16_products},
          {"memory",
           {{"total", machine.memory.total},
            {"usable", machine.memory.usable},
            {"bandwidth", machine.memory_bandwidth},
            {"process", machine.memory.process}}},
          {"products", products},
          {"attention", attention},
          {"updates", updates},
          {"disks", disks}};
}

Machine read_machine(const std::string& path) {
  const std::string text = read_text_file(path);
  const Json json = parse_json(text, path);
  Fields fields(json, path);
  Machine machine;
  machine.source = path;
  if (const Json& version = fields.at("version"); version != kMachineVersion)
    fields.refuse("version",
                  fmt::format("{} is needed, as `sluice doctor --json` writes it", kMachineVersion), version);
  read_cores({fields.at("cores"), fields.place("cores")}, machine);
  read_memory({fields.at("memory"), fields.place("memory")}, machine);
  machine.bf16_products = fields.find("bf16_products") != nullptr && fields.truth("bf16_products");
  fields.each("products", [&](Fields& each) { machine.products.push_back(read_product(each)); });
  if (fields.find("attention") != nullptr)
    fields.each("attention", [&](Fields& each) {
      machine.attention.push_back({each.word("type", float_from_name, kFloats), each.rate("flops")});
    });
  if (fields.find("updates") != nullptr)
    fields.each("updates", [&](Fields& each) { machine.updates.push_back(read_update(each)); });
  if (fields.find("disks") != nullptr)
    fields.each("disks", [&](Fields& each) { machine.disks.push_back(read_disk(each)); });
  for (const char* for_people : {"instructions", "findings"}) fields.find(for_people);
  fields.end();
  check_whole(machine, fields);
  return machine;
}

}  // namespace sluice::engine
