#include "engine/memory/parameter_shards.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/json.h"

namespace sluice::engine {
namespace {

bool is_partitioned(const UnitPlan& unit) { return unit.tier(Part::kParameters) == allocator::Tier::kRanks; }

// Of a rank whose shard of a unit is in memory where that is partitioned, and not on disk.
ShardMemory::Sizes sizes_of(const Layout& layout, const Ranks& ranks, int rank,
                            const std::vector<bool>& partitioned, const std::vector<bool>& on_disk) {
  ShardMemory::Sizes sizes(layout.units().size());
  for (UnitId unit = 0; unit < sizes.size(); ++unit)
    if (partitioned[unit] && !on_disk[unit])
      sizes[unit] = ranks.shard(unit, rank).size() * size_of(layout.dtype(unit));
  return sizes;
}

std::vector<bool> partitioned_of(const Plan& plan) {
  std::vector<bool> partitioned;
  for (const UnitPlan& unit : plan.units) partitioned.push_back(is_partitioned(unit));
  return partitioned;
}

std::vector<bool> on_disk_of(const Plan& plan) {
  std::vector<bool> on_disk;
  for (const UnitPlan& unit : plan.units) on_disk.push_back(is_partitioned(unit) && unit.shard_on_disk);
  return on_disk;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    return thrown.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace

// Gathers the parameters of a unit from the shards of all ranks.
class ParameterShards::AllShards final : public Backing {
 public:
  AllShards(ParameterShards& shards, UnitId unit) : shards_(shards), unit_(unit) {}

  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    ensure(offset == 0, "a partitioned unit is fetched from byte {} on", offset);
    const std::vector<Piece> pieces = shards_.pieces_of(unit_);
    const Done part = after(pieces.size(), std::move(done));
    for (const Piece& piece : pieces)
      shards_.read(unit_, shards_.expected(unit_), piece, into.subspan(piece.in_unit, piece.bytes), part);
  }
  void store(std::uint64_t, std::span<const std::byte>, Done) override { never_stored(); }
  void store(std::uint64_t, std::span<const std::byte>, Threads&, Done) override { never_stored(); }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    fetch(offset, into, std::move(done));
  }
  void check(std::uint64_t, std::span<const std::byte>, Threads&) override {}

