#include "comm/values.h"
#include "comm/worlds.h"
#include "core/dtype.h"
#include "testing.h"
#include "thrown.h"

// Holds every kind of links to the same contract: what a communicator computes over them.
namespace sluice::comm::conformance_test {

// The sum over all ranks of what value(rank) is, level by level: neighbours are added, and an odd
// last one is carried.
template <class Value>
float pairwise(int ranks, const Value& value) {
  std::array<float, 8> level{};
  auto count = static_cast<std::size_t>(ranks);
  for (std::size_t rank = 0; rank < count; ++rank) level.at(rank) = value(static_cast<int>(rank));
  for (; count > 1; count = (count + 1) / 2)
    for (std::size_t i = 0; i < count; i += 2)
      level[i / 2] = i + 1 < count ? level[i] + level[i + 1] : level[i];
  return level.front();
}

// The sum of elements begin ... end - 1 over all ranks, element after element; the rest is as `rank` has it.
Values sum_of(Dtype type, std::size_t count, std::uint64_t seed, int rank, int ranks, std::size_t begin,
              std::size_t end) {
  Values sum(type, count, seed, rank), one(type, 1);
  for (std::size_t i = begin; i < end; ++i) {
    const auto of_rank = [&](int r) {
      set(one.array(), 0, value_of(seed, r, i));
      return get(one.array(), 0);
    };
    set(sum.array(), i, pairwise(ranks, of_rank));
  }
  return sum;
}

using Case = std::tuple<World, int>;
class Conformance : public testing::TestWithParam<Case> {
 protected:
  // All tests of a process that mpirun has started share one MPI, which begins once in a process.
  static void SetUpTestSuite() {
    if (!find_mpi_launcher()) return;
    mpi_ = load_mpi();
    mpi_of_this_process() = mpi_.get();
  }
  static void TearDownTestSuite() { mpi_.reset(); }
  void SetUp() override {
    if (world() == World::kProcesses && !kForksAllowed)
      GTEST_SKIP() << "ThreadSanitizer follows no threads of forked processes";
  }
  World world() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  std::size_t most() const { return world() == World::kTinyPackets ? 3001 : 200'003; }
  void run(const std::function<void(Communicator& comm)>& body) { run_communicators(world(), ranks(), body); }

 private:
  static inline std::unique_ptr<Mpi> mpi_;
};

TEST_P(Conformance, ReduceScatterAddsPairwise) {
  run([&](Communicator& comm) {
    std::uint64_t id = 0;
    for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17}, most()}) {
        const auto borders = borders_of(++id, count, comm.size());
        Values values(type, count, id, comm.rank());
        Ending end;
        comm.reduce_scatter(id, "x", values.array(), borders, end.done());
        end.wait();
        const auto rank = static_cast<std::size_t>(comm.rank());
        EXPECT_EQ(values, sum_of(type, count, id, comm.rank(), comm.size(), borders[rank], borders[rank + 1]))
            << name_of(type) << " " << count;
      }
  });
}

TEST_P(Conformance, AllReduceAddsPairwise) {
  run([&](Communicator& comm) {
    std::uint64_t id = 0;
    for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{4097}, most()}) {
        Values values(type, count, ++id, comm.rank());
        Ending end;
        comm.all_reduce(id, "x", values.array(), count, end.done());
        end.wait();
        EXPECT_EQ(values, sum_of(type, count, id, comm.rank(), comm.size(), 0, count))
            << name_of(type) << " " << count;
      }
  });
}

TEST_P(Conformance, DoublesAreAddedInF64) {
  run([&](Communicator& comm) {
    const std::size_t count = 1001;
    std::vector<double> doubles(count), double_sum(count);
    for (int rank = 0; rank < comm.size(); ++rank)
      for (std::size_t i = 0; i < count; ++i) {
        const double real = std::ldexp(value_of(9, rank, i), rank * 5) / 3;
        double_sum[i] = rank == 0 ? real : double_sum[i] + real;
        if (rank == comm.rank()) doubles[i] = real;
      }
    Ending end;
    comm.all_reduce(1, "doubles", std::span(doubles), end.done());
    end.wait();
    EXPECT_EQ(doubles, double_sum);
  });
}

