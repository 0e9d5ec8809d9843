#include "engine/machine/machine.h"

#include "core/bytes.h"
#include "core/system.h"
#include "engine/machine/process.h"
#include "engine/machine/support.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::engine::machine_test {
using machines::MachineFile;
using machines::small_machine;

TEST_F(MachineFile, ReadsWhatItWrote) {
  Machine machine = read(small_machine());
  machine.attention = {{Dtype::kBf16, 1e11}};
  machine.updates = {{"adamw", Dtype::kBf16, Dtype::kU8, false, 1e9}};
  machine.products.push_back(machine.products.front());
  machine.products.back().product.transpose_b = true;
  machine.disks.push_back(machine.disks.front());
  machine.disks.back().folder = "/nowhere/else";
  machine.disks.back().known.rates.together = 7e9;
  const Json written = to_json(machine);
  EXPECT_EQ(to_json(read(written)), written);
  EXPECT_EQ(machine.memory.usable, 64 * kGiB);
  EXPECT_EQ(machine.cores, 4);
}

TEST_F(MachineFile, IsRefusedByKeyAndValue) {
  struct Case {
    const char* pointer;
    Json value;  // null: the key is removed
    const char* told;
  };
  const std::vector<Case> cases = {
      {"/version", 1, "'version': 2 is needed"},
      {"/version", nullptr, "'version' is missing"},
      {"/version", "2", "and \"2\" is given"},
      {"/cores/usable", 0, "'usable': a whole number from 1 to 4096"},
      {"/cores/usable", -3, "and -3 is given"},
      {"/cores/usable", 2.5, "and 2.5 is given"},
      {"/cores/usable", 100000, "and 100000 is given"},
      {"/cores", 4, "an object is needed"},
      {"/memory/usable", nullptr, "memory: 'usable' is missing"},
      {"/memory/usable", "a lot", "and \"a lot\" is given"},
      {"/memory/usable", 1e30, "bytes are needed"},
      {"/memory/usable", "99999999TiB", "at most 2^60"},
      {"/memory/usable", 0, "more than nothing"},
      {"/memory/bandwidth", 0, "'bandwidth': a number above 0"},
      {"/memory/bandwidth", "fast", "and \"fast\" is given"},
      {"/memory/bandwith", 1, "'bandwith' is not known here: did you mean 'bandwidth'?"},
      {"/products", Json::array(), "at least one of type f32"},
      {"/products", Json::object(), "a list is needed"},
      {"/products/0", 7, "products[0]: an object is needed"},
      {"/products/0/flops", -1, "products[0]: 'flops'"},
      {"/products/0/type", "f64", "one of f32, bf16, f16 is needed"},
      {"/products/0/m", 0, "products[0]: 'm'"},
      {"/products/0/transpose_a", 1, "true or false"},
      {"/attention", 5, "'attention': a list"},
      {"/updates", Json::parse(R"([{"optimizer": "adamm"}])"), "the name of an optimizer"},
      {"/disks/0/read", nullptr, "disks[0]: 'read' is missing"},
      {"/disks/0/read", 1e300, "and 1e+300 is given"},
      {"/disks/0/free", -1, "disks[0]: 'free'"},
      {"/disks/0/block", 1000, "a multiple of 4096"},
      {"/disks/0/block", 0, "a multiple of 4096"},
      {"/disks/0/service", "mmap", "io_uring, threads"},
      {"/disks/0/under_way", 0, "'under_way'"},
      {"/disks/0/gpu", true, "'gpu' is not known here"},
      {"/gpus", Json::array(), "'gpus' is not known here"},
  };
  for (const Case& each : cases) {
    Json json = small_machine();
    const Json::json_pointer pointer(each.pointer);
    if (each.value.is_null())
      json[pointer.parent_pointer()].erase(pointer.back());
    else
      json[pointer] = each.value;
    EXPECT_THAT(message_of([&] { read(json); }), AllOf(StartsWith(path_), HasSubstr(each.told)))
        << each.pointer;
  }
  Json twice = small_machine();
  twice["disks"].push_back(twice["disks"][0]);
  EXPECT_THAT(message_of([&] { read(twice); }), HasSubstr("each folder once"));
}

TEST_F(MachineFile, IsRefusedWhereItIsNoWholeDocument) {
  for (const char* text : {"", "{", "[]", "7", "null", R"({"version": 2, "cores": {"usable": NaN}})",
                           R"({"version": 2, "cores": {"usable": 1e999}})"})
    EXPECT_THAT(message_of([&] { read(std::string(text)); }), StartsWith(path_)) << text;
  std::string twice = small_machine().dump();
  twice.replace(twice.find("\"usable\":4"), 10, "\"usable\":4,\"usable\":8");
  EXPECT_THAT(message_of([&] { read(twice); }), HasSubstr("the key 'usable' is there twice"));
  EXPECT_THAT(message_of([&] { read_machine(folder_.path()); }), HasSubstr("is not a file"));
  EXPECT_THROW(read_machine(folder_.path("none")), Error);
}

TEST(ProcessBytes, AreTheSameForSizesThatDifferByALittle) {
  const std::uint64_t stated = process_bytes(0, 2);
  EXPECT_EQ(process_bytes(26 * kMiB, 2), stated);
  EXPECT_EQ(process_bytes(stated, 2), stated);
  EXPECT_EQ(process_bytes(stated + 1, 2), round_up(stated + 1, 4 * kMiB));
  EXPECT_GT(process_bytes(0, 64), stated);
}

}  // namespace sluice::engine::machine_test
