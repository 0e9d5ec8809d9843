#include "engine/layout/stripes.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/grid.h"

namespace sluice::engine {

std::vector<Stripe> stripes_of(std::span<const ElementRange> shards, std::size_t most) {
  const auto count = static_cast<std::size_t>(
      std::ranges::count_if(shards, [](ElementRange shard) { return shard.size() > 0; }));
  if (count == 0) return {};
  const std::size_t each = most / count / kernels::kGridBlock * kernels::kGridBlock;
  ensure(each > 0, "{} elements are too few for stripes of {} shards", most, count);
  std::vector<Stripe> stripes;
  for (const ElementRange& shard : shards) {
    std::size_t stripe = 0;
    for (std::size_t end = shard.end; end > shard.begin; ++stripe) {
      const std::size_t on_grid = round_up(end, kernels::kGridBlock);
      const std::size_t begin = std::max(shard.begin, on_grid - std::min(on_grid, each));
      if (stripe == stripes.size()) stripes.emplace_back();
      std::vector<Stripe::Part>& parts = stripes[stripe].parts;
      parts.push_back({{begin, end}, parts.empty() ? 0 : parts.back().at + each});
      end = begin;
    }
  }
  return stripes;
}

ElementRange share_of(std::size_t count, std::size_t rank, std::size_t ranks) {
  const std::size_t each = divide_up(divide_up(count, kernels::kGridBlock), ranks) * kernels::kGridBlock;
  return {std::min(count, rank * each), std::min(count, (rank + 1) * each)};
}

ElementRange overwriting(std::span<const Stripe> stripes, ElementRange own, std::size_t times) {
  std::size_t first = own.end;
  for (std::size_t i = 0; i < stripes.size(); ++i)
    for (const Stripe::Part& part : stripes[i].parts) {
      if (part.elements.begin < own.begin || own.end <= part.elements.begin) continue;
      const ElementRange overwritten{times * part.elements.begin, times * part.elements.end};
      for (const Stripe& later : stripes.subspan(i + 1))
        for (const Stripe::Part& other : later.parts)
          if (intersection(overwritten, other.elements).size() > 0)
            first = std::min(first, part.elements.begin);
    }
  return {first, own.end};
}

}  // namespace sluice::engine
