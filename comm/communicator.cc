#include "comm/communicator.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "allocator/memory.h"
#include "comm/collective.h"
#include "comm/slots.h"
#include "comm/sums.h"
#include "core/bytes.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

constexpr std::uint8_t kMessageStage = 3;  // after the stages of collective calls

std::vector<std::size_t> equal_borders(std::size_t count, int ranks) {
  std::vector<std::size_t> borders{0};
  const auto parts = static_cast<std::size_t>(ranks);
  for (std::size_t rank = 0; rank < parts; ++rank)
    borders.push_back(borders.back() + count / parts + (rank < count % parts ? 1 : 0));
  return borders;
}

std::vector<std::size_t> checked(Borders borders, int ranks, const std::string& name) {
  if (borders.size() != static_cast<std::size_t>(ranks) + 1 ||
      !std::is_sorted(borders.begin(), borders.end()))
    fail(ErrorCode::kInvalidArgument, "'{}': {} borders were given; {} ranks have {}, which do not descend",
         name, borders.size(), ranks, ranks + 1);
  return {borders.begin(), borders.end()};
}

Call message_of(std::size_t bytes) {
  return {static_cast<std::uint8_t>(CallKind::kMessage), static_cast<std::uint8_t>(Dtype::kU8), bytes, 0};
}

std::exception_ptr outside_of_group(const Read& read) {
  return std::make_exception_ptr(
      Error(ErrorCode::kInvalidArgument,
            fmt::format("rank {} reads bytes of rank {} from one that serves another group", read.reader,
                        read.owner)));
}

template <class Value>
std::byte* bytes_of(std::span<Value> values) {
  return std::as_writable_bytes(values).data();
}

}  // namespace

struct Communicator::State {
  // An event for the communicator's thread: a new collective call, the end of one of its messages, or the end
  // of another transfer.
  struct News {
    std::unique_ptr<Collective> begun{};
    Event event{};
    Done done{};
    bool last = false;
  };

  State(std::unique_ptr<Links> links, const Deadlines& deadlines, allocator::Ledger& ledger,
        const Hosts& hosts);
  ~State();

  void start(const std::shared_ptr<const Group>& group, Task task);
  std::exception_ptr error_of_end() const;
  bool refuses(Done& done);
  std::uint64_t message_tag(int from, int to, std::uint64_t id, const std::string& name);
  Done forgetting(std::uint64_t tag, Done done);
  Done forwarding(Done done);
  std::string describe(std::uint64_t tag, const Call& call);
  void tell(News news);

  void run();
  void handle(News& news);
  void end_if_done(Collective& call);
  void stop();

  std::mutex mutex;
  std::condition_variable has_news;
  std::vector<News> news;                                 // guarded by the mutex
  std::unordered_map<std::uint64_t, std::uint64_t> uses;  // by id of a collective call; guarded by the mutex
  std::map<std::array<std::uint64_t, 2>, std::uint64_t>
      message_uses;                                         // by id and direction; guarded by the mutex
  std::unordered_map<std::uint64_t, std::string> messages;  // names by tag; guarded by the mutex
  // The collective calls in flight. Only the communicator's thread changes it, under the mutex.
  std::unordered_map<const Collective*, std::unique_ptr<Collective>> calls;

  // Only for the communicator's thread.
  allocator::Region buffers;
  const int rank;
  Slots slots;
  Adder adder;

  std::unique_ptr<Transport> transport;
  std::thread thread;
};

Communicator::State::State(std::unique_ptr<Links> links, const Deadlines& deadlines,
                           allocator::Ledger& ledger, const Hosts& hosts)
    : buffers(ledger, allocator::Purpose::kStaging, buffer_bytes(links->size())),
      rank(links->rank()),
      slots(buffers.data(), hosts, rank) {
  transport = std::make_unique<Transport>(
      std::move(links), deadlines,
      [this](std::uint64_t tag, const Call& call) { return describe(tag, call); }, hosts);
  thread = std::thread([this] { run(); });
}

Communicator::State::~State() {
  tell({.last = true});
  thread.join();
}

void Communicator::State::tell(News item) {
  const std::lock_guard lock(mutex);
  news.push_back(std::move(item));
  if (news.size() == 1) has_news.notify_one();
}

void Communicator::State::start(const std::shared_ptr<const Group>& group, Task task) {
  if (refuses(task.done)) return;
  const std::lock_guard lock(mutex);
  task.use = uses[task.id]++;
  auto call = std::make_unique<Collective>(
      *transport, group, [this](Event event) { tell({.event = std::move(event)}); }, std::move(task));
  news.push_back({.begun = std::move(call)});
  has_news.notify_one();
}

