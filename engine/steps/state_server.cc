#include "engine/steps/state_server.h"

#include <chrono>

namespace sluice::engine {
namespace {

constexpr std::chrono::milliseconds kBetweenTries{1};

}  // namespace

StateServer::StateServer(Engine& engine, std::mutex& turns)
    : engine_(engine), reads_(*engine.state_reads()), turns_(turns), thread_([this] { run(); }) {}

StateServer::~StateServer() {
  reads_.end();
  thread_.join();
}

// A read stays while this rank's updates are not as far; a call of the client, or its wait, may answer it.
void StateServer::run() {
  while (reads_.wait()) {
    {
      const std::lock_guard turn(turns_);
      try {
        engine_.serve_state();
      } catch (...) {  // the engine has failed or was left, as the reader learns
        if (reads_.next()) reads_.refuse(std::current_exception());
      }
    }
    if (reads_.next()) std::this_thread::sleep_for(kBetweenTries);
  }
}

}  // namespace sluice::engine
