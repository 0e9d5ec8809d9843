#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/communicator.h"
#include "comm/nccl.h"

namespace sluice::engine {

// The order in which ranks queue messages of NCCL, which must be one on all of them: a rank's messages would
// wait on the GPU for those of another rank, and these behind others that wait for the first rank. Sums and
// gathers come each in one order on all ranks, but between the two each rank has its own. Rank 0's order
// counts: it tells the others whose turn it is. Thread rule: any thread, which waits.
class NcclTurns {
 public:
  explicit NcclTurns(comm::Communicator& communicator) : communicator_(communicator) {}

  // Calls `queue` when it is the turn of this key, which is another one each time. REQUIRES: all ranks call
  // this for the same keys, in any order, and none waits for another's key before it calls. Throws the
  // failure of the run, and on a rank other than 0 after an error of `queue` that error each time.
  void take(std::uint64_t key, const std::function<void()>& queue);

 private:
  struct Told {  // shared with calls of the communicator in flight
    std::mutex mutex;
    std::condition_variable changes;
    std::deque<std::uint64_t> next;  // keys that rank 0 has told, and that have not had their turn
    std::exception_ptr failure;
  };
  void tell(std::uint64_t key);
  void ask();
  void wait_for(std::uint64_t key);

  comm::Communicator& communicator_;
  const std::shared_ptr<Told> told_ = std::make_shared<Told>();
  std::mutex turn_;  // of rank 0's threads; of others', while they ask
};

// A communicator of NCCL, and the turns of its users.
struct ByNccl {
  comm::Nccl* nccl = nullptr;  // null: nothing is sent by NCCL
  NcclTurns* turns = nullptr;  // null: nobody else uses `nccl`
};

}  // namespace sluice::engine
