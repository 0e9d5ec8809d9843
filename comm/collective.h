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

// Returns the tag of message number `index` of a stage of the call with this id that is the `use`th. Tags are
// hashes of 64 bits, so that those of different calls differ.
std::uint64_t tag_of(std::uint64_t id, std::uint64_t use, std::uint8_t stage, std::uint64_t index);
// Returns a call in words.
std::string in_words(const std::string& name, const Call& call);

// What a collective call was given. Ranks are numbers in its group.
struct Task {
  CallKind kind;
  std::uint64_t id = 0, use = 0;
  std::string name{};
  Element element{};
  std::vector<std::byte*> arrays{};    // what this rank gives; of a sum as many as `order` says
  std::vector<std::size_t> borders{};  // of the parts, by rank; of a broadcast: 0 and the number of bytes
  int root = 0;
  SumOrder order{};                      // of a sum
  std::shared_ptr<const Given> given{};  // of a sum; null: all of it
  Done done{};
};

inline constexpr std::size_t kBlockBytes = std::size_t{256} << 10;

enum class SlotUse : std::uint8_t { kOwn, kHost };  // a block of the own part, or one that the rank relays

// Memory for what the other ranks have of one block of a sum.
struct Slot {
  std::byte* memory;  // kBlockBytes for each other rank, which all of its arrays share
  SlotUse use;
  int owner = 0;            // whose part the block is of
  std::uint64_t block = 0;  // of that part
  std::size_t awaited = 0;  // the messages that have not ended
};

class Collective;
// A message of a collective call has ended.
struct Event {
  // kBlockAsked: the rank that has the part wants a block of what this one relays. kPartCame: of a gather.
  enum Kind { kBegun, kBlockSent, kBlockCame, kBlockAsked, kSumSent, kPartCame, kOther } kind = kOther;
  Collective* collective = nullptr;
  int owner = 0;            // whose part it is of
  std::uint64_t block = 0;  // that was asked for
  Slot* slot = nullptr;
  std::exception_ptr error{};
};

// One call under way. It begins with empty messages between each two ranks, which compare the calls. A part
// of a sum is computed block by block, each with a slot; all else lands where it belongs.
//
// Sums wait for slots, but never for each other. A slot is given to a call only when all ranks of its group
// have begun that call, so groups may share slots. What they send needs no slot: they send each block of the
// other parts from its place, as soon as it is asked for. So each slot that was given is filled and is free
// again, whatever else its rank waits for, and whatever order the ranks began their calls in. A rank with all
// slots in use thus always gets one back.
//
// Of several hosts, a rank may relay blocks (SumRoute): it adds what the ranks of its host have of them. It
// does so when the rank that has the part asks, which has a slot for the sums then. Slots for this are apart
// from those for the own part, so that each is free again once the others of the host have sent. A
// relay gets whole blocks: what a rank does not give of them, as -0.
//
// Thread rule: the communicator's thread, but task() and knows() are for any.
class Collective {
 public:
  using Report = std::function<void(Event event)>;  // of any thread
  Collective(Transport& transport, std::shared_ptr<const Group> group, Report report, Task task);

  const Task& task() const { return task_; }
  bool knows(std::uint64_t tag) const;  // whether it may have a message of this tag

  void begin(Adder& adder);
  // One of its messages has ended. Returns whether the event's slot is free again.
  bool end(Event event, Adder& adder);
  bool wants_slot(SlotUse use) const;
  void use_slot(Slot& slot);             // for the next block that takes one
  void abort(std::exception_ptr error);  // begins no message any more
  bool has_ended() const;
  std::exception_ptr take_error() { return std::move(error_); }  // once it has ended

 private:
  std::span<std::byte> part(int rank, std::size_t array = 0) const;
  std::span<std::byte> block(int rank, std::uint64_t index, std::size_t array = 0) const;
  std::uint64_t blocks(int rank) const;
  std::span<std::byte> whole(int rank) const;  // what is gathered or broadcast from there
  // The number of the message with a block of an array, or of a sum, of the part of `owner`.
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

  int source(int owner) const;  // the rank from which this one gets what is gathered from `owner`
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
  const std::optional<SumRoute> route_;  // of a sum
  const std::size_t block_bytes_;
  std::size_t under_way_ = 0;                 // messages
  int begun_ = 0;                             // others of the group that have begun
  std::uint64_t next_block_ = 0, added_ = 0;  // blocks of the own part
  std::vector<std::uint64_t> sent_;  // by owner: messages with blocks that were sent, or asks awaited
  std::deque<std::pair<int, std::uint64_t>> asked_;  // owners and blocks that are to be relayed
  std::uint64_t to_relay_ = 0;                       // blocks
  std::exception_ptr error_;
};

}  // namespace sluice::comm
