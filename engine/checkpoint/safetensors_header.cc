#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "engine/checkpoint/safetensors.h"

namespace sluice::engine {
namespace {

constexpr std::string_view kMetadata = "__metadata__";

// The types of the format, with the bits of an element, and the type by which Sluice computes with it, if it
// does.
struct Type {
  std::string_view name;
  unsigned bits = 0;  // 0: the format does not know the name
  std::optional<Dtype> type = std::nullopt;
};
constexpr Type kTypes[] = {
    {"F32", 32, Dtype::kF32},
    {"BF16", 16, Dtype::kBf16},
    {"F16", 16, Dtype::kF16},
    {"I32", 32, Dtype::kI32},
    {"U16", 16, Dtype::kU16},
    {"U8", 8, Dtype::kU8},
    {"F64", 64},
    {"F8_E4M3", 8},
    {"F8_E5M2", 8},
    {"F8_E8M0", 8},
    {"F6_E2M3", 6},
    {"F6_E3M2", 6},
    {"F4", 4},
    {"C64", 64},
    {"I64", 64},
    {"I16", 16},
    {"I8", 8},
    {"U64", 64},
    {"U32", 32},
    {"BOOL", 8},
};

Type type_of(std::string_view name) {
  const auto* const found = std::ranges::find(kTypes, name, &Type::name);
  return found == std::end(kTypes) ? Type() : *found;
}

struct Entry {
  StoredTensor tensor;
  std::vector<std::uint64_t> offsets;
  bool has_type = false, has_shape = false, has_offsets = false;
};

// Builds entries while the text is parsed, so that no text, however nested, takes more memory than a small
// multiple of its length.
class Handler : public nlohmann::json_sax<Json> {
 public:
  explicit Handler(std::string_view source) : source_(source) {}

  std::vector<Entry> entries;
  SafetensorsHeader::Metadata metadata;

  bool start_object(std::size_t) override {
    if (level_ == Level::kOutside)
      level_ = Level::kRoot;
    else if (level_ == Level::kValue && name_ == kMetadata)
      level_ = Level::kMap;
    else if (level_ == Level::kValue)
      level_ = Level::kTensor;
    else
      refuse("an object");
    return true;
  }

  bool end_object() override {
    level_ = level_ == Level::kRoot ? Level::kDone : Level::kRoot;
    return true;
  }

  bool key(std::string& name) override {
    if (level_ == Level::kRoot) {
      name_ = name;
      if (name != kMetadata)
        entries.emplace_back().tensor.name = name;
      else if (std::exchange(has_metadata_, true))
        corrupt(fmt::format("'{}' is there twice", name));
      level_ = Level::kValue;
    } else if (level_ == Level::kMap) {
      field_ = name;
      if (!metadata.try_emplace(name).second)
        corrupt(fmt::format("'{}' is there twice in '{}'", name, name_));
    } else {
      field_ = name;
      Entry& entry = entries.back();
      bool* const seen = field_flag(entry);
      if (seen == nullptr) corrupt(fmt::format("unknown field '{}' of tensor '{}'", name, name_));
      if (std::exchange(*seen, true))
        corrupt(fmt::format("field '{}' is there twice in tensor '{}'", name, name_));
    }
    return true;
  }

  bool string(std::string& text) override {
    if (level_ == Level::kMap)
      metadata[field_] = text;
    else if (level_ == Level::kTensor && field_ == "dtype")
      entries.back().tensor.type = text;
    else
      refuse("a string");
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (level_ != Level::kArray) refuse("a number");
    auto& into = field_ == "shape" ? entries.back().tensor.shape : entries.back().offsets;
    into.push_back(value);
    return true;
  }

  bool start_array(std::size_t) override {
    if (level_ != Level::kTensor || field_ == "dtype") refuse("an array");
    level_ = Level::kArray;
    return true;
  }