std::exception_ptr Communicator::State::error_of_end() const {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, fmt::format("rank {} has ended its part in this", rank)));
}

// A `done` that runs while the communicator is being destroyed may make a call; it is refused.
bool Communicator::State::refuses(Done& done) {
  if (transport != nullptr) return false;
  tell({.event = {.error = error_of_end()}, .done = std::move(done)});
  return true;
}

std::uint64_t Communicator::State::message_tag(int from, int to, std::uint64_t id, const std::string& name) {
  const auto direction = static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint64_t>(to);
  const std::lock_guard lock(mutex);
  const std::uint64_t tag = tag_of(id, message_uses[{id, direction}]++, kMessageStage, direction);
  messages[tag] = name;
  return tag;
}

Done Communicator::State::forwarding(Done done) {
  return [this, done = std::move(done)](std::exception_ptr error) mutable {
    tell({.event = {.error = std::move(error)}, .done = std::move(done)});
  };
}
Done Communicator::State::forgetting(std::uint64_t tag, Done done) {
  return forwarding([this, tag, done = std::move(done)](std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex);
      messages.erase(tag);
    }
    done(std::move(error));
  });
}

std::string Communicator::State::describe(std::uint64_t tag, const Call& call) {
  const std::lock_guard lock(mutex);
  if (const auto found = messages.find(tag); found != messages.end()) return in_words(found->second, call);
  for (const auto& [collective, owned] : calls)
    if (collective->knows(tag)) return in_words(collective->task().name, call);
  return in_words("?", call);
}

void Communicator::State::run() {
  std::vector<News> taken;
  for (bool is_last = false; !is_last;) {
    {
      std::unique_lock lock(mutex);
      has_news.wait(lock, [&] { return !news.empty(); });
      taken.swap(news);
    }
    for (News& item : taken) {
      is_last |= item.last;
      handle(item);
    }
    taken.clear();
    slots.hand_out();
  }
  stop();
}

void Communicator::State::handle(News& item) {
  if (item.begun != nullptr) {
    Collective& call = *item.begun;
    {
      const std::lock_guard lock(mutex);
      calls.emplace(&call, std::move(item.begun));
    }
    call.begin(adder);
    end_if_done(call);
  } else if (item.event.collective != nullptr) {
    Collective& call = *item.event.collective;
    Slot* const slot = item.event.slot;
    if (call.end(std::move(item.event), adder)) slots.give_back(*slot);
    slots.note(call);
    end_if_done(call);
  } else if (item.done) {
    item.done(std::move(item.event.error));
  }
}

void Communicator::State::end_if_done(Collective& call) {
  if (!call.has_ended()) return;
  std::unique_ptr<Collective> ended;
  {
    const std::lock_guard lock(mutex);
    ended = std::move(calls.extract(&call).mapped());
  }
  if (ended->task().done) ended->task().done(ended->take_error());
}

// Ends the transport, and so all messages, and handles their ends.
void Communicator::State::stop() {
  for (const auto& [call, owned] : calls) owned->abort(error_of_end());
  slots.stop();
  transport.reset();
  for (;;) {
    std::vector<News> rest;
    {
      const std::lock_guard lock(mutex);
      rest.swap(news);
    }
    if (rest.empty()) return;
    for (News& item : rest) handle(item);
  }
}

std::size_t Communicator::buffer_bytes(int ranks) { return round_up(Slots::bytes(ranks), kHugePage); }

Communicator::Communicator(std::unique_ptr<Links> links, const Deadlines& deadlines,
                           allocator::Ledger& ledger, const std::vector<int>& hosts) {
  const Hosts checked = hosts.empty() ? Hosts(links->size()) : Hosts(hosts);
  if (checked.ranks() != links->size())
    sluice::fail(ErrorCode::kInvalidArgument, "the hosts of {} ranks were given, and links of {}",
                 checked.ranks(), links->size());
  group_ = std::make_shared<const Group>(checked, links->rank());
  state_ = std::make_shared<State>(std::move(links), deadlines, ledger, checked);
}
Communicator::Communicator(std::shared_ptr<State> state, Group group)
    : state_(std::move(state)), group_(std::make_shared<const Group>(std::move(group))) {}
Communicator::~Communicator() = default;

