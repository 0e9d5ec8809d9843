#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "engine/checkpoint/stream.h"
#include "offload/file.h"

// Files of tensors in the safetensors format: see docs/formats/safetensors.md.
namespace sluice::engine {

// A tensor that will be written.
struct TensorDeclaration {
  std::string name;
  Dtype type = Dtype::kF32;
  std::vector<std::uint64_t> shape;
};

// A tensor in a file.
struct StoredTensor {
  std::string name;
  std::string type;  // the format's name: "F32", "BF16", "I64", ...
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  // in bytes, from the start of the payload

  std::uint64_t bytes() const { return end - begin; }
  std::uint64_t elements() const;
  std::optional<Dtype> dtype() const;  // nullopt where Sluice does not compute with the type
};

class SafetensorsHeader {
 public:
  using Metadata = std::map<std::string, std::string>;
  static constexpr std::uint64_t kLimit = 100'000'000;  // bytes of the header's text
  static constexpr std::size_t kPrefix = 8;             // bytes before it

  // Returns the length of the header's text, which a file's first bytes state. Throws Error(kCorrupt) that
  // names the source where that length is not possible.
  static std::uint64_t text_bytes(std::span<const std::byte> file_start, std::uint64_t file_bytes,
                                  std::string_view source);
  // Parses the header's text of a file of `file_bytes` bytes, which errors call `source`. Throws
  // Error(kCorrupt) that names source and tensor for every violation of the format.
  static SafetensorsHeader parse(std::string_view text, std::uint64_t file_bytes, std::string_view source);

  // Makes the header of a new file with these tensors in this order. Throws Error(kInvalidArgument) for names
  // that are used twice, empty or reserved, and for a tensor that would not begin at a multiple of its
  // element's size.
  explicit SafetensorsHeader(const std::vector<TensorDeclaration>& tensors,
                             Metadata metadata = {{"format", "pt"}});

  std::string bytes() const;  // prefix, text and padding, with which a new file begins
  std::uint64_t payload_offset() const { return payload_offset_; }
  std::uint64_t payload_bytes() const { return tensors_.empty() ? 0 : tensors_.back().end; }
  std::uint64_t file_bytes() const { return payload_offset_ + payload_bytes(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of the payload
  const Metadata& metadata() const { return metadata_; }
  const StoredTensor* find(std::string_view name) const;  // null where there is none

 private:
  SafetensorsHeader() = default;
  void index();

  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
  Metadata metadata_;
  std::uint64_t payload_offset_ = 0;
};

// Reads the tensors of a file through a buffer that several readers may share. Thread rule: one thread at a
// time for all readers of one ReadAhead.
class SafetensorsReader {
 public:
  // With `expected`, every byte is verified before it is handed out. `io` and `ahead` outlive this. Throws
  // Error(kNotFound | kIo | kCorrupt).
  SafetensorsReader(offload::IoService& io, const std::string& path, ReadAhead& ahead,
                    std::optional<FileSum> expected = std::nullopt);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }
  const StoredTensor* find(std::string_view name) const { return header_.find(name); }
  // Throws Error(kNotFound) that names the file and the tensor with the nearest name.
  const StoredTensor& tensor(std::string_view name) const;
  // Reads any range of the tensor's bytes. Throws Error(kInvalidArgument) where the range passes the tensor's
  // end.
  void read(const StoredTensor& tensor, std::uint64_t first_byte, std::span<std::byte> out);

 private:
  SafetensorsHeader read_header();

  ReadAhead& ahead_;
  BlockFile file_;
  SafetensorsHeader header_;
};

// Reads a folder as Hugging Face lays it out: model.safetensors, or an index and the files that it names. Or
// one file of any name. Thread rule: as SafetensorsReader.
class SafetensorsFolder {
 public:
  // Reads every header. Throws Error(kNotFound) where the folder holds neither, or a file of the index does
  // not exist; Error(kCorrupt) where the index names a file outside the folder, or a tensor that its file
  // does not hold.
  SafetensorsFolder(offload::IoService& io, const std::string& path, ReadAhead& ahead);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;  // sorted
  const StoredTensor* find(std::string_view name) const;
  // These throw Error(kNotFound) with the nearest name. file_of() returns the tensor's file.
  const StoredTensor& tensor(std::string_view name) const;
  SafetensorsReader& file_of(std::string_view name) const;
  void read(std::string_view name, std::uint64_t first_byte, std::span<std::byte> out);

 private:
  struct FileTensor {
    SafetensorsReader* file;
    const StoredTensor* tensor;
  };
  void open_index(offload::IoService& io, ReadAhead& ahead, const std::string& index);
  const FileTensor& at(std::string_view name) const;

  std::string path_;
  std::map<std::string, std::unique_ptr<SafetensorsReader>> files_;
  std::map<std::string, FileTensor, std::less<>> tensors_;
};

// Whether a name that was read from a file may name a file in the same folder: it has no separators, and is
// not hidden.
bool is_plain_file_name(std::string_view name);

}  // namespace sluice::engine
