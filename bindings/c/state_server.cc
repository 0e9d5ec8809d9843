#include "bindings/c/state_server.h"

#include <chrono>

#include "bindings/c/handles.h"

namespace sluice::c {
namespace {

constexpr std::chrono::milliseconds kBetweenTries{1};

}  // namespace

StateServer::StateServer(sluice_engine& engine, engine::StateReads& reads)
    : engine_(engine), reads_(reads), thread_([this] { run(); }) {}

StateServer::~StateServer() {
  reads_.end();
  thread_.join();
}

// A read stays while this rank's updates are not as far; a call of the client, or its wait, may answer it.
void StateServer::run() {
  while (reads_.wait()) {
    {
      const Turn turn(engine_);
      try {
        engine_.engine->serve_state();
      } catch (...) {  // the engine has failed or was left, as the reader learns
        if (reads_.next()) reads_.refuse(std::current_exception());
      }
    }
    if (reads_.next()) std::this_thread::sleep_for(kBetweenTries);
  }
}

}  // namespace sluice::c