std::unique_ptr<Communicator> Communicator::group(const std::vector<int>& members) const {
  return std::unique_ptr<Communicator>(new Communicator(state_, Group(*group_, members)));
}

int Communicator::rank() const { return group_->rank(); }
int Communicator::size() const { return group_->size(); }
const Hosts& Communicator::hosts() const { return group_->hosts(); }

void Communicator::check_other(int other, const char* what) const {
  if (other < 0 || other >= size() || other == rank())
    sluice::fail(ErrorCode::kInvalidArgument, "rank {} {} rank {}: it must be another one of {} ranks",
                 rank(), what, other, size());
}

std::vector<std::byte*> Communicator::checked_arrays(std::span<const Array> arrays, const SumOrder& order,
                                                     const std::string& name) const {
  const std::size_t expected = order.arrays_of(rank());
  if (arrays.empty() || arrays.size() != expected || order.ranks() != size())
    sluice::fail(
        ErrorCode::kInvalidArgument,
        "'{}': {} arrays were given, and an order of {} ranks, of which this one has {}; there are {} "
        "ranks",
        name, arrays.size(), order.ranks(), expected, size());
  std::vector<std::byte*> bytes;
  for (const Array& array : arrays) {
    if (!is_float(array.type) || array.type != arrays[0].type)
      sluice::fail(
          ErrorCode::kInvalidArgument,
          "'{}': a sum over ranks of {} was asked for; it takes arrays of f32, bf16 or f16, all of one "
          "type",
          name, name_of(array.type));
    bytes.push_back(static_cast<std::byte*>(array.data));
  }
  return bytes;
}

void Communicator::start(Task task) {
  task.id = group_->id_of_run(task.id);
  state_->start(group_, std::move(task));
}

void Communicator::reduce_scatter(std::uint64_t id, const std::string& name, Array values, Borders borders,
                                  Done done) {
  reduce_scatter(id, name, std::span(&values, 1), borders, order_of_ranks(size()), std::move(done));
}

void Communicator::reduce_scatter(std::uint64_t id, const std::string& name, std::span<const Array> arrays,
                                  Borders borders, const SumOrder& order, Done done,
                                  std::shared_ptr<const Given> given) {
  const auto bytes = checked_arrays(arrays, order, name);
  start({.kind = CallKind::kReduceScatter,
         .id = id,
         .name = name,
         .element = element_of(arrays[0].type),
         .arrays = bytes,
         .borders = checked(borders, size(), name),
         .order = order,
         .given = std::move(given),
         .done = std::move(done)});
}

void Communicator::all_gather(std::uint64_t id, const std::string& name, Array values, Borders borders,
                              Done done) {
  start({.kind = CallKind::kAllGather,
         .id = id,
         .name = name,
         .element = element_of(values.type),
         .arrays = {static_cast<std::byte*>(values.data)},
         .borders = checked(borders, size(), name),
         .done = std::move(done)});
}

void Communicator::all_reduce(std::uint64_t id, const std::string& name, Array values, std::size_t count,
                              Done done) {
  all_reduce(id, name, std::span(&values, 1), count, order_of_ranks(size()), std::move(done));
}
void Communicator::all_reduce(std::uint64_t id, const std::string& name, std::span<const Array> arrays,
                              std::size_t count, const SumOrder& order, Done done,
                              std::shared_ptr<const Given> given) {
  all_reduce(id, name, element_of(arrays[0].type), checked_arrays(arrays, order, name), count, order,
             std::move(done), std::move(given));
}
void Communicator::all_reduce(std::uint64_t id, const std::string& name, std::span<double> values,
                              Done done) {
  all_reduce(id, name, Element::kF64, {bytes_of(values)}, values.size(), order_of_ranks(size()),
             std::move(done));
}
void Communicator::all_reduce(std::uint64_t id, const std::string& name, Element element,
                              std::vector<std::byte*> arrays, std::size_t count, const SumOrder& order,
                              Done done, std::shared_ptr<const Given> given) {
  start({.kind = CallKind::kAllReduce,
         .id = id,
         .name = name,
         .element = element,
         .arrays = std::move(arrays),
         .borders = equal_borders(count, size()),
         .order = order,
         .given = std::move(given),
         .done = std::move(done)});
}

void Communicator::broadcast(std::uint64_t id, const std::string& name, std::span<std::byte> bytes, int root,
                             Done done) {
  if (root < 0 || root >= size())
    sluice::fail(ErrorCode::kInvalidArgument, "'{}': a broadcast from rank {} was asked for, of {} ranks",
                 name, root, size());
  start({.kind = CallKind::kBroadcast,
         .id = id,
         .name = name,
         .element = element_of(Dtype::kU8),
         .arrays = {bytes.data()},
         .borders = {0, bytes.size()},
         .root = root,
         .done = std::move(done)});
}