TEST_P(Conformance, AllGatherBringsEachPart) {
  run([&](Communicator& comm) {
    std::uint64_t id = 0;
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{29}, most()}) {
      const auto borders = borders_of(++id, count, comm.size());
      std::vector<std::uint8_t> values(count, 0xee), all(count);
      for (std::size_t r = 0; r < static_cast<std::size_t>(comm.size()); ++r)
        for (std::size_t i = borders[r]; i < borders[r + 1]; ++i) {
          all[i] = static_cast<std::uint8_t>(i * 31 + r);
          if (r == static_cast<std::size_t>(comm.rank())) values[i] = all[i];
        }
      Ending end;
      comm.all_gather(id, "bytes", {values.data(), Dtype::kU8}, borders, end.done());
      end.wait();
      EXPECT_EQ(values, all) << count;
    }
  });
}

TEST_P(Conformance, BroadcastBringsWhatTheRootHas) {
  run([&](Communicator& comm) {
    for (int root = 0; root < comm.size(); ++root)
      for (const std::size_t count : {std::size_t{0}, std::size_t{3}, most()}) {
        std::vector<std::byte> bytes(count, static_cast<std::byte>(comm.rank() + 1));
        Ending end;
        comm.broadcast(7, "bytes", bytes, root, end.done());
        end.wait();
        EXPECT_EQ(bytes, std::vector(count, static_cast<std::byte>(root + 1)));
      }
  });
}

TEST_P(Conformance, ExchangeBringsStringsOfAnySize) {
  run([&](Communicator& comm) {
    const auto text = [](int rank, int turn) {
      if (turn == 1) return std::string();
      if (rank % 3 == 1) return std::string();
      return std::string(static_cast<std::size_t>(rank) * 9001 + static_cast<std::size_t>(turn),
                         static_cast<char>('a' + rank));
    };
    for (int turn = 0; turn < 3; ++turn) {
      std::vector<std::string> all;
      for (int rank = 0; rank < comm.size(); ++rank) all.push_back(text(rank, turn));
      EXPECT_EQ(comm.exchange(3, "names", text(comm.rank(), turn)), all);
      comm.barrier(3, "names");
    }
    const std::string long_text(200'000, static_cast<char>('a' + comm.rank()));
    const std::vector<std::string> all = comm.exchange(4, "long", comm.rank() == 0 ? long_text : "");
    EXPECT_EQ(all[0], std::string(200'000, 'a'));
    if (comm.rank() > 0) return;
    const std::string too_long(Communicator::kMostExchanged + 1, 'x');
    EXPECT_NE(message_of([&] { comm.exchange(5, "long", too_long); }).find("67108865 bytes"),
              std::string::npos);
  });
}

// A rank waits for one sum before it begins another, whose blocks would fill all buffers of the others.
TEST_P(Conformance, ASumDoesNotKeepBuffersFromAnother) {
  const std::size_t count = world() == World::kTinyPackets ? 1000 : 4 << 20;
  run([&](Communicator& comm) {
    std::vector<float> large(count, 1), small(3, 2);
    Ending first, second;
    const auto begin_large = [&] {
      comm.all_reduce(1, "large", {large.data(), Dtype::kF32}, count, first.done());
    };
    const auto begin_small = [&] {
      comm.all_reduce(2, "small", {small.data(), Dtype::kF32}, 3, second.done());
    };
    if (comm.rank() % 2 == 0) {
      begin_large();
      begin_small();
      second.wait();
    } else {
      begin_small();
      second.wait();
      begin_large();
    }
    first.wait();
    EXPECT_EQ(small, std::vector<float>(3, 2.0f * static_cast<float>(comm.size())));
    EXPECT_EQ(large, std::vector<float>(count, static_cast<float>(comm.size())));
  });
}

TEST_P(Conformance, AnIdMayBeUsedAgain) {
  run([&](Communicator& comm) {
    std::vector<double> sums(50);
    std::vector<Ending> ends(sums.size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = static_cast<double>(i);
      comm.all_reduce(1, "count", std::span(&sums[i], 1), ends[i].done());
      if (i % 7 == 0) ends[i].wait();
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (i % 7 != 0) ends[i].wait();
      EXPECT_EQ(sums[i], static_cast<double>(i) * comm.size());
    }
  });
}

TEST_P(Conformance, MessagesOfOneIdArriveInOrder) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    const int next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
    const auto text = [](int rank, std::size_t i) {
      return std::string(i * 997, static_cast<char>('a' + (static_cast<std::size_t>(rank) + i) % 26));
    };
    std::vector<std::string> out, in;
    for (std::size_t i = 0; i < 20; ++i) {
      out.push_back(text(comm.rank(), i));
      in.emplace_back(i * 997, '?');
    }
    std::vector<Ending> ends(40);
    for (std::size_t i = 0; i < 20; ++i) {
      comm.receive(before, 5, "text", std::as_writable_bytes(std::span(in[i])), ends[2 * i].done());
      comm.send(next, 5, "text", std::as_bytes(std::span(out[i])), ends[2 * i + 1].done());
    }
    for (Ending& end : ends) end.wait();
    for (std::size_t i = 0; i < 20; ++i) EXPECT_EQ(in[i], text(before, i)) << i;
  });
}

