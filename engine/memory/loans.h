#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "comm/communicator.h"
#include "core/transfers.h"
#include "engine/memory/pieces.h"

namespace sluice::engine {

// The error for a read of shards whose engine is destroyed.
std::exception_ptr shards_are_gone();

// Pieces of this rank's memory that other ranks have borrowed: their GPUs copy from there, and then the ranks
// return the pieces. Thread rule: any thread.
class Loans {
 public:
  // The answer to a rank that borrows: the offset of the piece in this rank's memory, and the number by which
  // it is returned.
  struct Loan {
    std::uint64_t offset = 0, number = 0;
  };
  // Answers a request with a piece of the memory that begins there.
  Pieces::Use lend(const std::byte* memory, comm::Answer answer);
  void give_back(std::uint64_t number);
  // Lends nothing more, and waits until all loans are returned; has_failed tells whether a rank has failed,
  // which ends the wait.
  void end(const std::function<bool()>& has_failed);

 private:
  bool note(Loan& loan, const Done& used);

  std::mutex mutex_;  // guards what follows
  std::condition_variable returned_;
  std::map<std::uint64_t, Done> loans_;  // by number: called on return
  std::uint64_t next_ = 0;
  bool ends_ = false;
};

}  // namespace sluice::engine