// The ranks exchange the lengths of their strings, and then gather the strings.
std::vector<std::string> Communicator::exchange(std::uint64_t id, const std::string& name,
                                                const std::string& own,
                                                const std::function<void()>& meanwhile) {
  if (own.size() > kMostExchanged)
    sluice::fail(ErrorCode::kInvalidArgument, "'{}': {} bytes were given, of at most {}", name, own.size(),
                 kMostExchanged);
  const auto ranks = static_cast<std::size_t>(size());
  const auto gather = [&](std::byte* bytes, std::vector<std::size_t> borders) {
    TransferGroup group;
    start({.kind = CallKind::kExchange,
           .id = id,
           .name = name,
           .element = element_of(Dtype::kU8),
           .arrays = {bytes},
           .borders = std::move(borders),
           .done = group.add()});
    group.wait(meanwhile);
  };
  std::vector<std::uint64_t> lengths(ranks);
  lengths[static_cast<std::size_t>(rank())] = own.size();
  gather(bytes_of(std::span(lengths)), equal_borders(ranks * sizeof(std::uint64_t), size()));

  std::vector<std::size_t> borders{0};
  for (const std::uint64_t length : lengths) {
    if (length > kMostExchanged)
      sluice::fail(ErrorCode::kCorrupt, "'{}': a rank gives {} bytes, of at most {}", name, length,
                   kMostExchanged);
    borders.push_back(borders.back() + length);
  }
  std::string all(borders.back(), '\0');
  own.copy(all.data() + borders[static_cast<std::size_t>(rank())], own.size());
  if (!all.empty()) gather(bytes_of(std::span(all)), borders);
  std::vector<std::string> given;
  for (std::size_t r = 0; r < ranks; ++r)
    given.push_back(all.substr(borders[r], borders[r + 1] - borders[r]));
  return given;
}

void Communicator::send(int to, std::uint64_t id, const std::string& name, std::span<const std::byte> from,
                        Done done) {
  check_other(to, "sends to");
  if (state_->refuses(done)) return;
  const int target = group_->member(to);
  const std::uint64_t tag = state_->message_tag(state_->rank, target, group_->id_of_run(id), name);
  state_->transport->send(target, tag, message_of(from.size()), from,
                          state_->forgetting(tag, std::move(done)));
}
void Communicator::receive(int from, std::uint64_t id, const std::string& name, std::span<std::byte> into,
                           Done done) {
  check_other(from, "receives from");
  if (state_->refuses(done)) return;
  const int source = group_->member(from);
  const std::uint64_t tag = state_->message_tag(source, state_->rank, group_->id_of_run(id), name);
  state_->transport->receive(source, tag, message_of(into.size()), into,
                             state_->forgetting(tag, std::move(done)));
}

void Communicator::serve(Server server) {
  if (!server) return state_->transport->serve({});
  state_->transport->serve([group = group_, server = std::move(server)](Read read, Answer answer) {
    const auto reader = group->number_of(read.reader), owner = group->number_of(read.owner);
    if (!reader || !owner) return answer({}, outside_of_group(read), {});
    read.reader = *reader;
    read.owner = *owner;
    server(read, std::move(answer));
  });
}

void Communicator::read(int from, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
                        std::span<std::byte> into, Done done) {
  read_through(from, from, key, version, offset, into, std::move(done));
}
void Communicator::read_through(int relay, int owner, std::uint64_t key, std::uint64_t version,
                                std::uint64_t offset, std::span<std::byte> into, Done done) {
  check_other(relay, "reads from");
  check_other(owner, "reads bytes of");
  if (state_->refuses(done)) return;
  state_->transport->read(group_->member(relay), group_->member(owner), key, version, offset, into,
                          state_->forwarding(std::move(done)));
}

void Communicator::report_work() { state_->transport->report_work(); }
void Communicator::fail(const std::string& error, ErrorCode code) { state_->transport->fail(error, code); }
void Communicator::describe(int rank, const std::string& text) {
  state_->transport->describe(group_->member(rank), text);
}
std::string Communicator::failure() const { return state_->transport->failure(); }
Transport::Counters Communicator::counters() const { return state_->transport->counters(); }

}  // namespace sluice::comm
