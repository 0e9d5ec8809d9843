#pragma once
#include <cstdint>
#include <string_view>

// The ids of all calls of a run's ranks (see comm::Communicator) are chosen here, so that no two calls in
// flight have the same id.
namespace sluice::engine {

// The purpose of a call. Calls of different kinds have different ids.
enum class CallKind : std::uint8_t {
  kGradient = 1,
  kParameters,
  kState,
  kWhole,
  kRoundF64,
  kRoundF32,
  kExchange,
  kPartOfGradient,
  kEdit,
  kWholeGradient,
  kGradientIsThere,
  kUnitIsThere,
  kStateTaken,
  kNcclTurn,
  kNamed,     // between the calls for units: settings, measurements, files
  kOfCaller,  // a program's own calls, through the C ABI
};

// The id of the index-th call of the kind. REQUIRES: index < 2^56.
constexpr std::uint64_t call_id(CallKind kind, std::uint64_t index) {
  return std::uint64_t{static_cast<std::uint8_t>(kind)} << 56 | index;
}
// The id of the call of the kind with this name.
std::uint64_t call_id(CallKind kind, std::string_view name);
inline std::uint64_t call_id(std::string_view name) { return call_id(CallKind::kNamed, name); }

}  // namespace sluice::engine