TEST_P(Conformance, AMessageIsNotHeldUpByThoseThatBeginAfterIt) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    const int next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
    constexpr std::size_t kLong = std::size_t{4} << 20, kShorter = std::size_t{1} << 20;
    std::vector<std::byte> out(kLong), first(kLong), second(kShorter);
    std::atomic<bool> first_came = false, in_order = false;
    std::vector<Ending> ends(3);
    comm.receive(before, 5, "the first", first, [&](const std::exception_ptr& error) {
      first_came = !error;
      ends[0].done()(error);
    });
    comm.receive(before, 6, "the second", second, [&](const std::exception_ptr& error) {
      in_order = first_came.load();
      ends[1].done()(error);
    });
    comm.send(next, 5, "the first", out, ends[2].done());
    Ending sent;
    comm.send(next, 6, "the second", std::span(out).first(kShorter), sent.done());
    for (Ending& end : ends) end.wait();
    sent.wait();
    EXPECT_TRUE(in_order);
  });
}

// Returns the bytes that rank `rank` serves under a key and a version.
std::vector<std::byte> served(int rank, std::uint64_t key, std::uint64_t version, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] =
        static_cast<std::byte>(i * 7 + i / 251 + key * 3 + version * 5 + static_cast<std::size_t>(rank));
  return bytes;
}

TEST_P(Conformance, ReadsAreServedAtOnceOrLaterOrRefused) {
  run([&](Communicator& comm) {
    const std::size_t size = most();
    const std::vector<std::byte> own = served(comm.rank(), 1, 2, size);
    std::vector<std::thread> late;
    std::mutex mutex;
    std::atomic<int> sent{0};
    comm.serve([&](const Read& read, const Answer& answer) {
      const Done was_sent = [&](const std::exception_ptr&) { ++sent; };
      if (read.key == 99)
        return answer({}, std::make_exception_ptr(Error(ErrorCode::kNotFound, "there is no key 99")),
                      was_sent);
      const auto bytes = std::span(own).subspan(read.offset, read.bytes);
      if (read.offset % 2 == 0) return answer(bytes, nullptr, was_sent);
      const std::lock_guard lock(mutex);
      late.emplace_back([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        answer(bytes, nullptr, was_sent);
      });
    });
    for (int other = 0; other < comm.size(); ++other) {
      if (other == comm.rank()) continue;
      std::vector<std::vector<std::byte>> into(6);
      std::vector<Ending> ends(6);
      for (std::size_t i = 0; i < 6; ++i) {
        into[i].resize(i == 5 ? 0 : size - 100 * i);
        comm.read(other, 1, 2, i, into[i], ends[i].done());
      }
      std::vector<std::byte> none(8);
      Ending refused;
      comm.read(other, 99, 0, 0, none, refused.done());
      const std::vector<std::byte> all = served(other, 1, 2, size + 8);
      for (std::size_t i = 0; i < 6; ++i) {
        ends[i].wait();
        EXPECT_TRUE(std::equal(into[i].begin(), into[i].end(), all.begin() + static_cast<std::ptrdiff_t>(i)));
      }
      ErrorCode code{};
      EXPECT_EQ(refused.error(&code), "there is no key 99");
      EXPECT_EQ(code, ErrorCode::kNotFound);
    }
    comm.barrier(1, "all have read");
    for (std::thread& thread : late) thread.join();
    EXPECT_EQ(sent, 7 * (comm.size() - 1));
    EXPECT_EQ(comm.failure(), "");
  });
}

