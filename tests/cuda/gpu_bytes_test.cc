#include <mutex>

#include "cuda/ranks_on_gpus.h"

// The bytes that a steady step copies to GPUs and from them, reads from the disk and writes there, beside
// those of its plan. Units come in an order in which none is still on its GPU when it comes again.
namespace sluice::engine::twins {
namespace gpu_bytes_test {

struct Bytes {
  std::uint64_t in = 0, out = 0, read = 0, written = 0;
  Bytes operator-(const Bytes& other) const {
    return {in - other.in, out - other.out, read - other.read, written - other.written};
  }
  Bytes& operator+=(const Bytes& more) {
    in += more.in, out += more.out, read += more.read, written += more.written;
    return *this;
  }
};

class GpuBytes : public RanksOnGpusTest {
 protected:
  // Of all ranks together.
  struct Found {
    Bytes moved, planned;
    std::uint64_t read_apart = 0;  // planned, where no two ranks share a read
    std::uint64_t first_unit = 0, extents = 0;
  };
  static Case setup_of(const Placed& where, const char* optimizer, std::size_t rows) {
    Case setup;
    setup.optimizer = optimizer_of(optimizer, Dtype::kF32, true);
    setup.once = setup.cycles = true;
    setup.blocks = 24, setup.rows = rows, setup.steps = 3;
    setup.rates.disk_in_flight = 0;  // so that few pieces of shards on disk are in memory
    setup.device = 256 * kMiB;
    return placed(setup, where);
  }
  Found found(const Placed& where, int ranks, const char* optimizer = "adamw", std::size_t rows = 140) {
    const Case all = setup_of(where, optimizer, rows);
    begin_devices(ranks, Schedule::kRandom, 1);
    Found found;
    std::mutex mutex;
    comm::run_communicators(comm::World::kThreads, ranks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, ranks > 1 ? &of : nullptr);
      const auto moved = [&] {
        if (all.stage > 0) gpu.engine.settle();  // else updates end beside the next step
        device->synchronize(gpu.stream.get());
        of.barrier(1, "the step before");
        const fake_cuda::Counts counts = fake()->counts();
        const offload::RecordStore::Counters disk = gpu.made.disk->counters();
        of.barrier(1, "the count");
        const bool is_first = of.rank() == 0;
        return Bytes{is_first ? counts.bytes_in : 0, is_first ? counts.bytes_out : 0, disk.bytes_read,
                     disk.bytes_written};
      };
      gpu.client.load();
      for (int step = 0; step < 2; ++step) gpu.client.step(step);
      const Bytes before = moved();
      gpu.client.step(2);
      const Bytes after = moved();
      const Plan& plan = gpu.made.plan;
      Bytes planned{plan.step_bytes_in, plan.step_bytes_out, plan.step_bytes_read, plan.step_bytes_written};
      for (ParameterId p = 0; p < gpu.engine.layout().parameters(); ++p)
        planned.out += gpu.client.bytes(p);  // what the client looks at
      const std::lock_guard lock(mutex);
      found.moved += after - before;
      found.planned += planned;
      found.read_apart += plan.step_bytes_read_apart;
      found.first_unit += gpu.engine.layout().unit_bytes(0);
      found.extents += plan.extents;
    });
    return found;
  }
};

TEST_F(GpuBytes, AStepMovesAsManyAsArePlanned) {
  SLUICE_NEEDS_THE_FAKE();
  struct Row {
    Placed where;
    int ranks = 2;
    const char* optimizer = "adamw";
  };
  for (const Row& row :
       {Row{{0, kDevice, kHost, kDevice, kDevice}, 1}, Row{{1, kDevice, kHost, kDevice, kDevice}},
        Row{{1, kDevice, kHost, kDevice, kDevice, false, Dtype::kBf16}},
        Row{{1, kDevice, kDisk, kHost, kDisk}, 3}, Row{{1, kHost, kHost, kHost, kHost}},
        Row{{1, kHost, kDisk, kHost, kHost}}, Row{{1, kHost, kDisk, kHost, kHost, false, Dtype::kBf16}},
        Row{{1, kHost, kDisk, kDevice, kDisk}}, Row{{1, kHost, kDisk, kHost, kHost}, 2, "adafactor"},
        Row{{1, kHost, kDevice, kDevice, kHost}, 2, "adafactor"}}) {
    SCOPED_TRACE(fmt::format("{}, {}, {} ranks", text(row.where), row.optimizer, row.ranks));
    const bool wide = row.where.dtype == Dtype::kF32;
    const auto [moved, planned, apart, first_unit, extents] =
        found(row.where, row.ranks, row.optimizer, wide ? 140 : 280);
    // At a step's borders some units come again, since an update has changed them after they were fetched
    // ahead, or are still there. A trip that the plan leaves out is one of all 24 units.
    const std::uint64_t some = 3 * first_unit;
    const auto is_planned = [&](std::uint64_t bytes, std::uint64_t of_plan) {
      return bytes <= of_plan + some && of_plan <= bytes + some;
    };
    EXPECT_TRUE(is_planned(moved.in, planned.in)) << moved.in << ", planned " << planned.in;
    // One rank looks at squares of gradients for their norm.
    EXPECT_TRUE(row.ranks == 1 ? moved.out - planned.out < 4096 : moved.out == planned.out)
        << moved.out << ", planned " << planned.out;
    EXPECT_TRUE(is_planned(moved.read, planned.read)) << moved.read << ", planned " << planned.read;
    EXPECT_EQ(moved.written, planned.written);
  }
}

// Ranks bring a gradient from the disk to sum it, and once more for its update. Each time at most one
// gradient in each extent is still there, as no plan counts on.
TEST_F(GpuBytes, GradientsOnDiskComeForTheirSumAndForTheirUpdate) {
  SLUICE_NEEDS_THE_FAKE();
  for (const Placed& where : {Placed{1, kDevice, kDisk, kDisk, kDisk}, Placed{1, kHost, kDisk, kDisk, kDisk},
                              Placed{3, kHost, kDisk, kDisk, kDisk}}) {
    SCOPED_TRACE(text(where));
    const auto [moved, planned, apart, first_unit, extents] = found(where, 2);
    const std::uint64_t stays = 2 * extents * (700u << 10);
    const auto check = [&](std::uint64_t bytes, std::uint64_t of_plan) {
      EXPECT_LE(bytes, of_plan);
      EXPECT_GE(bytes + stays, of_plan);
    };
    check(moved.in, planned.in);
    check(moved.out, planned.out);
    check(moved.written, planned.written);
    if (where.stage < 3) check(moved.read, planned.read);
    EXPECT_LE(moved.read, apart);
  }
}

}  // namespace gpu_bytes_test
}  // namespace sluice::engine::twins
