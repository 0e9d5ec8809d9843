#include "engine/saving/shared_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"
#include "core/text_file.h"
#include "engine/ranks/agreement.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

namespace fs = std::filesystem;

PartWriter::Mail mail_of(comm::Communicator* communicator, const std::string& file) {
  const std::string name = "a part of '" + file + "'";
  const std::uint64_t id = call_id(name);
  PartWriter::Mail mail;
  mail.send = [communicator, name, id](int to, std::span<const std::byte> bytes, Done done) {
    communicator->send(to, id, name, bytes, std::move(done));
  };
  mail.receive = [communicator, name, id](int from, std::span<std::byte> bytes, Done done) {
    communicator->receive(from, id, name, bytes, std::move(done));
  };
  return mail;
}

std::string to_bytes(const std::vector<BlockSum>& sums) {
  return {reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(BlockSum)};
}

// Enters the sums of a rank's blocks, by block.
void take_sums(const std::string& bytes, const std::string& file, int rank,
               std::vector<std::optional<std::uint64_t>>& blocks) {
  std::vector<BlockSum> sums(bytes.size() / sizeof(BlockSum));
  std::copy_n(bytes.data(), sums.size() * sizeof(BlockSum), reinterpret_cast<char*>(sums.data()));
  for (const BlockSum& sum : sums) {
    if (sum.block >= blocks.size() || blocks[sum.block])
      fail(ErrorCode::kCorrupt, "rank {} has written block {} of '{}', which {}", rank, sum.block, file,
           sum.block < blocks.size() ? "another rank has written, too" : "has no such block");
    blocks[sum.block] = sum.sum;
  }
}

FileSum merged(const std::vector<std::optional<std::uint64_t>>& blocks, const TensorFile& file) {
  FileSum sum{file.header.file_bytes(), {}};
  for (const auto& block : blocks) {
    if (!block)
      fail(ErrorCode::kCorrupt, "no rank has written block {} of '{}'", sum.blocks.size(), file.name);
    sum.blocks.push_back(*block);
  }
  return sum;
}

}  // namespace

SharedFolder find_shared_folder(comm::Communicator& communicator, const std::string& out,
                                const std::string& partial) {
  struct Probe {
    ~Probe() {
      if (!path.empty()) ::unlink(path.c_str());
    }
    std::string path;
  } probe;
  std::string name;  // below `out`; being random, it is found by those that see the same folder alone
  if (communicator.rank() == 0) {
    name = fs::path(partial).filename() / ("probe-" + random_name());
    probe.path = fs::path(out) / name;
    write_text_file(probe.path, "");
  }
  name = exchange(communicator, "a probe of the folder of checkpoints", name)[0];
  const fs::path path = fs::path(out) / name;
  std::string why_not;
  try {
    open_file(path, O_RDWR | O_NOFOLLOW);
  } catch (const Error& error) {
    why_not = error.what();
  }
  const std::vector<std::string> reasons =
      exchange(communicator, "who sees the folder of checkpoints", why_not);
  for (std::size_t rank = 0; rank < reasons.size(); ++rank)
    if (!reasons[rank].empty())
      return {path.parent_path(),
              fmt::format("rank {} cannot write the checkpoint in '{}' ({})", rank, out, reasons[rank])};
  return {path.parent_path(), ""};
}

SharedFiles::SharedFiles(PartitionOf partition, const Layout& layout, const std::vector<TensorFile>& files,
                         const std::vector<UnitId>& order, comm::Communicator* communicator)
    : partition_(std::move(partition)),
      layout_(layout),
      files_(files),
      order_(order),
      communicator_(communicator) {}

std::uint64_t SharedFiles::buffer_bytes(std::size_t files) {
  return files * (kHugePage + PartWriter::kSplitBytes);
}

// Regions are whole huge pages.
void SharedFiles::open(offload::IoService& io, allocator::Ledger& ledger, const std::string& folder,
                       std::size_t buffer_bytes) {
  std::vector<FileParts> parts;
  std::size_t left = buffer_bytes;
  for (const TensorFile& file : files_) {
    parts.push_back(parts_of(file));
    if (parts.back().any_split()) left -= std::min(left, PartWriter::kSplitBytes);
  }
  const std::size_t each = std::max<std::size_t>(kHugePage, left / files_.size() / kHugePage * kHugePage);
  const int rank = communicator_ == nullptr ? 0 : communicator_->rank();
  for (std::size_t i = 0; i < files_.size(); ++i)
    writers_.push_back(std::make_unique<PartWriter>(io, ledger, (fs::path(folder) / files_[i].name).string(),
                                                    std::move(parts[i]), rank,
                                                    mail_of(communicator_, files_[i].name), each));
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const std::string header = files_[i].header.bytes();
    writers_[i]->write(0, std::as_bytes(std::span(header)));
  }
}

