#include "bindings/cli/progress.h"

#include "core/bytes.h"
#include "testing.h"

namespace sluice::cli::progress_test {

models::StepReport report(std::uint64_t step) {
  models::StepReport r;
  r.step = step;
  r.steps = 1000;
  r.loss = 3.25;
  r.seconds = 2;
  r.tokens_per_second = 512;
  r.memory = 100 * kMiB;
  r.peak_memory = 200 * kMiB;
  r.budget = 300 * kMiB;
  r.disk_read = 4'000'000'000;
  r.disk_written = 1'000'000'000;
  return r;
}

std::string text_of(const std::function<void(std::FILE*)>& write) {
  char* data = nullptr;
  std::size_t size = 0;
  std::FILE* file = ::open_memstream(&data, &size);
  write(file);
  std::fclose(file);
  std::string text(data, size);
  std::free(data);
  return text;
}

TEST(ProgressTest, SaysEverythingWhereThereIsRoom) {
  const std::string text = progress_text(report(120), 75, 0);
  for (const char* part :
       {"120/1000", "loss 3.2500", "512 tok/s", "1m15s left", "mem 100/200/300 MiB", "r 2.00 w 0.50 GB/s"})
    EXPECT_THAT(text, HasSubstr(part));
}

TEST(ProgressTest, SaysHowTheLossIsScaledAndThatAStepWasSkipped) {
  EXPECT_THAT(progress_text(report(1), 75, 0), Not(HasSubstr("scale")));
  models::StepReport scaled = report(1);
  scaled.loss_scale = 32768;
  EXPECT_THAT(progress_text(scaled, 75, 0), HasSubstr("loss 3.2500  scale 32768  512 tok/s"));
  scaled.skipped = true;
  EXPECT_THAT(progress_text(scaled, 75, 0), HasSubstr("scale 32768, skipped"));
}

TEST(ProgressTest, NeverPassesTheWidthAndDropsTheLeastImportant) {
  for (std::size_t width = 10; width < 120; ++width)
    EXPECT_LE(progress_text(report(7), 75, width).size(), width);
  EXPECT_THAT(progress_text(report(7), 75, 40), HasSubstr("loss"));
  EXPECT_THAT(progress_text(report(7), 75, 40), Not(HasSubstr("disk")));
}

TEST(ProgressTest, Durations) {
  EXPECT_EQ(format_duration(0.2), "0s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(187), "3m07s");
  EXPECT_EQ(format_duration(3725), "1h02m");
  EXPECT_EQ(format_duration(200000), "2d07h");
}

TEST(ProgressTest, LinesAreAtMostAboutOneASecondAndTheLastIsShown) {
  const std::string text = text_of([](std::FILE* out) {
    Progress progress(out, ProgressStyle::kLines);
    for (std::uint64_t step = 1; step <= 1000; ++step) progress.step(report(step));
  });
  const auto lines = std::count(text.begin(), text.end(), '\n');
  EXPECT_GE(lines, 2);
  EXPECT_LE(lines, 4);
  EXPECT_THAT(text, HasSubstr("1000/1000"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(ProgressTest, TheBarIsOneLineThatIsRewrittenAndMessagesStandAboveIt) {
  const std::string text = text_of([](std::FILE* out) {
    Progress progress(out, ProgressStyle::kBar);
    progress.step(report(1));
    progress.message("saved here");
    progress.step(report(1000));
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);  // one after the message, and one at the end
  EXPECT_THAT(text, HasSubstr("saved here\x1b[K\n"));
}

TEST(ProgressTest, NoneIsSilent) {
  EXPECT_EQ(text_of([](std::FILE* out) { Progress(out, ProgressStyle::kNone).step(report(1000)); }), "");
}

}  // namespace sluice::cli::progress_test
