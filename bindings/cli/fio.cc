#include "bindings/cli/fio.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <numeric>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"

namespace sluice::cli {
namespace {

constexpr int kNotFound = 127;  // a shell's exit status for a missing program

// Runs between fork and exec, so it must neither allocate memory nor take a lock.
[[noreturn]] void become(char* const* argv, int out, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::dup2(out, STDOUT_FILENO);
  if (const int null = ::open("/dev/null", O_WRONLY); null >= 0) ::dup2(null, STDERR_FILENO);
  ::execvp(argv[0], argv);
  ::_exit(kNotFound);
}

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 4096> piece;
  for (;;) {
    const ssize_t count = ::read(descriptor, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(count));
  }
}

// Returns the exit status and the program's standard output.
int run(std::vector<std::string> words, std::string& out) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    fail(ErrorCode::kIo, "cannot make a pipe for fio: {}", errno_text(errno));
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) become(argv.data(), ends[1], parent);
  ::close(ends[1]);
  if (child > 0) out = read_all(ends[0]);
  ::close(ends[0]);
  int status = 0;
  if (child < 0) fail(ErrorCode::kIo, "cannot make a process for fio: {}", errno_text(errno));
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

constexpr std::uint64_t kTried[] = {8 * kMiB, 16 * kMiB, 32 * kMiB};  // bytes in flight
constexpr std::size_t kTriedBlocks[] = {256 * kKiB, 512 * kKiB, kMiB, 4 * kMiB};
constexpr std::uint64_t kTriedBytes = 256 * kMiB;
constexpr std::size_t kFinalists = 3;

void add_job(std::vector<std::string>& words, const FioJob& job) {
  words.insert(words.end(),
               {"--name=sluice", "--stonewall", std::string("--rw=") + (job.writes ? "write" : "read"),
                "--bs=" + std::to_string(job.shape.block), "--iodepth=" + std::to_string(job.shape.depth)});
  if (job.registered) words.insert(words.end(), {"--fixedbufs=1", "--registerfiles=1"});
}

std::vector<FioJob> all_jobs() {
  std::vector<FioJob> jobs;
  for (const bool writes : {true, false})
    for (const std::size_t block : kTriedBlocks)
      for (const std::uint64_t bytes : kTried) jobs.push_back({writes, {block, bytes / block}});
  return jobs;
}

// Returns the best few jobs of each direction, with plain and with registered buffers.
std::vector<FioJob> finalists(const std::vector<FioJob>& jobs, const std::vector<double>& rates) {
  std::vector<std::size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, std::greater(), [&](std::size_t i) { return rates[i]; });
  std::vector<FioJob> best;
  for (const bool writes : {true, false})
    for (std::size_t taken = 0, i = 0; taken < kFinalists && i < order.size(); ++i) {
      FioJob job = jobs[order[i]];
      if (job.writes != writes) continue;
      best.push_back(job);
      job.registered = true;
      best.push_back(job);
      ++taken;
    }
  return best;
}

}  // namespace

std::string to_text(const FioJob& job) {
  return fmt::format("{} x {}{}", job.shape.depth, format_size(job.shape.block),
                     job.registered ? ", registered buffers" : "");
}

std::optional<std::vector<double>> fio_rates(const std::string& path, std::uint64_t bytes,
                                             std::span<const FioJob> jobs, std::string* why) {
  std::vector<std::string> words = {// --mem=malloc gets transparent huge pages.
                                    "env",
                                    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
                                    "fio",
                                    "--output-format=json",
                                    "--ioengine=io_uring",
                                    "--direct=1",
                                    "--thread=1",  // a forked process would outlive this one
                                    "--mem=malloc",
                                    "--iomem_align=2M",
                                    "--overwrite=1",
                                    "--runtime=2",
                                    "--size=" + std::to_string(bytes),
                                    "--filename=" + path};
  for (const FioJob& job : jobs) add_job(words, job);
  std::string out;
  const int status = run(std::move(words), out);
  const std::size_t start = out.find('{');
  if (status != 0 || start == std::string::npos) {
    *why = status == kNotFound ? "fio is not installed, so nothing is compared with it (apt-get install fio)"
                               : fmt::format("fio failed with status {}", status);
    return std::nullopt;
  }
  const Json found = parse_json(std::string_view(out).substr(start), "fio").at("jobs");
  if (found.size() < jobs.size()) {
    *why = fmt::format("fio reported {} of {} jobs", found.size(), jobs.size());
    return std::nullopt;
  }
  std::vector<double> rates;
  for (std::size_t i = 0; i < jobs.size(); ++i)
    rates.push_back(found.at(i).at(jobs[i].writes ? "write" : "read").at("bw_bytes").get<double>());
  return rates;
}

std::optional<FioBest> best_fio(const std::string& path, std::uint64_t bytes, std::string* why) {
  const std::uint64_t sample = std::min(bytes, kTriedBytes);
  const std::vector<FioJob> all = all_jobs();
  const auto first = fio_rates(path, sample, all, why);
  if (!first) return std::nullopt;
  const std::vector<FioJob> jobs = finalists(all, *first);
  const auto rates = fio_rates(path, sample, jobs, why);
  if (!rates) return std::nullopt;
  FioBest best;
  double write = 0, read = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    double& most = jobs[i].writes ? write : read;
    if ((*rates)[i] <= most) continue;
    most = (*rates)[i];
    (jobs[i].writes ? best.write : best.read) = jobs[i];
  }
  return best;
}

}  // namespace sluice::cli