  bool end_array() override {
    level_ = Level::kTensor;
    return true;
  }

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("a truth value"); }
  bool number_integer(std::int64_t) override { refuse("a negative number"); }
  bool number_float(double, const std::string& text) override { refuse("the number " + text); }
  bool binary(Json::binary_t&) override { refuse("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // The message ends with a part of the text, which may be anything.
    const std::string_view reason(error.what());
    fail(ErrorCode::kCorrupt, "'{}' has a header that is not valid JSON at byte {}: {}", source_, position,
         reason.substr(0, reason.find("; last read")));
  }

 private:
  enum class Level { kOutside, kRoot, kValue, kMap, kTensor, kArray, kDone };

  bool* field_flag(Entry& entry) const {
    if (field_ == "dtype") return &entry.has_type;
    if (field_ == "shape") return &entry.has_shape;
    if (field_ == "data_offsets") return &entry.has_offsets;
    return nullptr;
  }

  [[noreturn]] void corrupt(const std::string& what) {
    fail(ErrorCode::kCorrupt, "'{}' has a corrupt header: {}", source_, what);
  }

  [[noreturn]] void refuse(const std::string& found) {
    const bool in_field = level_ == Level::kMap || level_ == Level::kTensor || level_ == Level::kArray;
    corrupt(in_field ? fmt::format("field '{}' of '{}' holds {}", field_, name_, found)
                     : fmt::format("'{}' is {}", name_, found));
  }

  std::string source_;
  Level level_ = Level::kOutside;
  bool has_metadata_ = false;
  std::string name_;   // the current tensor's, or kMetadata
  std::string field_;  // the current one of the tensor
};

// Returns false where the product does not fit in 64 bits.
bool bits_of(const StoredTensor& tensor, std::uint64_t* bits) {
  *bits = type_of(tensor.type).bits;
  for (const std::uint64_t n : tensor.shape)
    if (__builtin_mul_overflow(*bits, n, bits)) return false;
  return true;
}

StoredTensor checked(Entry&& entry, std::string_view source) {
  StoredTensor& tensor = entry.tensor;
  const auto corrupt = [&](const std::string& what) {
    fail(ErrorCode::kCorrupt, "'{}' has a corrupt header: tensor '{}' {}", source, tensor.name, what);
  };
  if (!entry.has_type) corrupt("has no 'dtype'");
  if (!entry.has_shape) corrupt("has no 'shape'");
  if (!entry.has_offsets) corrupt("has no 'data_offsets'");
  if (type_of(tensor.type).bits == 0) corrupt(fmt::format("has the unknown dtype '{}'", tensor.type));
  if (entry.offsets.size() != 2)
    corrupt(fmt::format("has {} data_offsets instead of 2", entry.offsets.size()));
  tensor.begin = entry.offsets[0];
  tensor.end = entry.offsets[1];
  if (tensor.end < tensor.begin)
    corrupt(fmt::format("ends at {}, before its begin {}", tensor.end, tensor.begin));
  std::uint64_t bits = 0;
  if (!bits_of(tensor, &bits)) corrupt("has a shape that does not fit in 64 bits");
  if (bits % 8 != 0 || bits / 8 != tensor.bytes())
    corrupt(fmt::format("has {} bytes by its offsets, and {} bits by its shape and dtype {}", tensor.bytes(),
                        bits, tensor.type));
  return std::move(tensor);
}

// Checks that each tensor begins where the one before ends, and that the last one ends with the payload.
void check_cover(const std::vector<StoredTensor>& tensors, std::uint64_t payload, std::string_view source) {
  std::uint64_t end = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != end)
      fail(ErrorCode::kCorrupt,
           "'{}' has a corrupt header: tensor '{}' begins at {}, {} the end {} of the one before", source,
           tensor.name, tensor.begin, tensor.begin < end ? "before" : "with a hole after", end);
    end = tensor.end;
    if (end > payload)
      fail(ErrorCode::kCorrupt, "'{}' is cut short: tensor '{}' ends at byte {} of a payload of {}", source,
           tensor.name, end, payload);
  }
  if (end != payload)
    fail(ErrorCode::kCorrupt, "'{}' has {} bytes after its last tensor that belong to none", source,
         payload - end);
}

}  // namespace

std::uint64_t StoredTensor::elements() const {
  std::uint64_t product = 1;
  for (const std::uint64_t n : shape) product *= n;
  return product;
}

std::optional<Dtype> StoredTensor::dtype() const { return type_of(type).type; }

std::uint64_t SafetensorsHeader::text_bytes(std::span<const std::byte> file_start, std::uint64_t file_bytes,
                                            std::string_view source) {
  if (file_start.size() < kPrefix || file_bytes < kPrefix)
    fail(ErrorCode::kCorrupt, "'{}' has {} bytes, and a safetensors file has at least {}", source, file_bytes,
         kPrefix);
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, file_start.data(), kPrefix);
  if (bytes > kLimit)
    fail(ErrorCode::kCorrupt,
         "'{}' is no safetensors file, or its header is corrupt: it states a header of {} bytes, "
         "and at most {} are allowed",
         source, bytes, kLimit);
  if (bytes > file_bytes - kPrefix)
    fail(ErrorCode::kCorrupt, "'{}' states a header of {} bytes, which is longer than the file with its {}",
         source, bytes, file_bytes);
  return bytes;
}

