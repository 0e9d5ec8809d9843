#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/descriptor.h"
#include "core/error.h"
#include "core/json.h"
#include "engine/checkpoint/safetensors.h"

// Checkpoint folders: see docs/formats/checkpoint.md. A checkpoint is whole or absent.
namespace sluice::engine {

inline constexpr int kCheckpointVersion = 2;

// The names of a checkpoint's files.
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kManifestFile = "manifest.json";
std::string optimizer_file(std::string_view state);  // "optimizer.exp_avg.safetensors"
// "optimizer.exp_avg.scales.safetensors", for an array of codes.
std::string scales_file(std::string_view state);
bool is_scales_file(std::string_view name);

// Keeps two runs from using one folder, as long as it lives. It is a flock, which ends with the process, and
// leaves nothing behind: its file is removed with it, and so are folders that it made, if still empty.
class RunLock {
 public:
  // Makes the folder where it does not exist. Throws Error(kInvalidArgument) that names the other process,
  // Error(kIo).
  explicit RunLock(const std::string& out);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  bool try_lock();
  void release();

  std::string out_, path_;
  std::vector<std::string> made_;  // the folders that it made, innermost first
  Descriptor file_;
};

// A file of the caller's: its bytes, in consecutive pieces; or a copy of another file, which is in no
// manifest, so that users may change it.
struct OwnFile {
  std::string name;
  std::vector<std::span<const std::byte>> pieces;
  std::string copied_from = "";  // a path; empty: the pieces are given

  std::uint64_t bytes() const;
};

struct CheckpointFile {
  std::string name;
  FileSum sum;
};

struct Manifest {
  std::uint64_t step = 0;
  std::vector<CheckpointFile> files;
  Json run = Json::object();

  std::string to_text() const;  // Throws Error(kInvalidArgument) for text in `run` that is not UTF-8
  // Throws Error(kCorrupt) that names the source, Error(kInvalidArgument) for another version.
  static Manifest parse(const std::string& text, std::string_view source);
};

// The space that a checkpoint with files of these lengths takes, its manifest included.
std::uint64_t bytes_needed(std::span<const std::uint64_t> file_bytes);
// Throws Error(kBudget) where this process may not write files of such lengths (RLIMIT_FSIZE).
void check_file_limit(std::span<const std::uint64_t> file_bytes);
// Throws Error(kBudget) that says what is needed, what is free and what to do. `folder` need not exist yet.
void check_room(const std::string& folder, std::uint64_t bytes);

// Writes one checkpoint. Without commit() it leaves nothing behind. Thread rule: one thread at a time.
class CheckpointWriter {
 public:
  struct Options {
    std::string out;
    std::uint64_t step = 0;
    std::uint64_t bytes = 0;  // bytes_needed(), which is compared with the free space
  };
  // `io` outlives this, and the PartWriters of its files do not. Throws Error(kBudget | kIo).
  CheckpointWriter(offload::IoService& io, Options options);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Throws Error(kIo | kNotFound), also for a file that cannot be read, and Error(kInvalidArgument) for a
  // name that is taken or not plain.
  void add_file(const OwnFile& file);
  // The folder of the files until commit().
  const std::string& partial() const { return partial_; }
  // Makes a file of so many bytes that PartWriters write, and allocates it on the disk. Before commit(),
  // finish_tensor_file() is given its sum, once they have written it all. Throws as add_file().
  void add_tensor_file(const std::string& name, std::uint64_t bytes);
  void finish_tensor_file(const std::string& name, FileSum sum);
  // Finishes the files, writes the manifest, and renames the checkpoint to its place, durably; replaces one
  // of the same step. Returns the checkpoint's folder. Must not be called again, even after an exception.
  std::string commit(const Json& run);

 private:
  struct Entry {
    std::string name;
    FileSum sum;
    bool is_finished = true;
    std::unique_ptr<offload::File> tensors;  // of a tensor file, which commit() makes durable
  };
  std::string begin_file(const std::string& name);

  offload::IoService& io_;
  Options options_;
  std::string partial_;
  Descriptor lock_;
  std::vector<Entry> files_;
  bool committed_ = false;
};

// Reads one checkpoint. Thread rule: one thread at a time for all readers that use one ReadAhead.
class CheckpointReader {
 public:
  // Checks the manifest, and the length of each file. `io` and `ahead` outlive this. Throws Error(kNotFound |
  // kIo | kCorrupt | kInvalidArgument).
  CheckpointReader(offload::IoService& io, const std::string& folder, ReadAhead& ahead);

  const std::string& path() const { return folder_; }
  std::uint64_t step() const { return manifest_.step; }
  const Json& run() const { return manifest_.run; }
  const std::vector<CheckpointFile>& files() const { return manifest_.files; }
  bool has(std::string_view name) const { return find(name) != nullptr; }

  // Every byte is verified before it is handed out. Throws Error(kNotFound | kCorrupt | kIo).
  std::unique_ptr<SafetensorsReader> open_tensors(std::string_view name) const;
  // Verifies a whole file. Returns its path; nullopt where there is no such file.
  std::optional<std::string> verified(std::string_view name) const;
  // Reads and verifies every byte. Throws Error(kCorrupt) that names the first damaged file and offset.
  void verify() const;

 private:
  const CheckpointFile* find(std::string_view name) const;
  const CheckpointFile& file(std::string_view name) const;
  std::string path_of(const CheckpointFile& file) const;
  void verify(const CheckpointFile& file) const;

  offload::IoService& io_;
  ReadAhead& ahead_;
  std::string folder_;
  Manifest manifest_;
};

struct CheckpointList {
  struct Whole {
    std::uint64_t step;
    std::string path;
    Json run;  // from its manifest
  };
  struct Broken {
    std::string path;
    std::string reason;
  };
  std::vector<Whole> whole;    // by step
  std::vector<Broken> broken;  // folders that are named like a checkpoint and are not valid ones
};
// Checks manifests and lengths, not contents. A folder that does not exist has no checkpoint.
CheckpointList list_checkpoints(const std::string& out);

// Returns the newest whole checkpoint in a folder, by list_checkpoints(); nothing where the folder has none,
// whole or broken. A warning names each broken one, and what is taken instead of a newer one. Throws
// Error(kCorrupt) where all are broken.
std::optional<std::string> newest_checkpoint(const std::string& out);

// Throws Error(kCorrupt) that says what is damaged in a checkpoint and, where a whole one is older, its
// folder.
[[noreturn]] void fail_damaged(const Error& damage, const std::string& folder);

// Removes what killed runs left half written or half deleted, and nothing that a live run uses. Returns the
// names of the removed folders.
std::vector<std::string> remove_leftovers(const std::string& out);

// Deletes all whole checkpoints but the newest `keep` and that of the step `spared`. A kill leaves no
// checkpoint half deleted. Returns the deleted folders. Throws Error(kInvalidArgument) where keep is 0,
// Error(kIo).
std::vector<std::string> prune(const std::string& out, std::size_t keep,
                               std::optional<std::uint64_t> spared = std::nullopt);

}  // namespace sluice::engine
