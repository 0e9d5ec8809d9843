#include "cuda/ranks_on_gpus.h"

// Gradients of ranks on GPUs: how they are summed in backward and beside it, and what of them a rank keeps.
namespace sluice::engine::twins {
namespace rank_gradients_test {

// A unit of one piece and a part of another, whose narrow gradients become f32 in their own memory: in frames
// or in a record. Of three ranks the second one's sum begins among narrow elements, and ends behind them.
TEST_F(RanksOnGpusTest, NarrowGradientsBecomeSumsWhereTheyAre) {
  Case setup;
  setup.optimizer = optimizer_of("adamw", Dtype::kBf16, false);
  setup.once = setup.ends = true;
  setup.blocks = 1;
  setup.device = kGiB;
  setup.rows = 4400;
  expect_bits_of_cpus(setup, 3, {1, kHost, kDevice, kHost, kHost, false, Dtype::kBf16}, Schedule::kLate, 1);
  setup.rows = 8600;
  expect_bits_of_cpus(setup, 2, {1, kDevice, kDevice, kDevice, kDevice, true, Dtype::kBf16}, Schedule::kLate,
                      1);
}

// The client reads and keeps gradients that were summed in the place of narrow ones, and adds to them.
TEST_F(RanksOnGpusTest, SumsInThePlaceOfNarrowGradientsAreThereToBeRead) {
  Case setup;
  setup.once = setup.ends = setup.measures = true;
  setup.edits = setup.keeps = true;
  setup.steps = 3;
  setup.device = 192 * kMiB;
  for (const auto& [by, gradients, gpus_meet] : {std::tuple{kDevice, kHost, false},
                                                 {kHost, kHost, false},
                                                 {kDevice, kDevice, true},
                                                 {kHost, kHost, true}})
    expect_bits_of_cpus(setup, 2, {1, by, kDevice, gradients, by, gpus_meet, Dtype::kBf16}, Schedule::kLate,
                        1);
}

// Where a step ends with the updates, sums go on beside backward, in an order on which ranks agree.
TEST_F(RanksOnGpusTest, SumsBesideBackwardHaveTheBitsOfTheCpus) {
  std::uint64_t seed = 0;
  for (const Placed& p : {Placed{0, kHost, kHost, kHost, kHost, false, Dtype::kBf16},
                          Placed{1, kDevice, kHost, kDevice, kDevice}, Placed{1, kHost, kHost, kHost, kHost},
                          Placed{0, kHost, kHost, kDisk, kHost},
                          Placed{0, kDevice, kHost, kDevice, kDevice, true, Dtype::kBf16},
                          Placed{1, kDevice, kHost, kDisk, kDevice, true},
                          Placed{3, kHost, kHost, kDevice, kHost, true, Dtype::kBf16},
                          Placed{3, kDevice, kHost, kHost, kDevice, true}}) {
    Case setup;
    setup.ends = true, setup.once = p.dtype == Dtype::kBf16;
    setup.blocks = 5, setup.steps = 3;
    setup.micro_batches = 1 + seed % 2;
    setup.device = 192 * kMiB;
    world_ = seed == 2 ? comm::World::kMixedHosts : comm::World::kThreads;
    expect_bits_of_cpus(setup, 2, p, static_cast<Schedule>(seed % 3), seed);
    ++seed;
  }
}

// Of gradients that were summed in backward a rank keeps its own part alone, until the step's end.
TEST_F(RanksOnGpusTest, KeepTheirOwnPartsOfGradients) {
  std::uint64_t seed = 0;
  for (const Placed& p : {Placed{2, kDevice, kDevice, kDevice, kDevice, true},
                          Placed{2, kDevice, kDevice, kHost, kDevice, false, Dtype::kBf16},
                          Placed{2, kHost, kDevice, kHost, kHost, true, Dtype::kBf16},
                          Placed{3, kDevice, kDevice, kDevice, kDevice, true, Dtype::kBf16},
                          Placed{3, kDevice, kDevice, kHost, kDisk, true},
                          Placed{3, kHost, kDevice, kHost, kHost, true, Dtype::kBf16}}) {
    Case setup;
    if (seed == 2) setup.optimizer = optimizer_of("adafactor", Dtype::kF32, true);
    setup.ends = setup.once = setup.measures = true;
    setup.blocks = 5, setup.rows = 300, setup.steps = 3;
    setup.edits = setup.parts = p.stage == 3;
    setup.device = 256 * kMiB;
    const auto look = [&](const Made& made) {
      EXPECT_TRUE(made.plan.sums_in_backward);
      EXPECT_GE(std::ranges::count(made.plan.units, true, &UnitPlan::gradient_in_shards), 5);
      EXPECT_EQ(std::ranges::count(made.plan.units, true, &UnitPlan::gradient_shard_in_record) > 0,
                p.gradients == kHost);
    };
    expect_bits_of_cpus(setup, 2 + static_cast<int>(seed % 2), p, static_cast<Schedule>(seed % 3), seed,
                        look);
    ++seed;
  }
}

// Each micro-batch's gradients are summed in its backward pass, and a rank adds up its own parts.
TEST_F(RanksOnGpusTest, AddUpTheirOwnPartsOfGradients) {
  std::uint64_t seed = 0;
  for (const Placed& p : {Placed{2, kDevice, kDevice, kDevice, kDevice, true, Dtype::kBf16},
                          Placed{2, kDevice, kDevice, kHost, kDevice},
                          Placed{2, kHost, kDevice, kHost, kHost, true, Dtype::kBf16},
                          Placed{3, kDevice, kDevice, kDevice, kDevice, true},
                          Placed{3, kDevice, kDevice, kHost, kDisk, true, Dtype::kBf16},
                          Placed{3, kHost, kDevice, kDisk, kHost, false, Dtype::kBf16}}) {
    Case setup;
    if (seed == 2) setup.optimizer = optimizer_of("adafactor", Dtype::kF32, true);
    setup.ends = setup.each_backward = setup.measures = true;
    setup.once = seed % 2 == 0;
    setup.micro_batches = seed == 3 ? 1 : 2 + seed % 2;
    setup.blocks = 5, setup.rows = 300, setup.steps = 4;
    setup.edits = setup.parts = p.stage == 3;
    setup.device = 256 * kMiB;
    const auto look = [&](const Made& made) {
      EXPECT_TRUE(made.plan.sums_each_backward);
      EXPECT_EQ(std::ranges::count(made.plan.units, true, &UnitPlan::gradient_in_shards), 6);
      EXPECT_EQ(std::ranges::count(made.plan.units, true, &UnitPlan::gradient_shard_in_record) > 0,
                p.gradients != kDevice);
    };
    expect_bits_of_cpus(setup, 2 + static_cast<int>(seed % 2), p, static_cast<Schedule>(seed % 3), seed,
                        look);
    ++seed;
  }
}

// Ranks drop, keep and multiply gradients between their sums and the step, all alike or not.
TEST_F(RanksOnGpusTest, PartsOfGradientsAreDroppedAndKeptByAllRanksAlike) {
  Case setup;
  setup.ends = true, setup.rows = 300;
  setup.stage = 2;
  setup.device = 192 * kMiB;
  const StepSettings settings{.groups = {{0.02, 0.1}, {0.02, 0}}, .clip = 0.5};
  begin_devices(2, Schedule::kRandom, 1);
  train(2, [&](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_for(of);
    const Case own = of_rank(setup, of);
    OnGpu gpu(own, *device, &of);
    AnyOrderEngine& engine = gpu.engine;
    EXPECT_TRUE(gpu.made.plan.sums_in_backward);
    gpu.client.load();
    const auto add = [&](UnitId unit, const char* refusal = nullptr) {
      engine.acquire(unit, Hold::kGradient);
      for (ParameterId p = engine.layout().first_parameter(unit); p < engine.layout().end_parameter(unit);
           ++p) {
        const auto call = [&] {
          engine.add_gradient(p, gpu.hands.copy_of(engine.parameter(p), gpu.client.bytes(p)));
        };
        if (refusal == nullptr)
          call();
        else
          expect_error(ErrorCode::kState, {refusal}, call);
      }
      engine.release(unit);
    };
    const auto compute = [&] {
      for (UnitId unit = 0; unit < engine.layout().units().size(); ++unit)
        if (engine.layout().trainable(unit)) add(unit);
      engine.end_micro_batch();
    };
    const auto drop_all = [&] {
      for (ParameterId p = 0; p < engine.layout().parameters(); ++p) engine.drop_gradient(p);
    };
    const auto refused = [](ErrorCode code, const char* what, const std::function<void()>& call) {
      expect_error(code, {what}, call);
    };
    engine.begin_step(settings);
    compute();
    const double norm = engine.gradient_norm(0);
    refused(ErrorCode::kState, "ask for stage 1", [&] { engine.read_gradient(0, {nullptr, Dtype::kF32}); });
    add(1, "added to no more");
    drop_all();
    compute();  // the same micro-batch again
    EXPECT_EQ(engine.gradient_norm(0), norm);
    StepSettings others = settings;
    others.groups[0].learning_rate *= of.rank() + 1;
    refused(ErrorCode::kState, "give all ranks the same", [&] { engine.step(others); });
    if (of.rank() == 1) engine.drop_gradient(0);
    refused(ErrorCode::kState, "was dropped on rank 1, and is there on rank 0",
            [&] { engine.step(settings); });
    if (of.rank() == 0) engine.drop_gradient(0);
    if (of.rank() == 1) engine.multiply_gradient(2, 0.5);
    refused(ErrorCode::kState, "was multiplied by 0.5 on rank 1", [&] { engine.step(settings); });
    if (of.rank() == 0) engine.multiply_gradient(2, 0.5);
    StepSettings keeping = settings;
    keeping.keep_gradients = true;
    EXPECT_GT(engine.step(keeping).gradient_norm, 0);
    EXPECT_GT(engine.gradient_norm(1), 0);
    engine.begin_step(settings);
    add(1, "ask for stage 1");
    return Outcome{};
  });
}

// A part that is kept over a step lies beside a new one of another parameter of its unit.
TEST_F(RanksOnGpusTest, PartsThatAreKeptStayBesideNewOnesOfTheirUnit) {
  Outcomes of_stages[2];
  for (const std::size_t stage : {1, 2}) {
    Case setup;
    setup.ends = true, setup.rows = 300, setup.blocks = 6;
    setup.stage = stage;
    setup.device = 192 * kMiB;
    setup.updates = kDevice;
    const StepSettings settings{.groups = {{0.02, 0.1}, {0.02, 0}}, .clip = 0.5, .keep_gradients = true};
    begin_devices(2, Schedule::kLate, 1);
    of_stages[stage - 1] = train(2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const Case own = of_rank(setup, of);
      OnGpu gpu(own, *device, &of);
      AnyOrderEngine& engine = gpu.engine;
      EXPECT_EQ(gpu.made.plan.sums_in_backward, stage == 2);
      gpu.client.load();
      const Layout& layout = engine.layout();
      const auto add = [&](const std::function<bool(ParameterId)>& has) {
        for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
          if (!layout.trainable(unit)) continue;
          engine.acquire(unit, Hold::kGradient);
          for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
            if (has(p)) engine.add_gradient(p, gpu.hands.copy_of(engine.parameter(p), gpu.client.bytes(p)));
          engine.release(unit);
        }
        engine.end_micro_batch();
        return engine.step(settings).gradient_norm;
      };
      const auto is_new = [&](ParameterId p) { return p == layout.first_parameter(1) + 1; };
      engine.begin_step(settings);
      const double first = add([](ParameterId) { return true; });
      engine.drop_gradient(layout.first_parameter(1) + 1);
      engine.begin_step(settings);
      const double second = add(is_new);
      Outcome outcome = gpu.client.save();
      outcome.norms = {first, second};
      return outcome;
    });
  }
  EXPECT_TRUE(of_stages[0] == of_stages[1]);
}

