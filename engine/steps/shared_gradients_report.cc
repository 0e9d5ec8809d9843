#include <algorithm>
#include <bit>
#include <span>

#include "engine/steps/shared_gradients.h"

// The reports that ranks exchange when they use gradients, and how they are compared. shared_gradients.cc has
// what follows from them.
namespace sluice::engine {
namespace {

template <class T>
void put(std::string& bytes, std::span<const T> values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

template <class T>
std::size_t get(std::string_view bytes, std::size_t at, std::span<T> values) {
  ensure(bytes.size() - at >= values.size_bytes(), "a rank has sent too little of its gradients");
  std::copy_n(bytes.data() + at, values.size_bytes(), reinterpret_cast<char*>(values.data()));
  return at + values.size_bytes();
}

constexpr const char* kExchange = "the gradients of a step";

}  // namespace

// Exchanges the reports of all ranks. One of them may step while another computes a micro-batch again, whose
// gradients it alone has dropped.
std::vector<std::string> SharedGradients::tell(Request request, const std::string& what) const {
  std::string own;
  put<Request>(own, std::span(&request, 1));
  std::vector<std::string> all;
  core_.waits.during(Waits::For::kRanks, kExchange, [&] {
    all = core_.ranks->exchange(kExchange, own + what, [this] { core_.serve_ranks(); });
  });
  const auto opens = [](Request of) { return of == Request::kOpen; };
  const auto concludes = [](Request of) { return of == Request::kMean; };
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    Request other = request;
    get(all[rank], 0, std::span(&other, 1));
    if (opens(other) != opens(request) || concludes(other) != concludes(request))
      fail(ErrorCode::kState,
           "rank {} and this one are apart: one of them steps, and the other one sums gradients of another "
           "micro-batch, as after more micro-batches on one rank, or gradients that it has dropped alone; "
           "step, or drop gradients, on all ranks alike",
           rank);
  }
  return all;
}

std::vector<SharedGradients::Mean> SharedGradients::gather(const Mean& own) const {
  std::string what;
  for (const std::vector<ParameterId>* const some : {&own.parameters, &own.kept}) {
    const std::uint64_t count = some->size();
    put(what, std::span(&count, 1));
    put(what, std::span(*some));
  }
  std::vector<Mean> all;
  for (const std::string& bytes : tell(Request::kMean, what + own.squares)) {
    std::size_t at = sizeof(Request);
    Mean& mean = all.emplace_back();
    for (std::vector<ParameterId>* const some : {&mean.parameters, &mean.kept}) {
      std::uint64_t count = 0;
      at = get(bytes, at, std::span(&count, 1));
      ensure(count <= known_.size(), "a rank has sent too many of its gradients");
      some->resize(count);
      at = get(bytes, at, std::span(*some));
    }
    mean.squares = bytes.substr(at);
  }
  return all;
}

std::string SharedGradients::bytes_of(const Report& report) const {
  std::string bytes;
  put(bytes, std::span(&report.wanted, 1));
  put(bytes, std::span(&report.step.step, 1));
  put(bytes, std::span(&report.micro_batches, 1));
  put(bytes, std::span(report.known));
  put(bytes, std::span(report.step.edits));
  put(bytes, std::span(report.begun));
  put(bytes, std::span(report.came));
  return bytes + report.step.settings;
}

SharedGradients::Report SharedGradients::report_in(const std::string& bytes) const {
  Report report;
  std::size_t at = get(bytes, 0, std::span(&report.request, 1));
  report.known.resize(known_.size());
  report.step.edits.resize(edits_.size());
  report.begun.resize(edits_.size());
  report.came.resize(edits_.size());
  at = get(bytes, at, std::span(&report.wanted, 1));
  at = get(bytes, at, std::span(&report.step.step, 1));
  at = get(bytes, at, std::span(&report.micro_batches, 1));
  at = get(bytes, at, std::span(report.known));
  at = get(bytes, at, std::span(report.step.edits));
  at = get(bytes, at, std::span(report.begun));
  at = get(bytes, at, std::span(report.came));
  report.step.settings = bytes.substr(at);
  return report;
}

std::vector<SharedGradients::Report> SharedGradients::gather(Request request, const std::string& settings,
                                                             ParameterId wanted) {
  const std::size_t ended = pairwise_ ? pairwise_->ended() : 0;
  std::vector<std::uint32_t> begun(edits_.size());
  for (const UnderWay& sum : under_way_) begun[sum.unit] = 1;
  const Report own = {request, wanted, ended, known_, begun, turns_.came(), {core_.steps, edits_, settings}};
  if (!core_.ranks) return {own};
  std::vector<Report> all;
  for (const std::string& bytes : tell(request, bytes_of(own))) all.push_back(report_in(bytes));
  return all;
}

void SharedGradients::compare(const std::vector<Report>& all) const {
  std::vector<StepOfRank> steps;
  for (const Report& report : all) steps.push_back(report.step);
  require_alike(core_.layout, steps);
  for (std::size_t rank = 1; rank < all.size(); ++rank) compare_shared(all[0], all[rank], rank);
  if (pairwise_)
    compare_micro_batches(all);
  else if (!in_backward_)
    compare_counts(all);
}

// Gradients to which nobody has added since their last use may be used again, in any micro-batch.
void SharedGradients::compare_micro_batches(const std::vector<Report>& all) const {
  const auto has = [](const Report& rank) {
    return std::ranges::any_of(rank.known, [](const Known& known) { return known.added > 0; });
  };
  if (std::ranges::none_of(all, has)) return;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].micro_batches != pairwise_->count())
      refuse(ErrorCode::kState,
             "gradients are used after {} micro-batches of rank {}, and a step has {} of each rank; with a "
             "reproducible plan use them when all have ended",
             all[rank].micro_batches, rank, pairwise_->count());
}

