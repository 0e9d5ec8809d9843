#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "comm/call.h"
#include "comm/given.h"
#include "comm/group.h"
#include "comm/hosts.h"
#include "comm/sums.h"
#include "comm/transport.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/threads.h"
#include "core/transfers.h"

namespace sluice::comm {

struct Task;

// Where each rank's part of an array begins: rank r has the elements borders[r] ... borders[r + 1] - 1. It
// has size() + 1 entries, which do not descend. Parts may be empty.
using Borders = std::span<const std::size_t>;

// What the ranks of a run, or a group of them, do together. A call that all ranks take part in is
// *collective*: every rank calls it with the same `id` and the same arguments, in any order among calls of
// other ids, and as often as it likes with the same id, in the same order on all ranks. Calls that differ end
// the work of all ranks with an error that names them. No call but exchange() and barrier() waits. `done` is
// called once on the communicator's thread, must be short, and may make further calls that do not wait. It
// gets null, or the first failure of the run (see Transport); the arrays stay valid and unused until then.
// Names are for messages. Ids are remembered, so a run has a limited number of them. Arguments that are wrong
// in themselves throw Error(kInvalidArgument), and nothing is begun. Thread rule: any thread.
//
// Sums of f32, bf16 and f16 are computed in f32, and rounded once: pairwise over the ranks
// (order_of_ranks()), or in the SumOrder that is given. Those of integers are exact, and those of f64 are
// ((rank 0 + rank 1) + rank 2) + ... So all ranks have the same bits, whatever the links are.
//
// Ranks of a host that are neighbours add what they give (of f32) before they send it to another host, as far
// as the order has sums of them: one, where they are 2, 4, 8, ... from a multiple of that on. What is
// gathered or broadcast comes to a host once, and goes on within it. (What is exchanged or read goes to each
// rank.)
class Communicator {
 public:
  // The bytes of buffers that a communicator of so many ranks takes.
  static std::size_t buffer_bytes(int ranks);
  // Takes its buffers (staging). `ledger` outlives it. One thread of its own computes the sums. hosts: by
  // rank, a number that ranks of one host have alike, the same on all ranks; none: all are on one. Throws
  // Error(kBudget) where there is no memory for the buffers.
  Communicator(std::unique_ptr<Links> links, const Deadlines& deadlines, allocator::Ledger& ledger,
               const std::vector<int>& hosts = {});
  // The last one of a rank ends what is under way with an error.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // These ranks as a communicator of their own, over the same links, threads and buffers. Their numbers in it
  // are their places in `members`. Nothing is sent: each of them makes it alike, and one that is made again
  // is the same. A call of it is collective in it alone, and has nothing to do with a call of other ranks
  // that has the same id. Each rank serves reads for one communicator. failure(), fail(), report_work() and
  // counters() are those of all ranks, which errors of the run name by their numbers among all. Throws
  // Error(kInvalidArgument) where a member is no rank, or is named twice, or this rank is none of them.
  std::unique_ptr<Communicator> group(const std::vector<int>& members) const;

  int rank() const;
  int size() const;
  const Hosts& hosts() const;

  // Collective. Afterwards the rank's own part of `values` (f32, bf16 or f16) is the sum over all ranks; the
  // rest is as it was.
  void reduce_scatter(std::uint64_t id, const std::string& name, Array values, Borders borders, Done done);
  // The same, where a rank gives several arrays, as `order` says. The sum is in the first one afterwards.
  // given: what it gives of each of them, and what the others give, the same on all ranks; null: all. What is
  // no part of its own is unspecified then.
  void reduce_scatter(std::uint64_t id, const std::string& name, std::span<const Array> arrays,
                      Borders borders, const SumOrder& order, Done done,
                      std::shared_ptr<const Given> given = nullptr);
  // Collective. Afterwards each rank's part of `values` (of any type) is what that rank had there.
  void all_gather(std::uint64_t id, const std::string& name, Array values, Borders borders, Done done);
  // Collective. Afterwards the `count` values are the sums over all ranks.
  void all_reduce(std::uint64_t id, const std::string& name, Array values, std::size_t count, Done done);
  void all_reduce(std::uint64_t id, const std::string& name, std::span<const Array> arrays, std::size_t count,
                  const SumOrder& order, Done done, std::shared_ptr<const Given> given = nullptr);
  void all_reduce(std::uint64_t id, const std::string& name, std::span<std::int64_t> values, Done done);
  void all_reduce(std::uint64_t id, const std::string& name, std::span<double> values, Done done);  // in f64
  // Collective. Afterwards `bytes` is what rank `root` had.
  void broadcast(std::uint64_t id, const std::string& name, std::span<std::byte> bytes, int root, Done done);

  // Collective; waits, so it is no call for `done` functions. Returns what each rank has given, by rank: up
  // to kMostExchanged bytes each. Throws the first failure of the run.
  static constexpr std::size_t kMostExchanged = std::size_t{64} << 20;
  // `meanwhile` is called from time to time.
  std::vector<std::string> exchange(std::uint64_t id, const std::string& name, const std::string& own,
                                    const std::function<void()>& meanwhile = {});
  void barrier(std::uint64_t id, const std::string& name) { exchange(id, name, {}); }

  // Not collective: messages between two ranks, and reads that a rank serves, as in Transport. Messages from
  // one rank to another that have the same id arrive in the order of the calls.
  void send(int to, std::uint64_t id, const std::string& name, std::span<const std::byte> from, Done done);
  void receive(int from, std::uint64_t id, const std::string& name, std::span<std::byte> into, Done done);
  void serve(Server server);
  void read(int from, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
            std::span<std::byte> into, Done done);
  // Asks `relay` for bytes of `owner`. What a rank answers for others is its server's matter.
  void read_through(int relay, int owner, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
                    std::span<std::byte> into, Done done);

  void report_work();                                                    // as Transport::report_work()
  void fail(const std::string& error, ErrorCode code = ErrorCode::kIo);  // as Transport::fail()
  std::string failure() const;
  std::optional<int> failed_rank() const;  // by its number among all
  // What is exchanged counts among all other bytes, once an exchange has ended.
  Transport::Counters counters() const;

 private:
  struct State;
  Communicator(std::shared_ptr<State> state, Group group);

  void start(Task task);
  void all_reduce(std::uint64_t id, const std::string& name, Element element, std::vector<std::byte*> arrays,
                  std::size_t count, const SumOrder& order, Done done,
                  std::shared_ptr<const Given> given = nullptr);
  void check_other(int other, const char* what) const;
  std::vector<std::byte*> checked_arrays(std::span<const Array> arrays, const SumOrder& order,
                                         const std::string& name) const;

  std::shared_ptr<State> state_;
  std::shared_ptr<const Group> group_;
};

}  // namespace sluice::comm