// A rank keeps its part of a gradient in memory alone.
TEST_F(RanksOnGpusTest, GradientsStayWholeAtStage3WhereTheyAreToBeOnDisk) {
  Case setup;
  setup.ends = setup.once = true;
  setup.blocks = 2;
  setup.device = 192 * kMiB;
  expect_bits_of_cpus(setup, 2, {3, kHost, kDevice, kDisk, kHost}, Schedule::kRandom, 1,
                      [](const Made& made) {
                        EXPECT_FALSE(made.plan.sums_in_backward);
                        EXPECT_GT(made.plan.disk_bytes, 0u);
                      });
}

// From the second step on ranks know which units have gradients, and in which order.
TEST_F(RanksOnGpusTest, SumsAreMadeBeforeTheMicroBatchEnds) {
  for (const auto gradients : {kDevice, kHost}) {
    Case all;
    all.ends = all.once = true;
    all.device = 192 * kMiB;
    all.places = {kHost, gradients, kHost};
    all.updates = kHost;
    begin_devices(2, Schedule::kRandom, 1);
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, &of);
      gpu.client.load();
      for (const int step : {0, 1, 4}) {
        const std::uint64_t before = of.counters().received;
        gpu.client.after_backward = [&, step](UnitId unit) {
          if (unit != 0) return;
          const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (step == 4 && of.counters().received - before < gpu.made.plan.step_bytes_received &&
                 std::chrono::steady_clock::now() < deadline)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          EXPECT_TRUE(step < 4 || of.counters().received - before >= gpu.made.plan.step_bytes_received);
        };
        gpu.client.step(step);
      }
      of.barrier(1, "the end of a test");
    });
  }
}

