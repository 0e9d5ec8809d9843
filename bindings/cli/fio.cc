#include "bindings/cli/fio.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <vector>

#include "core/error.h"
#include "core/json.h"

namespace sluice::cli {
namespace {

constexpr int kNotFound = 127;  // as a shell says it

// Between fork and exec: nothing that takes memory or a lock.
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

// The exit status, and what the program wrote to its standard output.
int run(std::vector<std::string> words, std::string& out) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(ErrorCode::kIo, "no pipe can be made: {}", errno_text(errno));
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) become(argv.data(), ends[1], parent);
  ::close(ends[1]);
  if (child > 0) out = read_all(ends[0]);
  ::close(ends[0]);
  int status = 0;
  if (child < 0) fail(ErrorCode::kIo, "no process can be made: {}", errno_text(errno));
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::optional<double> rate(const std::string& path, std::uint64_t bytes, const offload::StreamShape& shape,
                           const std::string& direction, std::string* why) {
  std::string out;
  const int status = run(
      // Transparent huge pages for --mem=malloc.
      {"env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1", "fio", "--name=sluice", "--output-format=json",
       "--ioengine=io_uring", "--direct=1", "--mem=malloc", "--iomem_align=2M", "--overwrite=1",
       "--bs=" + std::to_string(shape.block), "--iodepth=" + std::to_string(shape.depth),
       "--size=" + std::to_string(bytes), "--rw=" + direction, "--filename=" + path},
      out);
  const std::size_t start = out.find('{');
  if (status == 0 && start != std::string::npos)
    return parse_json(std::string_view(out).substr(start), "fio")
        .at("jobs")
        .at(0)
        .at(direction)
        .at("bw_bytes")
        .get<double>();
  *why = status == kNotFound ? "fio is not installed, so nothing is compared with it (apt-get install fio)"
                             : fmt::format("fio failed with status {}", status);
  return std::nullopt;
}

}  // namespace

std::optional<offload::DiskRates> fio_rates(const std::string& path, std::uint64_t bytes,
                                            const offload::StreamShape& shape, std::string* why) {
  const auto write = rate(path, bytes, shape, "write", why);
  const auto read = write ? rate(path, bytes, shape, "read", why) : std::nullopt;
  if (!read) return std::nullopt;
  return offload::DiskRates{*read, *write};
}

}  // namespace sluice::cli
