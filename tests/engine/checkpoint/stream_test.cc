#include "engine/checkpoint/stream.h"

#include <array>

#include "tests/engine/checkpoint/support.h"

namespace sluice::engine {
namespace stream_test {

class StreamTest : public FilesTest {};

constexpr std::size_t kFiles = 3, kBlocks = 4;

// Reads as loading a checkpoint does: parts of all files in turn, of lengths that do not fit the blocks.
void read_in_turn(std::array<std::unique_ptr<BlockFile>, kFiles>& files, ReadAhead& ahead,
                  std::array<std::string, kFiles>& found) {
  constexpr std::size_t kPiece = 300'000;
  for (std::size_t at = 0; at < files[0]->size(); at += kPiece)
    for (std::size_t i = 0; i < kFiles; ++i) {
      const std::size_t count = std::min<std::size_t>(kPiece, files[i]->size() - at);
      ahead.read(*files[i], at, std::as_writable_bytes(std::span(found[i]).subspan(at, count)));
    }
}

TEST_F(StreamTest, FilesThatAreReadInTurnAreEachReadOnce) {
  std::array<std::string, kFiles> written, found;
  std::array<std::unique_ptr<BlockFile>, kFiles> files;
  for (std::size_t i = 0; i < kFiles; ++i) {
    written[i] = pattern(kBlocks * kStreamBlock - 1000, static_cast<std::uint32_t>(i));
    found[i].resize(written[i].size());
    const std::string path = folder_.path(std::to_string(i));
    write_all(path, written[i]);
    files[i] = std::make_unique<BlockFile>(io_, path, std::nullopt);
  }
  const allocator::Region buffer(ledger_, allocator::Purpose::kCheckpoint, 2 * kFiles * kStreamBlock);
  Threads threads(2);
  for (Threads* copying : {static_cast<Threads*>(nullptr), &threads}) {
    io_.reads.transfers = 0;
    for (std::string& bytes : found) bytes.assign(bytes.size(), '\0');
    ReadAhead ahead(buffer.bytes(), copying);
    read_in_turn(files, ahead, found);
    for (std::size_t i = 0; i < kFiles; ++i) EXPECT_TRUE(found[i] == written[i]) << "file " << i;
    EXPECT_EQ(io_.reads.transfers, static_cast<int>(kFiles * kBlocks));
  }
}

TEST_F(StreamTest, TheNextBlocksOfEachFileAreUnderWay) {
  io_.hold = std::chrono::milliseconds(20);
  std::array<std::string, kFiles> found;
  std::array<std::unique_ptr<BlockFile>, kFiles> files;
  for (std::size_t i = 0; i < kFiles; ++i) {
    const std::string path = folder_.path(std::to_string(i));
    write_all(path, pattern(kBlocks * kStreamBlock, static_cast<std::uint32_t>(i)));
    found[i].resize(kBlocks * kStreamBlock);
    files[i] = std::make_unique<BlockFile>(io_, path, std::nullopt);
  }
  const allocator::Region buffer(ledger_, allocator::Purpose::kCheckpoint, 2 * kFiles * kStreamBlock);
  ReadAhead ahead(buffer.bytes());
  read_in_turn(files, ahead, found);
  EXPECT_GE(io_.reads.most, static_cast<int>(kFiles));
}

}  // namespace stream_test
}  // namespace sluice::engine
