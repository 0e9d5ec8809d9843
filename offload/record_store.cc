#include "offload/record_store.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <limits>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::offload {

namespace {

long file_system_of(const std::string& folder) {
  struct statfs status {};
  if (::statfs(folder.c_str(), &status) != 0) return 0;  // opening a file there will report the error
  return status.f_type;
}

}  // namespace

bool lies_in_memory(const std::string& folder) {
  const long type = file_system_of(folder);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC;
}

void check_disk_folder(const std::string& folder) {
  if (lies_in_memory(folder))  // Linux allows files with O_DIRECT there
    fail(ErrorCode::kInvalidArgument,
         "the folder '{}' lies in memory (tmpfs or ramfs): name a folder on a disk", folder);
  const long type = file_system_of(folder);
  if (type == PROC_SUPER_MAGIC || type == SYSFS_MAGIC)
    fail(ErrorCode::kInvalidArgument,
         "the folder '{}' belongs to the system itself and cannot hold files: name a folder on a disk",
         folder);
}

namespace {

constexpr std::size_t kNameBytes = 128;  // the length of a record's name that metadata_bytes() assumes

std::vector<StoreFile> open_folders(IoService& io, const std::vector<DiskFolder>& folders) {
  if (folders.empty())
    fail(ErrorCode::kInvalidArgument, "records on disk need at least one folder, but none was given");
  std::vector<StoreFile> files;
  for (const DiskFolder& folder : folders) {
    check_disk_folder(folder.path);
    files.push_back({io.open(folder.path, OpenMode::kUnnamed), folder.path, folder.limit});
  }
  return files;
}

std::vector<StoreFile> without_limits(std::vector<std::unique_ptr<File>> files) {
  if (files.empty())
    fail(ErrorCode::kInvalidArgument, "records on disk need at least one file, but none was given");
  std::vector<StoreFile> result;
  for (std::unique_ptr<File>& file : files) {
    std::string name = file->name();
    result.push_back({std::move(file), std::move(name), std::numeric_limits<std::uint64_t>::max()});
  }
  return result;
}

void check_limits(const StoreState& state) {
  std::string missing;
  for (std::size_t i = 0; i < state.files.size(); ++i) {
    const std::uint64_t needed = state.layout.taken()[i];
    const std::uint64_t limit = state.files[i].limit;
    if (needed > limit)
      missing += fmt::format("{}the folder '{}' would hold {}, and its limit is {}: {} are missing",
                             missing.empty() ? "" : "; ", state.files[i].folder, format_size(needed),
                             format_size(limit), format_size(needed - limit));
  }
  if (!missing.empty()) fail(ErrorCode::kBudget, "{}; raise the limit or add a folder", missing);
}

void take_space(StoreState& state) {
  std::size_t taken = 0;
  try {
    for (; taken < state.files.size(); ++taken)
      state.files[taken].file->allocate(state.layout.taken()[taken]);
  } catch (...) {
    for (std::size_t i = 0; i < taken; ++i) state.files[i].file->allocate(state.allocated_layout.taken()[i]);
    throw;
  }
}

StoredRecord& checked_record(StoreState& state, RecordId id, std::uint64_t offset, std::size_t bytes) {
  if (id >= state.records.size())
    fail(ErrorCode::kInvalidArgument, "there is no record {}: {} are defined", id, state.records.size());
  if (id >= state.space.size())
    fail(ErrorCode::kState, "record '{}' cannot be read or written before allocate()",
         state.records[id].name);
  StoredRecord& record = state.records[id];
  const std::uint64_t whole = record.extents.bytes, block = record.extents.block_bytes;
  const bool inside = offset <= whole && bytes <= whole - offset;
  const bool whole_blocks = offset % block == 0 && (bytes % block == 0 || offset + bytes == whole);
  if (!inside || !whole_blocks)
    fail(ErrorCode::kInvalidArgument,
         "record '{}' of {} bytes: a transfer of {} bytes at offset {} does not cover whole blocks of {} "
         "bytes (the last may be shorter)",
         record.name, whole, bytes, offset, block);
  return record;
}

struct Call {
  RecordId record;
  Direction direction;
  Urgency urgency;
  std::uint64_t offset;
  std::span<std::byte> data;
};

void start_transfer(StoreState& state, const Call& call, Checks checks, Threads* threads, Done done) {
  const auto& [id, direction, urgency, offset, data] = call;
  StoredRecord& record = checked_record(state, id, offset, data.size());
  check_aligned(record.name, direction, offset, data.data(), data.size());
  std::make_shared<RecordTransfer>(state, record, direction, urgency, offset, data, checks, std::move(done))
      ->start(threads);
}

// Somebody may wait to read parameters; for all else that is written nobody waits to read it.
void start_write(StoreState& state, RecordId id, std::uint64_t offset, std::span<const std::byte> from,
                 Threads* threads, Done done) {
  const std::span<std::byte> data{const_cast<std::byte*>(from.data()), from.size()};
  const bool is_parameters =
      checked_record(state, id, offset, data.size()).purpose == allocator::Purpose::kParameter;
  const Urgency urgency = is_parameters ? Urgency::kNow : Urgency::kLater;
  start_transfer(state, {id, Direction::kWrite, urgency, offset, data}, Checks::kHere, threads,
                 std::move(done));
}

}  // namespace