 private:
  [[noreturn]] static void never_stored() {
    fail(ErrorCode::kInternal, "partitioned parameters are stored as a whole");
  }
  ParameterShards& shards_;
  const UnitId unit_;
};

ParameterShards::ParameterShards(const Layout& layout, const Plan& plan, Ranks& ranks)
    : layout_(layout),
      ranks_(ranks),
      partitioned_(partitioned_of(plan)),
      on_disk_(on_disk_of(plan)),
      place_(plan.shard_place()),
      memory_(sizes_of(layout, ranks, ranks.rank(), partitioned_, on_disk_)),
      stored_(layout.units().size(), plan.serving_pieces, ranks.communicator().hosts().readers(ranks.rank())),
      expected_(layout.units().size()),
      published_(layout.units().size()),
      relayed_(layout, ranks, plan.relay_pieces, plan.relay_piece_bytes) {
  if (plan.passing_places > 0)
    passed_.emplace(PassedShards::Need{plan.passing_places, plan.passing_place_bytes}, ranks.size(),
                    [this](UnitId unit) { return std::span<const std::byte>(data(unit), bytes(unit)); });
}

void ParameterShards::define(Backings& backings) {
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
    if (on_disk_[unit]) define(unit, backings);
}

void ParameterShards::define(UnitId unit, Backings& backings) {
  stored_.define(unit, "shard of the parameters of " + layout_.units()[unit].name, bytes(unit), backings);
}

// The most bytes that a later plan may keep in memory.
std::size_t ParameterShards::room_of_all() const {
  std::size_t room = 0;
  for (UnitId unit = 0; unit < partitioned_.size(); ++unit)
    if (partitioned_[unit]) room += ShardMemory::room(bytes(unit));
  return room;
}

void ParameterShards::start(allocator::Ledger& ledger, DeviceWork* gpu) {
  gpu_ = gpu;
  if (gpu == nullptr)
    memory_.start(ledger, allocator::Purpose::kParameter, room_of_all());
  else if (on_gpus())
    memory_.start_among_gpus(ledger, gpu->device(), allocator::Purpose::kParameter);
  else
    memory_.start(ledger, gpu->device(), allocator::Purpose::kParameter, on_one_host() && !passed_);
  // So that an update of a shard waits for copies of its previous version.
  for (UnitId unit = 0; unit < units() && gpu != nullptr; ++unit)
    if (has(unit) && !on_disk(unit) && bytes(unit) > 0) gpu->add({data(unit), bytes(unit)}, bytes(unit));
  if (passed_) passed_->start(ledger, *gpu);
  if (on_gpus()) published_by_gpu_.emplace();
  if (gpu == nullptr)
    stored_.start(ledger);
  else
    stored_.start_beside_gpu(ledger, *gpu, on_one_host());
  relayed_.start(ledger);
  reads_->shards = this;
  ranks_.serve([reads = reads_](const comm::Read& read, comm::Answer answer) {
    const std::lock_guard lock(reads->serving);
    if (reads->shards != nullptr) return reads->shards->answer(read, std::move(answer));
    answer({}, shards_are_gone(), {});
  });
}

// Compares the ranks' plans first: ranks with different places would wait for messages that are never sent.
void ParameterShards::share() {
  const std::string name = "the shards of parameters";
  const std::array places = {"in the memory of its GPU", "passed by its GPU from host memory",
                             "in host memory"};
  Json units = Json::array();
  for (UnitId unit = 0; unit < this->units(); ++unit)
    if (on_disk_[unit]) units.push_back(unit);
  const Json told = {
      {"place", places[static_cast<std::size_t>(place_)]}, {"on_disk", units}, {"pieces", stored_.pieces()}};
  std::vector<std::string> places_of_ranks;
  std::vector<std::size_t> pieces;
  for (const std::string& text : ranks_.exchange(name, told.dump(), {})) {
    const Json other = parse_json(text, name);
    places_of_ranks.push_back(json_field<std::string>(other, "place", name));
    pieces.push_back(json_field<std::size_t>(other, "pieces", name));
    std::vector<bool>& on_disk = on_disk_of_ranks_.emplace_back(this->units());
    for (const UnitId unit : json_field<std::vector<UnitId>>(other, "on_disk", name)) on_disk.at(unit) = true;
    stores_any_ |= std::ranges::count(on_disk, true) > 0;
  }
  for (std::size_t rank = 0; rank < places_of_ranks.size(); ++rank) {
    if (places_of_ranks[rank] != places_of_ranks[0])
      fail(ErrorCode::kInvalidArgument,
           "{} are {} on rank {}, and {} on rank 0: give all ranks the same device memory and the same "
           "updates, or let them use the host's memory (links=\"host\")",
           name, places_of_ranks[rank], rank, places_of_ranks[0]);
    places_.emplace_back(
        sizes_of(layout_, ranks_, static_cast<int>(rank), partitioned_, on_disk_of_ranks_[rank]));
  }
  passed_ ? passed_->share(ranks_.communicator(), name) : memory_.share(ranks_, name);
  if (stores_any_) stored_.share(ranks_, pieces);
}

ParameterShards::~ParameterShards() {
  published_by_gpu_.reset();
  reads_->ends = true;
  loans_.end([this] { return !ranks_.communicator().failure().empty(); });
  std::vector<Question> unanswered;
  {
    const std::lock_guard lock(reads_->serving);
    if (reads_->shards == nullptr) return;
    reads_->shards = nullptr;
    unanswered = std::move(waiting_);
  }
  ranks_.communicator().serve({});
  for (const Question& question : unanswered) question.answer({}, shards_are_gone(), {});
  std::unique_lock lock(reads_->counting);
  reads_->ended.wait(lock, [this] { return reads_->under_way == 0; });
}

std::unique_ptr<Backing> ParameterShards::make_backing(UnitId unit) {
  return std::make_unique<AllShards>(*this, unit);
}

// Cut into pieces, since owners may have shards on disk and several ranks relay them. This rank's own come
// last, since those of others may take long.
std::vector<ParameterShards::Piece> ParameterShards::pieces_of(UnitId unit, std::size_t most) const {
  std::vector<Piece> pieces;
  for (int step = 1; step <= ranks_.size(); ++step) {
    const int rank = (ranks_.rank() + step) % ranks_.size();
    const std::size_t first = ranks_.shard(unit, rank).begin * element_bytes(unit), all = bytes(unit, rank);
    for (std::size_t offset = 0; offset < all; offset += pieces.back().bytes)
      pieces.push_back({rank, offset, std::min(most, all - offset), first + offset});
  }
  return pieces;
}

void ParameterShards::read(UnitId unit, std::uint64_t version, const Piece& piece, std::span<std::byte> into,
                           Done done) {
  if (piece.owner == ranks_.rank()) return read_own(unit, version, piece.offset, into, std::move(done));
  fetch({ranks_.rank(), piece.owner, unit, version, piece.offset, piece.bytes}, into, std::move(done));
}

void ParameterShards::await(UnitId unit, std::uint64_t version, int owner, Done done) {
  if (owner == ranks_.rank()) return done(nullptr);
  ranks_.communicator().read(owner, unit, version, 0, {}, std::move(done));
}

void ParameterShards::take(UnitId unit, const std::byte* values) {
  const std::byte* const own_values = values + own(unit).begin * element_bytes(unit);
  if (on_gpus()) return gpu_->copy_within(data(unit), {own_values, bytes(unit)});
  take(unit, 0, {own_values, bytes(unit)});
}

void ParameterShards::take(UnitId unit, std::size_t offset, std::span<const std::byte> values) {
  if (on_disk(unit)) return stored_.write(unit, offset, values);
  std::copy_n(values.data(), values.size(), data(unit) + offset);  // null where the shard is empty
}

void ParameterShards::read(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done) {
  read_own(unit, expected(unit), offset, into, std::move(done));
}

void ParameterShards::read_own(UnitId unit, std::uint64_t version, std::size_t offset,
                               std::span<std::byte> into, Done done) {
  if (on_disk(unit)) return stored_.copy(unit, version, offset, into, std::move(done));
  std::copy_n(data(unit) + offset, into.size(), into.data());
  done(nullptr);
}

// Reads another rank's shard.
void ParameterShards::fetch(const comm::Read& piece, std::span<std::byte> into, Done done) {
  const int source = relayed_.source(piece.owner, piece.offset / StoredShards::kPiece);
  if (source != ranks_.rank())
    return ranks_.communicator().read_through(source, piece.owner, piece.key, piece.version, piece.offset,
                                              into, std::move(done));
  relayed_.read(piece, Pieces::copy_to(into, std::move(done)));
}

void ParameterShards::expect(UnitId unit) { ++expected_[unit]; }

// Removes from waiting_ the questions that can be answered now, and counts them as under way. REQUIRES:
// mutex_ is held.
std::vector<ParameterShards::Question> ParameterShards::take_answerable() {
  std::vector<Question> now;
  if (paused_) return now;
  const auto later = std::partition(waiting_.begin(), waiting_.end(), [&](const Question& question) {
    return question.read.version > published_[question.read.key % units()];
  });
  std::move(later, waiting_.end(), std::back_inserter(now));
  waiting_.erase(later, waiting_.end());
  const std::lock_guard lock(reads_->counting);
  reads_->under_way += static_cast<int>(now.size());
  return now;
}

void ParameterShards::publish(UnitId unit) {
  const std::uint64_t version = expected_[unit];
  if (!on_gpus()) return publish(unit, version);
  const auto wait = [this, unit, version](Done&) {
    gpu_->wait({data(unit), bytes(unit)}, DeviceWork::Use::kRead);
    publish(unit, version);
  };
  published_by_gpu_->add(wait, [this](const std::exception_ptr& error) {
    if (error != nullptr) ranks_.communicator().fail(text_of(error));
  });
}

void ParameterShards::publish(UnitId unit, std::uint64_t version) {
  std::vector<Question> now;
  {
    const std::lock_guard lock(mutex_);
    published_[unit] = version;
    now = take_answerable();
  }
  for (const Question& question : now) answer_now(question);
}

// Whether the read is of a whole piece that this rank has, lends or relays, or only waits for a version.
bool ParameterShards::is_possible(const comm::Read& read) const {
  const auto unit = static_cast<UnitId>(read.key % units());
  if (read.key >= units())
    return (passed_ || (gpu_ != nullptr && on_disk(unit))) && read.owner == ranks_.rank() &&
           read.bytes == sizeof(Loans::Loan) && read.offset % most_lent() == 0 && read.offset < bytes(unit);
  if (read.owner < 0 || read.owner >= ranks_.size() || read.offset % StoredShards::kPiece != 0) return false;
  if (read.owner == ranks_.rank() && read.bytes == 0) return true;
  const std::size_t all = bytes(unit, read.owner);
  return !on_gpus() && relayed_.source(read.owner, read.offset / StoredShards::kPiece) == ranks_.rank() &&
         read.offset < all && read.bytes == std::min(StoredShards::kPiece, all - read.offset);
}

void ParameterShards::answer(const comm::Read& read, comm::Answer answer) {
  const auto refuse = [&](const char* why) {
    answer({}, std::make_exception_ptr(Error(ErrorCode::kState, why)), {});
  };
  if (gpu_ != nullptr && read.key == key_of_return()) {
    loans_.give_back(read.version);
    return answer({}, nullptr, [](const std::exception_ptr&) {});
  }
  if (read.key >= key_of_return() || !has(static_cast<UnitId>(read.key % units())))
    return refuse("a unit is read that is not partitioned");
  if (!is_possible(read)) return refuse("a shard is read as if it had another size, or were elsewhere");
  if (read.owner != ranks_.rank()) return relayed_.read(read, std::move(answer));
  std::vector<Question> now;
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back({read, std::move(answer)});
    now = take_answerable();
  }
  for (const Question& question : now) answer_now(question);
}

