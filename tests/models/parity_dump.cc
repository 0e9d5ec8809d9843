// Runs a model on weights and tokens that tests/python/cli/test_parity.py wrote, and writes loss, gradients
// and logits back. Usage: parity_dump FOLDER, with config.json, run.json, tokens.bin, targets.bin and
// NAME.bin for every parameter.
#include <fmt/core.h>

#include <fstream>

#include "core/error.h"
#include "core/json.h"
#include "models/families/config.h"
#include "plain_run.h"

namespace {

using namespace sluice;
using namespace sluice::models;

template <class T>
std::vector<T> read_array(const std::string& path, std::size_t elements) {
  std::vector<T> values(elements);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(elements * sizeof(T)));
  if (!file || file.peek() != EOF)
    fail(ErrorCode::kInvalidArgument, "{}: expected {} elements", path, elements);
  return values;
}

template <class T>
void write_array(const std::string& path, std::span<const T> values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size_bytes()));
  if (!file) fail(ErrorCode::kIo, "{} cannot be written", path);
}

void run(const std::string& folder) {
  const ModelConfig config = resolve_model(folder);
  const Json settings = read_json_file(folder + "/run.json");
  const auto number = [&](const char* key) { return json_field<std::size_t>(settings, key, "run.json"); };
  const std::size_t batch = number("batch"), length = number("length"), count = number("micro_batches");
  const auto recompute = json_field<std::string>(settings, "recompute", "run.json");
  const Dtype dtype = *dtype_from_name(json_field<std::string>(settings, "dtype", "run.json"));
  const auto scale = json_field<float>(settings, "loss_scale", "run.json");
  const Model model(config, dtype, batch, length, recompute);
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  models::testing::PlainRun plain(model, recompute, number("group"), count, threads, *library);
  for (std::size_t i = 0; i < plain.source.parameters(); ++i) {
    const auto values =
        read_array<float>(folder + "/" + plain.source.spec(i).name + ".bin", plain.source.elements(i));
    for (std::size_t element = 0; element < values.size(); ++element)
      plain.source.set(i, element, values[element]);
  }
  const std::size_t rows = batch * length;
  const auto tokens = read_array<std::int32_t>(folder + "/tokens.bin", rows * count);
  const auto targets = read_array<std::int32_t>(folder + "/targets.bin", rows * count);
  std::vector<MicroBatch> micro_batches;
  for (std::size_t i = 0; i < count; ++i) {
    micro_batches.push_back(
        {std::span(tokens).subspan(i * rows, rows), std::span(targets).subspan(i * rows, rows), i * batch});
  }
  const double loss = plain.train(micro_batches, 1, 1, scale);
  write_array<double>(folder + "/loss.bin", {&loss, 1});
  for (std::size_t i = 0; i < plain.source.parameters(); ++i) {
    std::vector<float> gradient = plain.source.gradient_of(i);
    for (float& value : gradient) value /= scale;
    write_array<float>(folder + "/" + plain.source.spec(i).name + ".grad.bin", gradient);
  }
  std::vector<float> logits(config.vocabulary);
  plain.executor.next_logits(std::span(tokens).first(length - 1), logits);
  write_array<float>(folder + "/logits.bin", logits);
  if (!plain.guards_hold()) fail(ErrorCode::kInternal, "something was written outside of the planned memory");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: parity_dump FOLDER\n");
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
