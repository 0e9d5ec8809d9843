#include <signal.h>
#include <sys/wait.h>

#include "tests/bindings/c/support.h"

namespace sluice_c_test::fork_test {

// Runs the work in a child of a fork. Returns the child's exit status, or -1 where it does not end by itself.
int status_of_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  for (int look = 0; look < 1000; ++look) {
    int raw = 0;
    if (::waitpid(child, &raw, WNOHANG) == child) return WIFEXITED(raw) ? WEXITSTATUS(raw) : -1;
    ::usleep(10'000);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return -1;
}

// The threads of an engine are not in the child, and locks may be held there for ever.
TEST(ForkTest, AChildMayDestroyWhatItsParentUsesAndNothingElse) {
  const Folder folder;
  for (const char* place : {"memory", "disk"}) {
    const EngineHandle engine = make_engine({place}, folder.path());
    set_start_values(engine.get());
    train(engine.get(), SLUICE_F32, 1);
    const Values before = values_of(engine.get());
    EXPECT_EQ(status_of_child([&] {
                uint64_t updates = 0;
                if (sluice_engine_updates(engine.get(), 0, &updates) != SLUICE_STATE) return 1;
                if (sluice_engine_begin_step(engine.get(), nullptr) != SLUICE_STATE) return 2;
                if (std::string(sluice_last_error()).find("forked") == std::string::npos) return 3;
                sluice_engine_destroy(engine.get());
                return 0;
              }),
              0)
        << place;
    EXPECT_EQ(values_of(engine.get()), before);
    train(engine.get(), SLUICE_F32, 1);
  }
}

TEST(ForkTest, AChildMayDestroyHomesAndRanks) {
  const Folder folder;
  EngineHandle engine = make_engine({"memory"}, folder.path());
  set_start_values(engine.get());
  const void* data = nullptr;
  ASSERT_OK(sluice_engine_parameter(engine.get(), 0, &data));
  std::array<sluice_home*, kUnits> homes = {};
  ASSERT_OK(sluice_engine_leave(engine.get(), 1, 0, homes.data()));
  engine.reset();
  int descriptor = -1;
  ASSERT_OK(sluice_ranks_memory(2, &descriptor));
  sluice_ranks* ranks = nullptr;
  ASSERT_OK(sluice_ranks_create_local(descriptor, 0, nullptr, &ranks));
  ::close(descriptor);
  EXPECT_EQ(status_of_child([&] {
              sluice_home_destroy(homes[0]);
              sluice_ranks_destroy(ranks);
              return 0;
            }),
            0);
  EXPECT_EQ(static_cast<const float*>(data)[1], start_value(0, 1));
  for (sluice_home* home : homes) sluice_home_destroy(home);
  sluice_ranks_destroy(ranks);
}

}  // namespace sluice_c_test::fork_test