RecordStore::RecordStore(IoService& io, std::vector<DiskFolder> folders, allocator::Ledger& ledger,
                         Trace* trace)
    : state_(std::make_unique<State>(ledger, trace, open_folders(io, folders))) {}

RecordStore::RecordStore(std::vector<std::unique_ptr<File>> files, allocator::Ledger& ledger, Trace* trace)
    : state_(std::make_unique<State>(ledger, trace, without_limits(std::move(files)))) {}

RecordStore::~RecordStore() = default;

RecordId RecordStore::define(std::string name, std::uint64_t bytes, allocator::Purpose purpose,
                             std::size_t block_bytes) {
  if (bytes % kDiskBlock != 0)
    fail(ErrorCode::kInvalidArgument, "record '{}' of {} bytes: its size must be a multiple of {}", name,
         bytes, kDiskBlock);
  if (block_bytes == 0 || block_bytes % kDiskBlock != 0)
    fail(ErrorCode::kInvalidArgument,
         "record '{}': blocks of {} bytes were asked for; a multiple of {} is needed", name, block_bytes,
         kDiskBlock);
  const std::size_t blocks = divide_up(bytes, block_bytes);
  allocator::Charge metadata(state_->ledger, allocator::Tier::kHost, allocator::Purpose::kBase,
                             metadata_bytes(bytes, block_bytes));
  state_->records.push_back({std::move(name), purpose, state_->layout.add(bytes, block_bytes),
                             std::make_unique<BlockRecord[]>(blocks), std::move(metadata)});
  return static_cast<RecordId>(state_->records.size() - 1);
}

std::size_t RecordStore::metadata_bytes(std::uint64_t bytes, std::size_t block_bytes) {
  return sizeof(StoredRecord) + kNameBytes + divide_up(bytes, block_bytes) * sizeof(BlockRecord);
}

void RecordStore::allocate() {
  State& s = *state_;
  const std::size_t before = s.space.size();
  try {
    check_limits(s);
    for (std::size_t i = before; i < s.records.size(); ++i)
      s.space.emplace_back(s.ledger, allocator::Tier::kDisk, s.records[i].purpose,
                           s.records[i].extents.bytes);
    take_space(s);
  } catch (...) {
    s.space.resize(before);
    while (s.records.size() > before) s.records.pop_back();
    s.layout = s.allocated_layout;
    throw;
  }
  s.allocated_layout = s.layout;
}

void RecordStore::read(RecordId record, std::uint64_t offset, std::span<std::byte> into, Done done) {
  start_transfer(*state_, {record, Direction::kRead, Urgency::kNow, offset, into}, Checks::kHere, nullptr,
                 std::move(done));
}

void RecordStore::read_unchecked(RecordId record, std::uint64_t offset, std::span<std::byte> into,
                                 Done done) {
  start_transfer(*state_, {record, Direction::kRead, Urgency::kLater, offset, into}, Checks::kByCaller,
                 nullptr, std::move(done));
}

void RecordStore::write(RecordId record, std::uint64_t offset, std::span<const std::byte> from, Done done) {
  start_write(*state_, record, offset, from, nullptr, std::move(done));
}

void RecordStore::write(RecordId record, std::uint64_t offset, std::span<const std::byte> from,
                        Threads& threads, Done done) {
  start_write(*state_, record, offset, from, &threads, std::move(done));
}

void RecordStore::check(RecordId id, std::uint64_t offset, std::span<const std::byte> found,
                        Threads& threads) {
  StoredRecord& record = checked_record(*state_, id, offset, found.size());
  const std::size_t bytes = record.extents.block_bytes, first = offset / bytes;
  const std::size_t blocks = divide_up(found.size(), bytes);
  claim(record, first, first + blocks);
  try {
    threads.parallel_for(blocks, 1, [&](std::size_t i, std::size_t) {
      verify(*state_, record, first + i, found.subspan(i * bytes, record.extents.block(first + i).bytes));
      record.blocks[first + i].unchecked = false;
    });
  } catch (...) {
    release(record, first, first + blocks);
    throw;
  }
  release(record, first, first + blocks);
}

RecordStore::Counters RecordStore::counters() const { return {state_->bytes_read, state_->bytes_written}; }

}  // namespace sluice::offload
