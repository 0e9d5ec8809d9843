#include "comm/mpi/plugin.h"

#include <dlfcn.h>
#include <mpi.h>
#include <signal.h>

#include <atomic>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "comm/mpi/links.h"
#include "core/error.h"
#include "core/log.h"

namespace sluice::comm {
namespace {

// Restores signal handlers. Open MPI installs handlers for faults, which print a stack and would replace the
// engine's, which serves page faults on absent units.
class SignalHandlers {
 public:
  SignalHandlers() {
    for (int number = 1; number < SIGRTMIN; ++number) {
      struct sigaction action = {};
      if (::sigaction(number, nullptr, &action) == 0) before_.emplace_back(number, action);
    }
  }
  ~SignalHandlers() {
    for (const auto& [number, action] : before_)
      if (number != SIGKILL && number != SIGSTOP) ::sigaction(number, &action, nullptr);
  }
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  std::vector<std::pair<int, struct sigaction>> before_;
};

// Disables what Open MPI must not do in this process; variables that a user has set are kept.
void set_defaults() {
  // Open MPI would patch munmap and mremap, which the engine depends on, to notice that registered memory
  // goes.
  ::setenv("OMPI_MCA_memory", "^patcher", 0);
  ::setenv("UCX_MEM_EVENTS", "no", 0);
  // Most containers forbid reading another process's memory, and Open MPI would warn each time.
  ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
}

// Whether Open MPI 4 has noticed that a connection ended unexpectedly.
std::atomic<bool> has_missed_a_rank{false};

using Help = int (*)(const char* file, const char* topic, int header, ...);
char* (*help_text)(const char* file, const char* topic, bool header, va_list arguments) = nullptr;

// Open MPI passes a bool, of which only the low byte counts. va_start() needs a parameter of a wider type.
int tell(const char* file, const char* topic, int header, ...) {
  const std::string about = topic == nullptr ? "" : topic;
  va_list arguments;
  va_start(arguments, header);
  char* const text = help_text(file, topic, (header & 0xff) != 0, arguments);
  va_end(arguments);
  const std::string message = text == nullptr ? about : text;
  std::free(text);  // NOLINT: it is from malloc
  if (about == "peer hung up" || about == "client connect fail") {
    has_missed_a_rank = true;
    log().debug("Open MPI:\n{}", message);
  } else {
    log().warn("Open MPI:\n{}", message);
  }
  return 0;
}

// Open MPI 4 sends its messages to mpirun and waits for a reply, which does not come once mpirun is ending
// the job: a rank that had sent to a dead rank waited until it was killed itself. So these messages are
// written here instead. They also are the only notice of a rank's death. The function is an internal variable
// of Open MPI; other versions, whose library has another name, are left alone.
void take_over_messages() {
  void* const library = dlopen("libopen-pal.so.40", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return;
  void* const help = dlsym(library, "opal_show_help");
  void* const text = dlsym(library, "opal_show_help_vstring");
  if (help == nullptr || text == nullptr) return;
  std::memcpy(&help_text, &text, sizeof help_text);
  *static_cast<Help*>(help) = tell;
}

class Job final : public Mpi {
 public:
  Job() {
    static std::atomic<bool> has_begun{false};
    int begun = 0;
    check_mpi(MPI_Initialized(&begun), "MPI_Initialized");
    if (begun != 0 || has_begun.exchange(true))
      fail(ErrorCode::kState, "MPI was begun in this process before, and can begin only once");
    set_defaults();
    const SignalHandlers kept;
    // One thread makes the links and another one uses them, but never at the same time. MPI_THREAD_MULTIPLE
    // would lock in each call for nothing.
    int provided = MPI_THREAD_SINGLE;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    if (provided < MPI_THREAD_SERIALIZED)
      fail(ErrorCode::kNotFound, "this MPI allows calls of one thread alone; a build with threads is needed");
    take_over_messages();
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  }
  ~Job() override {
    if (trouble_.empty()) {
      MPI_Finalize();
      return;
    }
    log().warn("this process ends without MPI_Finalize, which might never return: {}", trouble_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::unique_ptr<Links> make_links(const Settings& settings) override {
    trouble_ = "its links were not made";
    MPI_Comm own = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &own), "MPI_Comm_dup");
    check_mpi(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    auto links = std::make_unique<MpiLinks>(own, settings, has_missed_a_rank, trouble_);
    trouble_.clear();
    return links;
  }

 private:
  int rank_ = 0, size_ = 0;
  std::string trouble_;  // why MPI cannot be finalized
};

}  // namespace
}  // namespace sluice::comm

extern "C" __attribute__((visibility("default"))) const sluice::comm::MpiPlugin* sluice_mpi_plugin() {
  static const sluice::comm::MpiPlugin plugin{sluice::comm::kMpiPluginAbi,
                                              []() -> sluice::comm::Mpi* { return new sluice::comm::Job; }};
  return &plugin;
}