void ParameterShards::answer_now(const Question& question) {
  const auto unit = static_cast<UnitId>(question.read.key % units());
  const std::size_t offset = question.read.offset, wanted = question.read.bytes;
  const auto ended = [reads = reads_] {
    const std::lock_guard lock(reads->counting);
    --reads->under_way;
    reads->ended.notify_all();
  };
  const auto sent = [ended](const std::exception_ptr&) { ended(); };
  if (wanted == 0) return question.answer({}, nullptr, sent);  // it waited for the version only
  // A reader learns first which rank could not read its shard, then the error.
  const comm::Answer later = [this, ended, answer = question.answer](std::span<const std::byte> bytes,
                                                                     const std::exception_ptr& error,
                                                                     const Done& used) {
    if (error != nullptr && !reads_->ends) ranks_.communicator().fail(text_of(error));
    answer(bytes, error, [ended, used](std::exception_ptr failure) {
      if (used) used(std::move(failure));
      ended();
    });
  };
  const bool borrows = question.read.key == key_of_place(unit);
  if (borrows && passed_)
    return passed_->lend(unit, question.read.version, offset, 0, loans_.lend(passed_->places(), later));
  if (borrows)
    return stored_.read(unit, question.read.version, offset, 0, loans_.lend(stored_.memory(), later));
  if (!on_disk(unit)) return question.answer({data(unit) + offset, wanted}, nullptr, sent);
  stored_.read(unit, question.read.version, offset, wanted, later);
}