TEST_P(Conformance, ReadsWaitForTheNextServer) {
  run([&](Communicator& comm) {
    const std::vector<std::byte> values{std::byte(1), std::byte(2)};
    const auto serve = [&](std::size_t at) {
      comm.serve([&, at](const Read&, const Answer& answer) {
        answer({&values[at], 1}, nullptr, [](const std::exception_ptr&) {});
      });
    };
    const int other = (comm.rank() + 1) % comm.size();
    serve(0);
    comm.barrier(1, "all serve");
    if (comm.size() > 1) {
      std::byte found{};
      Ending end;
      comm.read(other, 1, 2, 3, {&found, 1}, end.done());
      end.wait();
      EXPECT_EQ(found, values[0]);
    }
    comm.barrier(2, "all have read");
    comm.serve({});
    comm.barrier(3, "none serves");
    std::byte found{};
    Ending end;
    if (comm.size() > 1) comm.read(other, 1, 2, 3, {&found, 1}, end.done());
    comm.barrier(4, "all have asked");
    serve(1);
    if (comm.size() > 1) {
      end.wait();
      EXPECT_EQ(found, values[1]);
    }
    comm.barrier(5, "all have read again");
  });
}

// Whose bytes a rank asks another one for comes to it, whatever that one makes of it.
TEST_P(Conformance, ReadsOfARankMayBeAskedOfAnother) {
  run([&](Communicator& comm) {
    std::vector<std::byte> owner(8);
    comm.serve([&](const Read& read, const Answer& answer) {
      EXPECT_EQ(read.bytes, 1u);
      owner[static_cast<std::size_t>(read.reader)] = std::byte(read.owner);
      answer({&owner[static_cast<std::size_t>(read.reader)], 1}, nullptr, [](const std::exception_ptr&) {});
    });
    for (int relay = 0; relay < comm.size(); ++relay)
      for (int other = 0; other < comm.size(); ++other) {
        if (relay == comm.rank() || other == comm.rank()) continue;
        std::byte found{99};
        Ending end;
        comm.read_through(relay, other, 1, 2, 3, {&found, 1}, end.done());
        end.wait();
        EXPECT_EQ(found, std::byte(other));
      }
    comm.barrier(1, "all have read");
  });
}

// Groups that overlap; in the third one, ranks of a host are neighbours where they may be none among all.
std::vector<std::vector<int>> groups_of(const Communicator& comm) {
  std::vector<std::vector<int>> groups(4);
  for (int rank = comm.size() - 1; rank >= 0; --rank) {
    if (rank % 2 == comm.rank() % 2) groups[0].push_back(rank);
    if (rank / 2 == comm.rank() / 2) groups[1].push_back(rank);
    groups[2].insert(rank % 2 == 0 ? groups[2].begin() : groups[2].end(), rank);
  }
  groups[3] = {comm.rank()};
  return groups;
}

TEST_P(Conformance, GroupsHaveCallsOfTheirOwnBesideThoseOfAll) {
  run([&](Communicator& comm) {
    std::vector<std::unique_ptr<Communicator>> own;
    std::vector<Communicator*> groups{&comm};
    std::vector<std::uint64_t> seeds{1};
    for (const std::vector<int>& members : groups_of(comm)) {
      own.push_back(comm.group(members));
      groups.push_back(own.back().get());
      seeds.push_back(100 * seeds.size() + static_cast<std::uint64_t>(members.front()));
      ASSERT_EQ(groups.back()->size(), static_cast<int>(members.size()));
      ASSERT_EQ(members.at(static_cast<std::size_t>(groups.back()->rank())), comm.rank());
    }
    const std::size_t kinds = 4, count = most() / 2;
    std::vector<std::size_t> order(groups.size() * kinds);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(static_cast<std::uint64_t>(comm.rank()) + 5));
    std::vector<Values> values;
    std::vector<Ending> ends(order.size());
    for (std::size_t i = 0; i < order.size(); ++i)
      values.emplace_back(Dtype::kF32, count, seeds[i / kinds], groups[i / kinds]->rank());
    const auto borders_in = [&](const Communicator& group) { return borders_of(77, count, group.size()); };
    for (const std::size_t i : order) {
      Communicator& group = *groups[i / kinds];
      const Array array = values[i].array();
      if (i % kinds == 0) group.all_reduce(0, "sum", array, count, ends[i].done());
      if (i % kinds == 1) group.reduce_scatter(1, "part", array, borders_in(group), ends[i].done());
      if (i % kinds == 2) group.all_gather(2, "gather", array, borders_in(group), ends[i].done());
      if (i % kinds == 3)
        group.broadcast(3, "root's", {static_cast<std::byte*>(array.data), 4 * count}, group.size() - 1,
                        ends[i].done());
    }
    for (Ending& end : ends) end.wait();
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Communicator& group = *groups[i / kinds];
      const std::uint64_t seed = seeds[i / kinds];
      const auto borders = borders_in(group);
      const auto rank = static_cast<std::size_t>(group.rank());
      Values expected(Dtype::kF32, count, seed, group.size() - 1);
      if (i % kinds == 0) expected = sum_of(Dtype::kF32, count, seed, group.rank(), group.size(), 0, count);
      if (i % kinds == 1)
        expected =
            sum_of(Dtype::kF32, count, seed, group.rank(), group.size(), borders[rank], borders[rank + 1]);
      for (std::size_t r = 0; i % kinds == 2 && r + 1 < borders.size(); ++r)
        for (std::size_t k = borders[r]; k < borders[r + 1]; ++k)
          set(expected.array(), k, value_of(seed, static_cast<int>(r), k));
      EXPECT_EQ(values[i], expected) << "call " << i % kinds << " of group " << i / kinds;
    }
  });
}