SafetensorsHeader SafetensorsHeader::parse(std::string_view text, std::uint64_t file_bytes,
                                           std::string_view source) {
  if (text.empty() || text.front() != '{')
    fail(ErrorCode::kCorrupt, "'{}' has a header that does not begin with '{{'", source);
  if (text.find('\0') != std::string_view::npos)  // the JSON library would take it for the end
    fail(ErrorCode::kCorrupt, "'{}' has a header with a zero byte in its text", source);
  Handler handler(source);
  Json::sax_parse(text.begin(), text.end(), &handler);
  SafetensorsHeader header;
  header.metadata_ = std::move(handler.metadata);
  header.payload_offset_ = kPrefix + text.size();
  for (Entry& entry : handler.entries) header.tensors_.push_back(checked(std::move(entry), source));
  std::sort(header.tensors_.begin(), header.tensors_.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_cover(header.tensors_, file_bytes - header.payload_offset_, source);
  header.index();
  if (header.by_name_.size() == header.tensors_.size()) return header;
  std::set<std::string_view> seen;
  for (const StoredTensor& tensor : header.tensors_)
    if (!seen.insert(tensor.name).second)
      fail(ErrorCode::kCorrupt, "'{}' has a corrupt header: tensor '{}' is there twice", source, tensor.name);
  return header;
}

SafetensorsHeader::SafetensorsHeader(const std::vector<TensorDeclaration>& tensors, Metadata metadata)
    : metadata_(std::move(metadata)) {
  const auto refuse = [](const std::string& name, const std::string& why) {
    fail(ErrorCode::kInvalidArgument, "tensor '{}' cannot be written to a safetensors file: {}", name, why);
  };
  for (const TensorDeclaration& declared : tensors) {
    if (declared.name.empty() || declared.name == kMetadata)
      refuse(declared.name, "its name is empty or reserved");
    const auto* const type = std::ranges::find(kTypes, std::optional(declared.type), &Type::type);
    ensure(type != std::end(kTypes), "the type {} has no name in safetensors", name_of(declared.type));
    StoredTensor tensor{declared.name, std::string(type->name), declared.shape, payload_bytes(), 0};
    std::uint64_t bits = 0;
    if (!bits_of(tensor, &bits)) refuse(tensor.name, "its shape does not fit in 64 bits");
    if (__builtin_add_overflow(tensor.begin, bits / 8, &tensor.end))
      refuse(tensor.name, "the file would be too long");
    if (tensor.begin % size_of(declared.type) != 0)
      refuse(tensor.name,
             fmt::format("it would begin at byte {}, which is no multiple of its element's {} bytes; "
                         "declare wider types first",
                         tensor.begin, size_of(declared.type)));
    if (!by_name_.try_emplace(tensor.name, tensors_.size()).second)
      refuse(tensor.name, "it is declared twice");
    tensors_.push_back(std::move(tensor));
  }
  payload_offset_ = bytes().size();
}

std::string SafetensorsHeader::bytes() const {
  const auto quoted = [](const std::string& text) {
    try {
      return Json(text).dump();
    } catch (const Json::exception&) {
      fail(ErrorCode::kInvalidArgument, "'{}' cannot stand in a safetensors header: it is not UTF-8", text);
    }
  };
  std::string text = "{";
  const auto separate = [&] { return text.size() > 1 ? "," : ""; };
  if (!metadata_.empty()) {
    std::string fields;
    for (const auto& [key, value] : metadata_)
      fields += fmt::format("{}{}:{}", fields.empty() ? "" : ",", quoted(key), quoted(value));
    text += fmt::format("\"{}\":{{{}}}", kMetadata, fields);
  }
  for (const StoredTensor& tensor : tensors_)
    text +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", separate(),
                    quoted(tensor.name), tensor.type, Json(tensor.shape).dump(), tensor.begin, tensor.end);
  text += '}';
  text.resize(round_up(text.size(), 8), ' ');
  const std::uint64_t size = text.size();
  std::string prefix(kPrefix, '\0');
  std::memcpy(prefix.data(), &size, kPrefix);
  return prefix + text;
}

void SafetensorsHeader::index() {
  by_name_.clear();
  for (std::size_t i = 0; i < tensors_.size(); ++i) by_name_.try_emplace(tensors_[i].name, i);
}

const StoredTensor* SafetensorsHeader::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.front() != '.' && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

}  // namespace sluice::engine
