#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "models/text/generate.h"

namespace sluice::models {
namespace {

struct Candidate {
  std::int32_t token;
  double weight;
};

// Returns all tokens with their weights (unnormalized), the likeliest first.
std::vector<Candidate> by_likelihood(std::span<const float> logits, double temperature) {
  std::vector<Candidate> candidates;
  const double largest = *std::max_element(logits.begin(), logits.end());
  for (std::size_t i = 0; i < logits.size(); ++i)
    candidates.push_back({static_cast<std::int32_t>(i), std::exp((logits[i] - largest) / temperature)});
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; });
  return candidates;
}

double total(const std::vector<Candidate>& candidates) {
  return std::accumulate(candidates.begin(), candidates.end(), 0.0,
                         [](double sum, const Candidate& c) { return sum + c.weight; });
}

void keep_top_p(std::vector<Candidate>& candidates, double top_p) {
  const double bound = top_p * total(candidates);
  double sum = 0;
  std::size_t kept = 0;
  while (kept < candidates.size() && sum < bound) sum += candidates[kept++].weight;
  candidates.resize(std::max<std::size_t>(kept, 1));
}

}  // namespace

std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, double uniform) {
  for (const float logit : logits)
    if (!std::isfinite(logit))
      fail(ErrorCode::kState, "the model's output is not finite; its weights are damaged or diverged");
  if (sampling.temperature == 0)
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  std::vector<Candidate> candidates = by_likelihood(logits, sampling.temperature);
  if (sampling.top_k != 0 && sampling.top_k < candidates.size()) candidates.resize(sampling.top_k);
  if (sampling.top_p < 1) keep_top_p(candidates, sampling.top_p);
  double left = uniform * total(candidates);
  for (const Candidate& candidate : candidates)
    if ((left -= candidate.weight) < 0) return candidate.token;
  return candidates.back().token;
}

}  // namespace sluice::models
