#include "comm/descriptors.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

constexpr std::chrono::seconds kLongest(30);  // to receive; each rank sends its own before it waits

[[noreturn]] void fail_descriptors(const char* what) {
  fail(ErrorCode::kIo, "{}: {}", what, errno_text(errno));
}

// Any process may send to a socket, so a message begins with the secret that its sender has told by the
// communicator.
struct Message {
  std::uint64_t secret = 0;
  int rank = 0;
};

class Socket {
 public:
  Socket() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    // Binding without a name gives the socket a unique abstract one.
    if (socket_.get() < 0 ||
        ::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address.sun_family) != 0)
      fail_descriptors("socket");
    const timeval limit{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  std::string name() const {
    sockaddr_un address{};
    socklen_t length = sizeof address;
    if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
      fail_descriptors("getsockname");
    return {reinterpret_cast<const char*>(&address), length};
  }

  // Returns false where the receiver has no room now.
  bool send(const std::string& to, const Message& message, int descriptor) const {
    Parts parts(message);
    msghdr header = parts.header();
    header.msg_name = const_cast<char*>(to.data());
    header.msg_namelen = static_cast<socklen_t>(to.size());
    cmsghdr* const control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(control), &descriptor, sizeof descriptor);
    if (::sendmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return true;
    if (errno != EAGAIN && errno != EINTR) fail_descriptors("sendmsg");
    return false;
  }
  // Returns nothing after a second without a message. An invalid message has the rank -1.
  std::optional<std::pair<Message, Descriptor>> receive() const {
    Parts parts({});
    msghdr header = parts.header();
    header.msg_controllen = CMSG_LEN(sizeof(int));  // no room for a second descriptor
    const ssize_t bytes = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
    if (bytes < 0 && errno != EAGAIN && errno != EINTR) fail_descriptors("recvmsg");
    if (bytes < 0) return std::nullopt;
    Descriptor descriptor;
    for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr;
         control = CMSG_NXTHDR(&header, control)) {
      if (control->cmsg_type != SCM_RIGHTS) continue;
      int number = -1;
      std::memcpy(&number, CMSG_DATA(control), sizeof number);
      descriptor = Descriptor(number);
    }
    if (bytes != sizeof parts.message || descriptor.get() < 0) parts.message.rank = -1;
    return std::pair(parts.message, std::move(descriptor));
  }

 private:
  struct Parts {
    explicit Parts(const Message& of) : message(of) {}
    msghdr header() {
      bytes = {&message, sizeof message};
      msghdr result{};
      result.msg_iov = &bytes;
      result.msg_iovlen = 1;
      result.msg_control = control.data();
      result.msg_controllen = control.size();
      return result;
    }
    Message message;
    iovec bytes{};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  };
  Descriptor socket_;
};

// A rank's message to the others by the communicator, which no other process can read.
std::string text_of(std::uint64_t secret, const std::string& socket) {
  return std::string(reinterpret_cast<const char*>(&secret), sizeof secret) + socket;
}
std::uint64_t secret_in(const std::string& text) {
  std::uint64_t secret = 0;
  std::memcpy(&secret, text.data(), sizeof secret);
  return secret;
}

// Sends its own descriptor to all others, and receives theirs. A rank that cannot send for lack of room
// receives meanwhile.
std::vector<Descriptor> pass(const Socket& socket, const std::vector<std::string>& told, int rank, int own) {
  const std::size_t ranks = told.size();
  std::vector<Descriptor> all(ranks);
  const auto until = std::chrono::steady_clock::now() + kLongest;
  std::size_t sent = 0, came = 0;
  while (sent < ranks - 1 || came < ranks - 1) {
    if (std::chrono::steady_clock::now() > until)
      fail(ErrorCode::kIo, "of {} descriptors {} have come within {} s", ranks - 1, came, kLongest.count());
    const std::size_t to = (static_cast<std::size_t>(rank) + 1 + sent) % ranks;
    if (sent < ranks - 1 &&
        socket.send(told[to].substr(sizeof(std::uint64_t)), {secret_in(told[to]), rank}, own)) {
      ++sent;
      continue;
    }
    auto found = socket.receive();
    if (!found) continue;
    auto& [message, descriptor] = *found;
    const auto from = static_cast<std::size_t>(message.rank);
    if (message.rank < 0 || from >= ranks || message.rank == rank || all[from].get() >= 0 ||
        message.secret != secret_in(told[static_cast<std::size_t>(rank)]))
      continue;
    all[from] = std::move(descriptor);
    ++came;
  }
  return all;
}

// Sends a descriptor to its own rank, since a system that forbids to send or to receive descriptors does so
// whoever the other one is.
void try_to_pass(const Socket& socket, int rank, int own) {
  std::optional<std::pair<Message, Descriptor>> found;
  if (socket.send(socket.name(), {0, rank}, own)) found = socket.receive();
  if (!found || found->first.rank != rank)
    fail(ErrorCode::kIo, "a descriptor that is sent to its own process does not arrive");
}

template <class Action>
std::string problem_of_passing(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace

// Every rank takes part in both exchanges, even after an error, so that none waits for ever.
Descriptors exchange_descriptors(Communicator& communicator, std::uint64_t id, const std::string& name,
                                 const Descriptor* own, const std::string& problem) {
  std::optional<Socket> socket;
  std::string text, found = problem;
  if (own != nullptr && found.empty())
    found = problem_of_passing([&] {
      socket.emplace();
      try_to_pass(*socket, communicator.rank(), own->get());
      text = text_of(std::strtoull(random_name().c_str(), nullptr, 16), socket->name());
    });
  const std::vector<std::string> told = communicator.exchange(id, name, text, {});
  const bool all_can = std::ranges::none_of(told, [](const std::string& one) { return one.empty(); });
  Descriptors result;
  if (all_can)
    found =
        problem_of_passing([&] { result.of_ranks = pass(*socket, told, communicator.rank(), own->get()); });
  const std::vector<std::string> problems = communicator.exchange(id, name, found, {});
  const auto first = std::ranges::find_if(problems, [](const std::string& one) { return !one.empty(); });
  if (first == problems.end()) return result;
  return {{}, fmt::format("rank {}: {}", first - problems.begin(), *first)};
}

}  // namespace sluice::comm