// A step is interrupted while its sums go on: it is abandoned, when ranks have begun different ones, and made
// again; or more is added to what is being summed, and the next unit's gradient does not come to one of the
// ranks.
TEST_F(RanksOnGpusTest, SumsThatGoOnAreJoinedByAll) {
  struct Stop {};
  static constexpr UnitId kAgain = 5;  // to which ranks come first
  const auto train_one = [](const Case& own, Client& client, AnyOrderEngine& engine, Hands& hands) {
    client.load();
    std::vector<double> norms;
    for (int step = 0; step < 4; ++step) {
      client.after_backward = [&](UnitId unit) {
        if (step == 1 && unit == (own.ranks.rank == 0 ? 3 : 0)) throw Stop();
        if (step < 3 || unit != kAgain) return;
        const ParameterId p = engine.layout().first_parameter(kAgain);
        engine.acquire(kAgain, Hold::kGradient);
        engine.add_gradient(p, hands.copy_of(engine.parameter(p), client.bytes(p)));
        engine.release(kAgain);
      };
      if (step == 1) {
        EXPECT_THROW(client.step(step), Stop);
        engine.abandon_step();
        client.after_backward = {};
      }
      norms.push_back(client.step(step));
    }
    Outcome outcome = client.save();
    outcome.norms = norms;
    return outcome;
  };
  Case setup;
  setup.ends = true, setup.blocks = 5, setup.stage = 1;
  const Outcomes expected = train(2, [&](comm::Communicator& of) {
    const Case own = of_rank(setup, of);
    Made made(own, nullptr, &of);
    HandsOnCpu hands;
    Client client(own, *made.engine, hands);
    return train_one(own, client, *made.engine, hands);
  });
  setup.device = 192 * kMiB;
  for (const auto& [gradients, gpus_meet] :
       {std::pair{kDevice, false}, std::pair{kHost, false}, std::pair{kDevice, true}}) {
    setup.places = {kHost, gradients, kHost};
    setup.updates = kHost;
    setup.ranks.gpus_meet = gpus_meet;
    begin_devices(2, Schedule::kLate, 3);
    EXPECT_EQ(train(2,
                    [&](comm::Communicator& of) {
                      const std::unique_ptr<Device> device = open_for(of);
                      const Case own = of_rank(setup, of);
                      OnGpu gpu(own, *device, &of);
                      return train_one(own, gpu.client, gpu.engine, gpu.hands);
                    }),
              expected);
  }
}

