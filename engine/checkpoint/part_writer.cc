#include "engine/checkpoint/part_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

PartWriter::PartWriter(offload::IoService& io, allocator::Ledger& ledger, const std::string& path,
                       FileParts parts, int rank, Mail mail, std::size_t write_bytes)
    : parts_(std::move(parts)), rank_(rank), mail_(std::move(mail)) {
  if (parts_.writes(rank)) file_ = io.open(path, offload::OpenMode::kReadWrite);
  const std::size_t written = file_ == nullptr ? 0 : write_bytes;
  buffer_ = allocator::Region(ledger, allocator::Purpose::kCheckpoint,
                              written + (parts_.any_split() ? kSplitBytes : 0));
  if (file_ != nullptr) behind_.emplace(*file_, buffer_.bytes().first(written));
  if (!parts_.any_split()) return;
  split_data_ = buffer_.data() + written;
  sent_data_ = split_data_ + kStreamBlock;
}

PartWriter::~PartWriter() = default;

void PartWriter::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const FilePart& part = parts_.at(offset);
    const std::uint64_t block = offset / kStreamBlock;
    const std::uint64_t end =
        std::min({part.end, (block + 1) * kStreamBlock, offset + static_cast<std::uint64_t>(bytes.size())});
    const auto piece = bytes.first(end - offset);
    const bool has = part.rank == rank_ || part.rank == FilePart::kEvery;
    if (has && parts_.writer(block) == rank_) {
      if (parts_.is_split(block))
        add_to_split(block, offset, piece);
      else
        append(offset, piece);
    } else if (part.rank == rank_) {
      send(part, offset, piece);
    }
    bytes = bytes.subspan(piece.size());
    offset = end;
  }
}

void PartWriter::add_to_split(std::uint64_t block, std::uint64_t offset, std::span<const std::byte> bytes) {
  if (!split_ || split_->block != block) begin_split(block);
  ensure(split_->position <= offset && bytes.size() <= split_->missing,
         "{} bytes at {} are given of block {}, which lacks {} from {} on", bytes.size(), offset, block,
         split_->missing, split_->position);
  std::memcpy(split_memory().data() + offset % kStreamBlock, bytes.data(), bytes.size());
  split_->position = offset + bytes.size();
  split_->missing -= bytes.size();
}

void PartWriter::begin_split(std::uint64_t block) {
  end_split();
  split_.emplace(block, block * kStreamBlock, 0, TransferGroup());
  for (const FilePart& part : parts_.of_block(block)) {
    const std::size_t bytes = part.end - part.begin;
    if (part.rank == rank_ || part.rank == FilePart::kEvery)
      split_->missing += bytes;
    else
      mail_.receive(part.rank, split_memory().subspan(part.begin % kStreamBlock, bytes),
                    split_->arriving.add());
  }
}

// The block is written out of order, since it becomes whole after the following blocks have begun.
void PartWriter::end_split() {
  if (!split_) return;
  ensure(split_->missing == 0, "block {} is written without {} of its bytes", split_->block, split_->missing);
  split_->arriving.wait();
  const std::uint64_t begin = split_->block * kStreamBlock;
  append(begin, split_memory().first(std::min<std::uint64_t>(kStreamBlock, parts_.bytes() - begin)));
  split_.reset();
}

// A part's bytes of one block are one message.
void PartWriter::send(const FilePart& part, std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::uint64_t block = offset / kStreamBlock;
  const std::uint64_t begin = std::max(part.begin, block * kStreamBlock);
  const std::uint64_t end = std::min(part.end, (block + 1) * kStreamBlock);
  if (offset == begin) sending_.wait();  // of the buffer's former contents
  std::memcpy(sent_data_ + (offset - begin), bytes.data(), bytes.size());
  if (offset + bytes.size() == end)
    mail_.send(parts_.writer(block), {sent_data_, end - begin}, sending_.add());
}

// The bytes stay in the processor's cache between the summing and the copying.
void PartWriter::append(std::uint64_t offset, std::span<const std::byte> bytes) {
  constexpr std::size_t kCached = 64 * kKiB;
  if (offset != position_) {
    ensure(offset % kStreamBlock == 0 && (position_ % kStreamBlock == 0 || position_ == parts_.bytes()),
           "bytes at {} of a file are given after those up to {}", offset, position_);
    behind_->go_to(offset);
    position_ = offset;
  }
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kCached));
    sum_.add(piece);
    behind_->add(piece);
    position_ += piece.size();
    bytes = bytes.subspan(piece.size());
  }
  if (position_ % kStreamBlock != 0 && position_ != parts_.bytes()) return;
  sums_.push_back({(position_ - 1) / kStreamBlock, sum_.value()});
  sum_ = Checksum();
}

std::vector<BlockSum> PartWriter::finish() {
  end_split();
  sending_.wait();
  if (behind_) behind_->finish();
  behind_.reset();
  buffer_ = {};
  std::uint64_t own = 0;
  for (std::uint64_t block = 0; block < parts_.blocks(); ++block)
    own += parts_.writer(block) == rank_ ? 1 : 0;
  ensure(sums_.size() == own, "rank {} has written {} blocks of its {}", rank_, sums_.size(), own);
  return std::move(sums_);
}

void PartWriter::sync() {
  if (file_ != nullptr) file_->sync();
}

}  // namespace sluice::engine