TEST_P(Conformance, GroupsExchangeSendAndReadByTheirOwnNumbers) {
  run([&](Communicator& comm) {
    std::vector<std::vector<int>> all = groups_of(comm);
    all.push_back(all[0]);
    std::ranges::reverse(all.back());
    for (std::size_t g = 0; g < all.size(); ++g) {
      // The last one is made of another group.
      std::vector<int> reversed(all[0].size());
      std::iota(reversed.rbegin(), reversed.rend(), 0);
      const std::unique_ptr<Communicator> group =
          g < 4 ? comm.group(all[g]) : comm.group(all[0])->group(reversed);
      std::vector<std::string> names;
      for (const int member : all[g]) names.push_back("rank " + std::to_string(member));
      const std::string& own = names.at(static_cast<std::size_t>(group->rank()));
      EXPECT_EQ(group->exchange(1, "names", own), names);
      if (group->size() == 1) continue;
      const int next = (group->rank() + 1) % group->size();
      const int before = (group->rank() + group->size() - 1) % group->size();
      std::string in(own.size(), '?');
      Ending sent, received;
      group->receive(before, 1, "a name", std::as_writable_bytes(std::span(in)), received.done());
      group->send(next, 1, "a name", std::as_bytes(std::span(own)), sent.done());
      sent.wait();
      received.wait();
      EXPECT_EQ(in, names[static_cast<std::size_t>(before)]);
    }
    // Reads are served for one of them.
    const std::unique_ptr<Communicator> group = comm.group(all[2]);
    group->serve([&](const Read& read, const Answer& answer) {
      static const std::vector<std::byte> kNumbers = [] {
        std::vector<std::byte> numbers(256);
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::byte(i);
        return numbers;
      }();
      answer({&kNumbers[static_cast<std::size_t>(read.reader * 16 + read.owner)], 1}, nullptr,
             [](const std::exception_ptr&) {});
    });
    for (int relay = 0; relay < group->size(); ++relay)
      for (int owner = 0; owner < group->size(); ++owner) {
        if (relay == group->rank() || owner == group->rank()) continue;
        std::byte found{};
        Ending end;
        group->read_through(relay, owner, 1, 2, 3, {&found, 1}, end.done());
        end.wait();
        EXPECT_EQ(found, std::byte(group->rank() * 16 + owner));
      }
    comm.barrier(2, "all have read");
  });
}

TEST_P(Conformance, AGroupIsOfDifferentRanksWithThisOneAmongThem) {
  run([&](Communicator& comm) {
    const int rank = comm.rank(), ranks = comm.size();
    for (const std::vector<int>& members :
         {std::vector<int>{}, {rank, rank}, {rank, ranks}, {-1, rank}, {(rank + 1) % ranks}}) {
      if (members.size() == 1 && ranks == 1) continue;
      EXPECT_NE(
          message_of([&] { comm.group(members); }).find("name different ones of these ranks, itself among"),
          std::string::npos);
    }
    Ending end;
    comm.group({rank})->all_reduce(1, "x", std::span<double>(), end.done());
    end.wait();
  });
}