void SharedGradients::compare_shared(const Report& first, const Report& other, std::size_t rank) const {
  for (ParameterId p = 0; p < known_.size(); ++p) {
    const Known &a = first.known[p], &b = other.known[p];
    const std::string& name = core_.layout.spec(p).name;
    if (a.is_shared() != b.is_shared())
      refuse(ErrorCode::kState,
             "the summed gradient of '{}' was dropped on rank {}, and is there on rank {}; drop it on all",
             name, a.is_shared() ? rank : 0, a.is_shared() ? 0 : rank);
    // Compares bits, so that equal NaNs count as alike.
    if (a.is_shared() && std::bit_cast<std::uint64_t>(a.factor) != std::bit_cast<std::uint64_t>(b.factor))
      refuse(
          ErrorCode::kState,
          "the gradient of '{}' was multiplied by {} on rank {}, and by {} on rank 0; multiply it alike on "
          "all ranks",
          name, b.factor, rank, a.factor);
  }
}

// Ranks may differ in what a parameter got (an expert to which no token was sent), but not in the number of
// micro-batches, which the parameter with the most gradients tells.
void SharedGradients::compare_counts(const std::vector<Report>& all) const {
  const auto most = [](const Report& rank) {
    return std::ranges::max_element(rank.known, {}, &Known::added) - rank.known.begin();
  };
  const auto p = static_cast<ParameterId>(most(all[0]));
  const std::uint32_t count = all[0].known[p].added;
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const auto other = static_cast<ParameterId>(most(all[rank]));
    if (all[rank].known[other].added != count)
      refuse(ErrorCode::kState,
             "rank {} added up to {} gradients to a parameter ('{}'), and rank 0 up to {} ('{}'); compute as "
             "many micro-batches on each rank before gradients are used",
             rank, all[rank].known[other].added, core_.layout.spec(other).name, count,
             core_.layout.spec(p).name);
  }
}

}  // namespace sluice::engine
