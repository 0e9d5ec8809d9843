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

// The boundaries of the ranks' parts of an array: rank r has the elements borders[r] ... borders[r + 1] - 1.
// There are size() + 1 entries, which never descend. Parts may be empty.
using Borders = std::span<const std::size_t>;

// Collective operations among the ranks of a run, or of a group of them.
//
// Each rank makes a *collective* call with the same `id` and the same arguments. Calls with different ids may
// come in any order; calls with the same id must come in the same order on all ranks. Ranks whose calls
// differ end the work of all ranks with an error that names both calls. Ids are remembered, so a run should
// use a limited number of them. Names are for error messages only.
//
// Calls are asynchronous, except exchange() and barrier(). `done` is called once on the communicator's
// thread, with null or the first failure of the run (see Transport). It must be short, and may make further
// asynchronous calls. Until then the arrays stay valid and the caller does not touch them. A wrong argument
// throws Error(kInvalidArgument) before anything is sent. Thread rule: any thread.
//
// Sums of f32, bf16 and f16 are computed in f32 and rounded once: pairwise over the ranks (order_of_ranks()),
// or in the given SumOrder. Sums of f64 are ((rank 0 + rank 1) + rank 2) + ... So
// all ranks get the same bits over any links.
//
// Traffic between hosts: the ranks of a host, where they have consecutive numbers, add their f32
// contributions before sending them to another host, as far as the order of addition allows. (One sum is sent
// where they are 2, 4, 8, ... ranks beginning at a multiple of that number.) A gathered or broadcast part
// reaches each host once and is forwarded within it; exchange() and reads send to each rank.
class Communicator {
 public:
  // Returns the bytes of buffers that a communicator among this many ranks allocates.
  static std::size_t buffer_bytes(int ranks);
  // Allocates its buffers and charges them to `ledger` as staging; the ledger outlives the communicator. A
  // thread of its own computes the sums. hosts[r] is a number that identifies the host of rank r, the same on
  // all ranks; an empty vector means that all ranks are on one host. Throws Error(kBudget) where the buffers
  // do not fit.
  Communicator(std::unique_ptr<Links> links, const Deadlines& deadlines, allocator::Ledger& ledger,
               const std::vector<int>& hosts = {});
  // Destroying the last communicator of a rank ends its calls in flight with an error.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Returns a communicator among these ranks only, over the same links, threads and buffers. A rank's number
  // in it is its place in `members`. Making it sends nothing: each member makes the same one, and making it
  // again gives the same group. Its calls are collective among its members, and independent of calls of other
  // groups with the same id. Only one communicator of a rank may serve reads. failure(), fail(),
  // report_work() and counters() concern the whole run, and errors number ranks within the whole run. Throws
  // Error(kInvalidArgument) where a member is no rank or is named twice, or this rank is not among them.
  std::unique_ptr<Communicator> group(const std::vector<int>& members) const;

  int rank() const;
  int size() const;
  const Hosts& hosts() const;

  // Collective. Leaves in this rank's own part of `values` (f32, bf16 or f16) the sum over all ranks. The
  // rest of `values` stays as it was.
  void reduce_scatter(std::uint64_t id, const std::string& name, Array values, Borders borders, Done done);
  // The same for several arrays per rank, as `order` says; the sum is left in the first one. `given` says
  // which elements each rank contributes, the same on all ranks; null: all. With `given`, elements outside
  // the rank's own part are unspecified afterwards.
  void reduce_scatter(std::uint64_t id, const std::string& name, std::span<const Array> arrays,
                      Borders borders, const SumOrder& order, Done done,
                      std::shared_ptr<const Given> given = nullptr);
  // Collective. Fills each rank's part of `values` (of any type) with that rank's contents.
  void all_gather(std::uint64_t id, const std::string& name, Array values, Borders borders, Done done);
  // Collective. Replaces the `count` values by their sums over all ranks.
  void all_reduce(std::uint64_t id, const std::string& name, Array values, std::size_t count, Done done);
  void all_reduce(std::uint64_t id, const std::string& name, std::span<const Array> arrays, std::size_t count,
                  const SumOrder& order, Done done, std::shared_ptr<const Given> given = nullptr);
  void all_reduce(std::uint64_t id, const std::string& name, std::span<double> values, Done done);  // in f64
  // Collective. Replaces `bytes` by those of rank `root`.
  void broadcast(std::uint64_t id, const std::string& name, std::span<std::byte> bytes, int root, Done done);

  // Collective and blocking, so not to be called from a `done` function. Returns the strings that the ranks
  // have given, by rank, of at most kMostExchanged bytes each. Throws the first failure of the run.
  static constexpr std::size_t kMostExchanged = std::size_t{64} << 20;
  // Calls `meanwhile` from time to time while it waits.
  std::vector<std::string> exchange(std::uint64_t id, const std::string& name, const std::string& own,
                                    const std::function<void()>& meanwhile = {});
  void barrier(std::uint64_t id, const std::string& name) { exchange(id, name, {}); }

  // Point to point, as in Transport: messages between two ranks, and reads that a rank serves. Messages
  // between the same two ranks with the same id arrive in the order of the calls.
  void send(int to, std::uint64_t id, const std::string& name, std::span<const std::byte> from, Done done);
  void receive(int from, std::uint64_t id, const std::string& name, std::span<std::byte> into, Done done);
  void serve(Server server);
  void read(int from, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
            std::span<std::byte> into, Done done);
  // Asks the rank `relay` for bytes of the rank `owner`. The relay's server decides how to answer.
  void read_through(int relay, int owner, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
                    std::span<std::byte> into, Done done);

  void report_work();                                                    // as Transport::report_work()
  void fail(const std::string& error, ErrorCode code = ErrorCode::kIo);  // as Transport::fail()
  void describe(int rank, const std::string& text);                      // as Transport::describe()
  std::string failure() const;
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