// A unit's elements are consecutive in a file, without those of parameters that it does not have.
SharedFiles::Bytes SharedFiles::bytes_of(const TensorFile& file, UnitId unit, ElementRange range) const {
  const std::size_t grain = file.of == TensorFile::Of::kScales ? optim::kScaleBlock : 1;
  Bytes found;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const StoredTensor* const tensor = file.header.find(layout_.spec(p).name);
    const ElementRange all = elements_of(layout_, p), both = intersection(range, all);
    if (tensor == nullptr || both.size() == 0) continue;
    const std::uint64_t start = file.header.payload_offset() + tensor->begin;
    const std::size_t first = layout_.spec(p).span_first, size = size_of(*tensor->dtype());
    if (found.end == 0) found.begin = start + (first + both.begin - all.begin) / grain * size;
    found.end = start + divide_up(first + both.end - all.begin, grain) * size;
  }
  return found;
}

void SharedFiles::add_wholes(const TensorFile& file, UnitId unit, std::vector<FilePart>& parts) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const StoredTensor* const tensor = file.header.find(layout_.spec(p).name);
    if (tensor == nullptr || layout_.spec(p).continues()) continue;
    const std::uint64_t start = file.header.payload_offset();
    parts.push_back({start + tensor->begin, start + tensor->end,
                     partition_(unit).owner(layout_.location(p).offset).value_or(FilePart::kEvery)});
  }
}

FileParts SharedFiles::parts_of(const TensorFile& file) const {
  if (communicator_ == nullptr) return {{{0, file.header.file_bytes()}}, 1};
  std::vector<FilePart> parts = {{0, file.header.payload_offset()}};
  const auto add = [&](UnitId unit, ElementRange range, int rank) {
    const Bytes bytes = bytes_of(file, unit, range);
    parts.push_back({bytes.begin, bytes.end, rank});
  };
  for (const UnitId unit : order_) {
    const Partition partition = partition_(unit);
    const bool is_whole =
        partition.shards.empty() || (file.of == TensorFile::Of::kParameters && !partition.parameters);
    if (file.of == TensorFile::Of::kWholes)
      add_wholes(file, unit, parts);
    else if (is_whole)
      add(unit, {0, layout_.unit_elements(unit)}, partition.of_whole().value_or(FilePart::kEvery));
    else
      for (std::size_t i = 0; i < partition.shards.size(); ++i)
        add(unit, partition.shards[i], partition.rank(i));
  }
  return {parts, communicator_->size()};
}

bool SharedFiles::concerns(std::size_t file, UnitId unit, ElementRange range) const {
  const Bytes bytes = bytes_of(files_[file], unit, range);
  return writers_[file]->concerns(bytes.begin, bytes.end);
}

WantedElements SharedFiles::wanted(UnitId unit) const {
  WantedElements wanted;
  wanted.parameters = [this, unit](ElementRange range) { return concerns(0, unit, range); };
  wanted.state = [this, unit](ElementRange range) {
    for (std::size_t file = 1; file < files_.size(); ++file)
      if (files_[file].of != TensorFile::Of::kWholes && concerns(file, unit, range)) return true;
    return false;
  };
  return wanted;
}

void SharedFiles::put(std::size_t file, const StoredTensor& tensor, std::uint64_t first_byte,
                      std::span<const std::byte> bytes) {
  writers_[file]->write(files_[file].header.payload_offset() + tensor.begin + first_byte, bytes);
}

std::vector<FileSum> SharedFiles::finish() {
  std::vector<std::vector<BlockSum>> own;
  for (const auto& writer : writers_) own.push_back(writer->finish());
  for (const auto& writer : writers_) {
    if (communicator_ == nullptr) break;  // the commit makes the files durable
    communicator_->report_work();         // other ranks may have finished
    writer->sync();
  }
  std::vector<FileSum> sums;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    std::vector<std::optional<std::uint64_t>> blocks(divide_up(files_[i].header.file_bytes(), kStreamBlock));
    std::vector<std::string> all = {to_bytes(own[i])};
    if (communicator_ != nullptr)
      all = exchange(*communicator_, "the blocks of '" + files_[i].name + "'", all[0]);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      take_sums(all[rank], files_[i].name, static_cast<int>(rank), blocks);
    sums.push_back(merged(blocks, files_[i]));
  }
  return sums;
}

}  // namespace sluice::engine
