#include "comm/nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.h"

namespace sluice::comm {
namespace {

using std::chrono::milliseconds;

// The declarations below are NCCL's binary interface, as versions 2.18 to 2.32 have it.
constexpr int kSuccess = 0, kInProgress = 7;
bool goes_on(int result) { return result == kSuccess || result == kInProgress; }
constexpr int kBytes = 1;  // the type of elements
struct UniqueId {
  std::array<char, 128> bytes;
};
// The settings that NCCL 2.18 has; later versions know what is missing by `version`.
struct Settings {
  std::size_t size = sizeof(Settings);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cluster_size = INT_MIN, least_blocks = INT_MIN, most_blocks = INT_MIN;  // INT_MIN: NCCL chooses
  const char* network = nullptr;
  int shares_when_split = INT_MIN;
};

constexpr milliseconds kPoll{1}, kWatch{20};
// How long ranks may take to join, and to end, before this one gives up.
constexpr std::chrono::seconds kMostForJoining{30}, kMostForEnding{10};
constexpr const char* kFinalize = "ncclCommFinalize";
constexpr const char* kTooLate = "is not done after";
constexpr const char* kName = "what joins GPUs by NCCL";

}  // namespace

#define SLUICE_NCCL_FUNCTIONS(X)                                                    \
  X(ncclGetVersion, int (*)(int*))                                                  \
  X(ncclGetUniqueId, int (*)(UniqueId*))                                            \
  X(ncclCommInitRankConfig, int (*)(ncclComm**, int, UniqueId, int, Settings*))     \
  X(ncclCommGetAsyncError, int (*)(ncclComm*, int*))                                \
  X(ncclCommFinalize, int (*)(ncclComm*))                                           \
  X(ncclCommDestroy, int (*)(ncclComm*))                                            \
  X(ncclCommAbort, int (*)(ncclComm*))                                              \
  X(ncclGroupStart, int (*)())                                                      \
  X(ncclGroupEnd, int (*)())                                                        \
  X(ncclSend, int (*)(const void*, std::size_t, int, int, ncclComm*, CUstream_st*)) \
  X(ncclRecv, int (*)(void*, std::size_t, int, int, ncclComm*, CUstream_st*))       \
  X(ncclGetErrorString, const char* (*)(int))                                       \
  X(ncclGetLastError, const char* (*)(ncclComm*))

struct NcclFunctions {
#define SLUICE_NCCL_MEMBER(name, type) std::type_identity_t<type> name = nullptr;
  SLUICE_NCCL_FUNCTIONS(SLUICE_NCCL_MEMBER)
#undef SLUICE_NCCL_MEMBER
  std::string path;
  int version = 0;
};

namespace {

std::string text_of(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// Throws Error(kNotFound) where there is no library, or none that can be used.
NcclFunctions load() {
  constexpr const char* kRemedy =
      "install NCCL 2.20 or later (it is part of PyTorch for CUDA), name its file in SLUICE_NCCL, or let "
      "ranks use host memory (links=\"host\")";
  NcclFunctions functions;
  const char* const other = std::getenv("SLUICE_NCCL");
  const bool is_named = other != nullptr && *other != '\0';
  functions.path = is_named ? other : "libnccl.so.2";
  void* library = is_named ? nullptr : dlopen(functions.path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(functions.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(ErrorCode::kNotFound, "NCCL cannot be loaded: {}; {}", dlerror(), kRemedy);
  const auto find = [&](auto& function, const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr)
      fail(ErrorCode::kNotFound, "{} has no function {}, so it is not NCCL {} or later; {}", functions.path,
           name, text_of(Nccl::kOldest), kRemedy);
    std::memcpy(static_cast<void*>(&function), &found, sizeof function);
  };
#define SLUICE_NCCL_FIND(name, type) find(functions.name, #name);
  SLUICE_NCCL_FUNCTIONS(SLUICE_NCCL_FIND)
#undef SLUICE_NCCL_FIND
  if (functions.ncclGetVersion(&functions.version) != kSuccess || functions.version < Nccl::kOldest)
    fail(ErrorCode::kNotFound, "{} is NCCL {}, and {} or later is needed; {}", functions.path,
         text_of(functions.version), text_of(Nccl::kOldest), kRemedy);
  return functions;
}

}  // namespace

NcclLibrary find_nccl() {
  const NcclFunctions functions = load();
  return {functions.path, text_of(functions.version)};
}

Nccl::Nccl(Communicator& communicator, Device& device, const NcclFunctions& functions)
    : communicator_(communicator),
      device_(device),
      functions_(std::make_unique<const NcclFunctions>(functions)) {}

std::unique_ptr<Nccl> Nccl::join(Communicator& communicator, std::uint64_t id, Device& device,
                                 const std::string& own_problem, std::string& problem) {
  // Tells the others a problem, after a '!', or else the other text. Returns all texts, or nothing where
  // there is a problem.
  const auto tell = [&](const std::string& own, const std::string& else_told) -> std::vector<std::string> {
    std::vector<std::string> all = communicator.exchange(id, kName, own.empty() ? else_told : "!" + own);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (!all[rank].starts_with('!')) continue;
      // A rank that only waited too long does not know why.
      const bool is_late = all[rank].find(kTooLate) != std::string::npos;
      if (problem.empty() || (problem.find(kTooLate) != std::string::npos && !is_late))
        problem = fmt::format("rank {}: {}", rank, all[rank].substr(1));
    }
    return problem.empty() ? all : std::vector<std::string>();
  };
  NcclFunctions functions;
  std::string own = own_problem, told;
  try {
    if (own.empty()) functions = load();
    UniqueId unique{};
    if (own.empty() && communicator.rank() == 0 && functions.ncclGetUniqueId(&unique) != kSuccess)
      own = fmt::format("ncclGetUniqueId fails: {}", functions.ncclGetLastError(nullptr));
    told = fmt::format("{} ", functions.version).append(unique.bytes.data(), unique.bytes.size());
  } catch (const Error& error) {
    own = error.what();
  }
  const std::vector<std::string> all = tell(own, told);
  if (all.empty()) return nullptr;
  const auto version_of = [](const std::string& text) { return std::stoi(text); };
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (version_of(all[rank]) != version_of(all[0])) {
      problem = fmt::format("rank {} has NCCL {}, and rank 0 has {}", rank, text_of(version_of(all[rank])),
                            text_of(version_of(all[0])));
      return nullptr;
    }
  std::unique_ptr<Nccl> joined(new Nccl(communicator, device, functions));
  if (tell(joined->begin(all[0].substr(all[0].find(' ') + 1)), {}).empty()) return nullptr;
  joined->is_joined_ = true;
  joined->watcher_ = std::thread([nccl = joined.get()] { nccl->watch(); });
  return joined;
}

// Returns why this rank cannot join; empty: it has joined.
std::string Nccl::begin(const std::string& unique_id) {
  try {
    UniqueId unique;
    ensure(unique_id.size() == unique.bytes.size(), "an id of NCCL has {} bytes", unique_id.size());
    std::ranges::copy(unique_id, unique.bytes.begin());
    const std::lock_guard lock(in_use_);
    device_.run_in_context([&] {
      Settings settings;
      expect(functions_->ncclCommInitRankConfig(&handle_, communicator_.size(), unique, communicator_.rank(),
                                                &settings),
             "ncclCommInitRankConfig");
      wait_until_ready("ncclCommInitRankConfig");
    });
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

Nccl::~Nccl() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  ends_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  if (!is_joined_ || !end()) abort();
}

// Returns whether it has ended, with what this rank has sent, which may still have been on its way.
bool Nccl::end() {
  if (handle_ == nullptr) return true;
  try {
    device_.run_in_context([&] {
      expect(functions_->ncclCommFinalize(handle_), kFinalize);
      wait_until_ready(kFinalize);
      expect(functions_->ncclCommDestroy(std::exchange(handle_, nullptr)), "ncclCommDestroy");
    });
  } catch (const Error&) {
    return false;
  }
  return true;
}

void Nccl::watch() {
  const auto ended = [this] {
    std::unique_lock lock(mutex_);
    return ends_.wait_for(lock, kWatch, [&] { return is_ending_; });
  };
  while (!ended()) {
    if (!communicator_.failure().empty()) return abort();
    const std::unique_lock lock(in_use_, std::try_to_lock);
    int result = kSuccess;
    if (!lock || functions_->ncclCommGetAsyncError(handle_, &result) != kSuccess) continue;
    if (!goes_on(result))
      communicator_.fail(fmt::format("NCCL: {}: {}", functions_->ncclGetErrorString(result),
                                     functions_->ncclGetLastError(handle_)));
  }
}

void Nccl::abort() {
  const std::lock_guard lock(in_use_);
  if (ncclComm* const handle = std::exchange(handle_, nullptr)) (void)functions_->ncclCommAbort(handle);
}

void Nccl::expect(int result, const char* call) const {
  if (goes_on(result)) return;
  fail(ErrorCode::kIo,
       "{} ({}): {}: {}: {}; let ranks use host memory (links=\"host\"), or see what NCCL "
       "says with NCCL_DEBUG=INFO",
       functions_->path, text_of(functions_->version), call, functions_->ncclGetErrorString(result),
       functions_->ncclGetLastError(handle_));
}

// Calls of NCCL return before they are done, so that a rank that is gone does not block this one for ever.
void Nccl::wait_until_ready(const char* call) const {
  const auto begin = std::chrono::steady_clock::now();
  const auto most = call == kFinalize ? kMostForEnding : kMostForJoining;
  for (int polls = 0;; ++polls) {
    int result = kSuccess;
    expect(functions_->ncclCommGetAsyncError(handle_, &result), "ncclCommGetAsyncError");
    expect(result, call);
    if (result != kInProgress) return;
    check();
    if (std::chrono::steady_clock::now() - begin > most)
      fail(ErrorCode::kIo, "{}: {} {} {} s", functions_->path, call, kTooLate, most.count());
    if (polls > 100) std::this_thread::sleep_for(kPoll);
  }
}

void Nccl::exchange(CUstream_st* stream, std::span<const Message> sent, std::span<const Message> received) {
  const std::lock_guard lock(in_use_);
  check();
  if (handle_ == nullptr) fail(ErrorCode::kState, "NCCL was aborted, since the run has failed");
  device_.run_in_context([&] {
    expect(functions_->ncclGroupStart(), "ncclGroupStart");
    int result = kSuccess;
    for (const Message& message : sent)
      if (message.bytes > 0 && goes_on(result))
        result = functions_->ncclSend(reinterpret_cast<const void*>(message.begin), message.bytes, kBytes,
                                      message.rank, handle_, stream);
    for (const Message& message : received)
      if (message.bytes > 0 && goes_on(result))
        result = functions_->ncclRecv(reinterpret_cast<void*>(message.begin), message.bytes, kBytes,
                                      message.rank, handle_, stream);
    const int ended = functions_->ncclGroupEnd();  // also after an error
    expect(result, "ncclSend or ncclRecv");
    expect(ended, "ncclGroupEnd");
    wait_until_ready("ncclGroupEnd");
  });
}

void Nccl::check() const {
  if (const std::string failure = communicator_.failure(); !failure.empty())
    fail(ErrorCode::kIo, "{}", failure);
}

}  // namespace sluice::comm