TEST_P(Conformance, BytesAreCounted) {
  if (has_hosts(world())) GTEST_SKIP() << "hosts_test.cc counts what comes to a host";
  run([&](Communicator& comm) {
    const std::size_t count = most(), ranks = static_cast<std::size_t>(comm.size());
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto borders = borders_of(3, count, comm.size());
    const std::size_t own = borders[rank + 1] - borders[rank], others = count - own;
    std::vector<float> values(count, 1);
    const auto expect = [&](std::size_t sent, std::size_t received, const std::function<void(Done)>& call) {
      const Transport::Counters before = comm.counters();
      Ending end;
      call(end.done());
      end.wait();
      const Transport::Counters after = comm.counters();
      EXPECT_EQ(after.sent - before.sent, sent);
      EXPECT_EQ(after.received - before.received, received);
    };
    const Array array{values.data(), Dtype::kF32};
    expect(4 * others, 4 * own * (ranks - 1),
           [&](Done done) { comm.reduce_scatter(1, "x", array, borders, done); });
    expect(4 * own * (ranks - 1), 4 * others,
           [&](Done done) { comm.all_gather(2, "x", array, borders, done); });
    const std::size_t equal = count / ranks + (rank < count % ranks ? 1 : 0);
    const std::size_t both = 4 * (equal * (ranks - 1) + count - equal);
    expect(both, both, [&](Done done) { comm.all_reduce(3, "x", array, count, done); });
    const std::size_t root = ranks - 1;
    expect(rank == root ? 4 * count * (ranks - 1) : 0, rank == root ? 0 : 4 * count, [&](Done done) {
      comm.broadcast(4, "x", std::as_writable_bytes(std::span(values)), static_cast<int>(root), done);
    });
    const Transport::Counters before = comm.counters();
    comm.exchange(5, "x", std::string(48 * ranks, 'x'));
    const Transport::Counters after = comm.counters();
    EXPECT_EQ(after.received, before.received);
    EXPECT_EQ(after.sent, before.sent);
    EXPECT_GE(after.received_besides - before.received_besides, 48 * ranks * (ranks - 1));
    // All that was sent besides has a head of 48 bytes for each packet, and no array in it.
    EXPECT_EQ(before.received_besides % 48, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Links, Conformance,
                         testing::Values(Case(World::kThreads, 1), Case(World::kThreads, 8),
                                         Case(World::kProcesses, 3), Case(World::kFaulty, 3),
                                         Case(World::kTinyPackets, 3)));
INSTANTIATE_TEST_SUITE_P(Hosts, Conformance,
                         testing::Values(Case(World::kHosts, 4), Case(World::kWideHosts, 7),
                                         Case(World::kMixedHosts, 3)));
INSTANTIATE_TEST_SUITE_P(Long, Conformance,
                         testing::Values(Case(World::kThreads, 3), Case(World::kProcesses, 1),
                                         Case(World::kProcesses, 8), Case(World::kFaulty, 1),
                                         Case(World::kFaulty, 8), Case(World::kTinyPackets, 1),
                                         Case(World::kTinyPackets, 8), Case(World::kHosts, 3),
                                         Case(World::kHosts, 7), Case(World::kWideHosts, 3),
                                         Case(World::kWideHosts, 4), Case(World::kMixedHosts, 4),
                                         Case(World::kMixedHosts, 7)));

// The ranks of mpirun go through all tests above in one process each.
std::vector<Case> cases_of_mpi() {
  const auto launcher = find_mpi_launcher();
  if (!launcher) return {};
  return {{World::kMpi, launcher->ranks}, {World::kMpiHost, launcher->ranks}};
}
INSTANTIATE_TEST_SUITE_P(Mpi, Conformance, testing::ValuesIn(cases_of_mpi()));

class ConformanceOfMpi : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Links, ConformanceOfMpi,
                         testing::Values(Case(World::kMpi, 1), Case(World::kMpi, 3),
                                         Case(World::kMpiHost, 3)));

TEST_P(ConformanceOfMpi, IsThatOfAllOtherLinks) {
  if (!missing_for_mpi().empty()) GTEST_SKIP() << missing_for_mpi();
  const auto& [world, ranks] = GetParam();
  MpirunProcess process(ranks, {own_program(), std::string("--gtest_filter=Mpi/Conformance.*/") +
                                                   (world == World::kMpi ? "0" : "1")});
  EXPECT_EQ(process.wait(), 0) << process.output();
  EXPECT_THAT(process.output(), testing::ContainsRegex("[1-9][0-9] tests from 1 test suite ran"));
}

}  // namespace sluice::comm::conformance_test