void ParameterShards::borrow(UnitId unit, std::uint64_t version, const Piece& piece, Pieces::Use use) {
  if (piece.owner == ranks_.rank())
    return passed_ ? passed_->lend(unit, version, piece.offset, piece.bytes, std::move(use))
                   : stored_.read(unit, version, piece.offset, piece.bytes, std::move(use));
  const auto loan = std::make_shared<Loans::Loan>();
  const auto borrowed = [this, loan, piece, use = std::move(use)](std::exception_ptr error) {
    if (error != nullptr) return use({}, std::move(error), {});
    const std::byte* const lent =
        passed_ ? passed_->of(piece.owner, loan->offset) : stored_.of(piece.owner, loan->offset);
    use({lent, piece.bytes}, nullptr, [this, loan, piece](const std::exception_ptr&) {
      ranks_.communicator().read(piece.owner, key_of_return(), loan->number, 0, {},
                                 [](std::exception_ptr) {});
    });
  };
  ranks_.communicator().read(piece.owner, key_of_place(unit), version, piece.offset,
                             std::as_writable_bytes(std::span(loan.get(), 1)), borrowed);
}

// ---- change of plan ----

bool ParameterShards::define_backing(UnitId unit, const UnitPlan& placed, Backings& backings) {
  if (!placed.shard_on_disk || stored_.has(unit)) return false;
  define(unit, backings);
  return true;
}

void ParameterShards::pause() {
  {
    const std::lock_guard lock(mutex_);
    paused_ = true;
  }
  std::unique_lock lock(reads_->counting);
  reads_->ended.wait(lock, [this] { return reads_->under_way == 0; });
}

void ParameterShards::leave_memory(const Plan& next, allocator::Ledger& ledger, std::byte* piece) {
  std::vector<UnitId> leaving;
  for (UnitId unit = 0; unit < on_disk_.size(); ++unit) {
    if (on_disk_[unit] || !next.units[unit].shard_on_disk) continue;
    stored_.write_through(unit, data(unit), piece, [this] { ranks_.communicator().report_work(); });
    on_disk_[unit] = true;
    leaving.push_back(unit);
  }
  memory_.leave(leaving);
  stored_.set_pieces(ledger, 0);
}

void ParameterShards::enter_memory(const Plan& next, allocator::Ledger& ledger, std::byte* piece) {
  for (UnitId unit = 0; unit < on_disk_.size(); ++unit) {
    if (!on_disk_[unit] || next.units[unit].shard_on_disk) continue;
    memory_.enter(unit, bytes(unit));
    stored_.read_through(unit, data(unit), piece, [this] { ranks_.communicator().report_work(); });
    on_disk_[unit] = false;
  }
  stored_.set_pieces(ledger, next.serving_pieces);
}

void ParameterShards::resume() {
  std::vector<Question> now;
  {
    const std::lock_guard lock(mutex_);
    paused_ = false;
    now = take_answerable();
  }
  for (const Question& question : now) answer_now(question);
}

}  // namespace sluice::engine
