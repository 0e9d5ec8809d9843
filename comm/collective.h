#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/given.h"
#include "comm/group.h"
#include "comm/hosts.h"
#include "comm/sum_route.h"
#include "comm/sums.h"
#include "comm/transport.h"
#include "core/transfers.h"

namespace sluice::comm {

// Returns the tag of message number `index` in a stage of the use-th call with this id. A tag is a 64-bit
// hash, so that tags of different calls differ.
std::uint64_t tag_of(std::uint64_t id, std::uint64_t use, std::uint8_t stage, std::uint64_t index);
std::string in_words(const std::string& name, const Call& call);

// The arguments of a collective call. Ranks are numbered within its group.
struct Task {
  CallKind kind;
  std::uint64_t id = 0, use = 0;
  std::string name{};
  Element element{};
  std::vector<std::byte*> arrays{};    // this rank's inputs; a sum has as many as `order` says
  std::vector<std::size_t> borders{};  // where each part begins; for a broadcast: 0 and the number of bytes
  int root = 0;
  SumOrder order{};                      // only for a sum
  std::shared_ptr<const Given> given{};  // only for a sum; null: each rank gives all elements
  Done done{};
};

inline constexpr std::size_t kBlockBytes = std::size_t{256} << 10;

enum class SlotUse : std::uint8_t { kOwn, kHost };  // a block of this rank's own part, or one that it relays

// Staging memory for the other ranks' contributions to one block of a sum.
struct Slot {
  std::byte* memory;  // kBlockBytes for each other rank, shared by its arrays
  SlotUse use;
  int owner = 0;            // the rank whose part contains the block
  std::uint64_t block = 0;  // index within that part
  std::size_t awaited = 0;  // messages in flight for this slot
};

class Collective;
// Reports that a message of a collective call has ended.
struct Event {
  // kBlockAsked: the owner of a part asks this rank, its relay, for a block. kPartCame: a part of an
  // all-gather or broadcast has arrived.
  enum Kind { kBegun, kBlockSent, kBlockCame, kBlockAsked, kSumSent, kPartCame, kOther } kind = kOther;
  Collective* collective = nullptr;
  int owner = 0;            // the rank whose part the message carries
  std::uint64_t block = 0;  // the block that was asked for
  Slot* slot = nullptr;
  std::exception_ptr error{};
};

// One collective call in flight. It begins with an empty message between every two ranks, which compares
// their calls. A rank computes its part of a sum block by block, each in a slot; messages of all other calls
// are received directly into the caller's array.
//
// Slots cannot deadlock. A call gets a slot only when all ranks of its group have begun that call. Sending
// needs no slot: a rank sends each block of another rank's part from the caller's array as soon as it is
// asked. So each slot fills and becomes free again, whatever else the rank waits for and in whatever order
// ranks began their calls. Groups may therefore share slots.
//
// Over several hosts a rank may be a relay (SumRoute): it adds the contributions of the ranks of its host to
// a block when the block's owner asks, which has a slot for the sums by then. Relayed blocks have slots of
// their own, so that each becomes free once the other ranks of the host have sent. A relay receives whole
// blocks; elements that a rank does not give are -0 there.
//
// Thread rule: the communicator's thread; task() and knows() may be called from any thread.
class Collective {
 public:
  using Report = std::function<void(Event event)>;  // called on any thread
  Collective(Transport& transport, std::shared_ptr<const Group> group, Report report, Task task);

  const Task& task() const { return task_; }
  bool knows(std::uint64_t tag) const;  // whether a message with this tag may belong to this call

  void begin(Adder& adder);
  // Handles the end of one of the call's messages. Returns whether the event's slot is free again.
  bool end(Event event, Adder& adder);
  bool wants_slot(SlotUse use) const;
  void use_slot(Slot& slot);             // takes the slot for the next block that needs one
  void abort(std::exception_ptr error);  // begins no further messages
  bool has_ended() const;
  std::exception_ptr take_error() { return std::move(error_); }  // REQUIRES: has_ended()

 private:
  std::span<std::byte> part(int rank, std::size_t array = 0) const;
  std::span<std::byte> block(int rank, std::uint64_t index, std::size_t array = 0) const;
  std::uint64_t blocks(int rank) const;
  std::span<std::byte> whole(int rank) const;  // what this rank contributes to a gather or broadcast
  // The index in tag_of() of the message that carries a block of an array, or of a relay's sum, for the part
  // of `owner`.
  std::uint64_t message(int owner, std::uint64_t block, std::size_t array) const;
  Run elements(int owner, std::uint64_t block) const;
  std::vector<Run> runs_of(int from, std::uint64_t block) const;
  std::size_t own_block_bytes(int from, std::uint64_t block) const;
  bool is_here(std::uint64_t block) const;
  std::span<std::byte> given_block(int owner, std::uint64_t index, std::size_t array) const;
  void set_not_given(int owner, std::uint64_t index, std::size_t array) const;
  bool is_sum() const { return task_.kind == CallKind::kReduceScatter || task_.kind == CallKind::kAllReduce; }

  Done reporting(Event event);
  void send(int to, std::uint8_t stage, std::uint64_t index, std::span<const std::byte> from, Done done);
  void receive(int from, std::uint8_t stage, std::uint64_t index, std::span<std::byte> into, Done done);
  void all_have_begun(Adder& adder);
  void add_what_is_here(Adder& adder);
  void pass_what_is_here();
  void send_next_block(int owner);
  void await_next_ask(int owner);
  std::vector<std::byte*> arrays_of(const Slot& slot) const;
  std::span<const SumRoute::Input> inputs_of(const Slot& slot) const;
  bool slot_is_full(Slot& slot, Adder& adder);
  void send_sums(Slot& slot, Adder& adder);
  void add_up(const Slot& slot, Adder& adder);

  int source(int owner) const;  // the rank that sends the part of `owner` here: the owner or a relay
  void send_own_part();
  void pass_on(int owner);
  void receive_parts();
  void gather();

  Transport& transport_;
  const std::shared_ptr<const Group> group_;
  const Report report_;
  const Task task_;
  const Call call_;
  const Hosts& hosts_;
  const int rank_, ranks_;
  const bool gathers_by_host_;
  const std::optional<SumRoute> route_;  // only for a sum
  const std::size_t block_bytes_;
  std::size_t under_way_ = 0;                 // messages in flight
  int begun_ = 0;                             // other ranks of the group that have begun this call
  std::uint64_t next_block_ = 0, added_ = 0;  // the own part's next block to request; its finished ones
  std::vector<std::uint64_t> sent_;  // by owner: block messages sent; for a relayed part, requests awaited
  std::deque<std::pair<int, std::uint64_t>> asked_;  // (owner, block) pairs that this rank is to relay
  std::uint64_t to_relay_ = 0;                       // blocks still to be relayed
  std::exception_ptr error_;
};

}  // namespace sluice::comm