// The rest of a narrow gradient that was dropped is no part of a sum; and each rank gives its gradient in the
// type in which it has it.
TEST_F(RanksOnGpusTest, RanksWithNoGradientAndWithSeveralAddToOneOfAnother) {
  Case setup;
  setup.dtype = Dtype::kBf16;
  setup.stage = 1;
  setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
  const auto train_one = [](Client& client, AnyOrderEngine& engine, Hands& hands, int rank) {
    client.load();
    engine.begin_step({{{0.02, 0.1}, {0.02, 0}}});
    for (const bool dropped : {true, false})
      for (ParameterId p = 0; p < engine.layout().parameters(); ++p) {
        const UnitId unit = engine.layout().location(p).unit;
        if (!engine.layout().trainable(unit) || (!dropped && rank == 1 && unit == 1)) continue;
        engine.acquire(unit, Hold::kGradient);
        for (int times = 0; times < (!dropped && unit == (rank == 0 ? 3u : 2u) ? 2 : 1); ++times)
          engine.add_gradient(p, hands.copy_of(engine.parameter(p), client.bytes(p)));
        engine.release(unit);
        if (dropped) engine.drop_gradient(p);
      }
    const double norm = engine.step({{{0.02, 0.1}, {0.02, 0}}}).gradient_norm;
    Outcome outcome = client.save();
    outcome.norms = {norm};
    return outcome;
  };
  const Outcomes expected = train(2, [&](comm::Communicator& of) {
    const Case own = of_rank(setup, of);
    Made made(own, nullptr, &of);
    HandsOnCpu hands;
    Client client(own, *made.engine, hands);
    return train_one(client, *made.engine, hands, of.rank());
  });
  setup.device = 192 * kMiB;
  EXPECT_GT(expected[0].norms[0], 0);
  for (const bool gpus_meet : {false, true}) {
    setup.ranks.gpus_meet = gpus_meet;
    begin_devices(2, Schedule::kRandom, 3);
    const Outcomes found = train(2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const Case own = of_rank(setup, of);
      OnGpu gpu(own, *device, &of);
      return train_one(gpu.client, gpu.engine, gpu.hands, of.rank());
    });
    EXPECT_EQ(found, expected);
  }
}

}  // namespace rank_gradients_test
}  // namespace sluice::engine::twins
