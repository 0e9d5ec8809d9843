#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/core.h"
#include "engine/turns.h"

// Private to this room.
namespace sluice::engine {

// How the gradients of an AnyOrderEngine become those of all ranks where updates follow them at once. A step
// has one micro-batch on each rank. A unit is *ready* on a rank that has a gradient of it and no longer holds
// it, nor a unit that is updated with it. Whenever a unit has become ready, its rank comes to a *meeting*, in
// which each rank says what is ready there. What is ready on all ranks is summed then, beside what the client
// computes; a rank whose micro-batch has ended has zeros for the rest. In the next meeting all ranks know
// the mean's squares, and the unit's update is due. So all ranks sum, and update, in the same order, and no
// more gradients exist than those of a few units.
//
// Ranks may have gradients of other units than each other, or in another order. A rank on which more than
// kUnitsThatWait units are ready that others do not have comes to meetings until these have come further.
// Where all ranks are so, they sum the one of those units whose turn comes first (Turns), and a rank that
// does not have it brings zeros. It is an error if that rank gets a gradient of it after all.
//
// Updates cannot be undone. So what ends a step in its middle, or a mean that is not finite, fails the
// engines of all ranks. Thread rule: one thread.
class SumsInBackward {
 public:
  struct Client {
    std::function<bool(UnitId)> holds;
    std::function<void(UnitId)> update;  // the unit's gradients are the mean now, and final
  };
  SumsInBackward(Core& core, Client client);
  ~SumsInBackward();  // a step that has begun to be applied ends the work of all ranks

  void begin_step();
  // Comes when a unit is acquired to read it, in a step.
  void follow_read(UnitId unit);
  // Throws a Refusal where the parameter's gradient of this step was summed already.
  void check_add(ParameterId parameter) const;
  // Comes when the unit, or one that is updated with it, is no longer held.
  void let_go(UnitId unit);
  // Ends the micro-batch: returns when all ranks have, and every gradient is summed. May come again.
  // REQUIRES: no unit is held.
  void end();
  // Waits until neither the unit nor one that is updated with it is being summed.
  void await(UnitId unit);
  void abandon();  // throws Error(kState) where updates of this step were made
  void edited(UnitId unit) { ++edits_[unit]; }
  bool is_summed(UnitId unit) const;        // in this step
  std::optional<UnitId> under_way() const;  // a unit that is being summed

 private:
  struct Ready {
    UnitId unit = 0;
    std::vector<ParameterId> parameters;  // of it, that have a gradient
  };
  // What a rank brings to a meeting.
  struct Brought {
    bool ended = false;
    std::uint64_t step = 0;
    std::string settings;
    std::vector<std::uint32_t> edits;  // by unit; in the first meeting of a step
    std::vector<UnitId> read;          // in the order in which Turns takes them; likewise
    std::vector<Ready> ready;
    std::vector<UnitId> held;
    std::string squares;  // of what was being summed
  };
  struct UnderWay {
    Ready of;
    TransferGroup group;
  };
  std::optional<Ready> ready(UnitId unit) const;
  bool holds_any(UnitRange units) const;
  Brought brought() const;
  void meet();
  std::vector<Brought> gather();
  static Brought parsed(const std::string& bytes, int rank);
  void follow_turns(const std::vector<Brought>& all);
  void compare(const std::vector<Brought>& all) const;
  std::vector<Ready> choose(const std::vector<Brought>& all);
  std::optional<UnitId> overtaken(const std::vector<Brought>& all, const std::vector<bool>& chosen) const;
  static bool is_ready_everywhere(const std::vector<Brought>& all, const Ready& joined);
  static Ready joined(const std::vector<Brought>& all, UnitId unit);
  void begin(const Ready& ready);
  void finish();
  void take_means(const std::vector<Brought>& all);
  std::vector<ParameterId> summed_now() const;

  Core& core_;
  const Client client_;
  const comm::SumOrder order_;
  std::deque<UnderWay> under_way_;
  Turns turns_;
  std::vector<UnitId> read_;          // in this step, before its first meeting
  std::vector<bool> summed_;          // by parameter: in this step
  std::vector<std::uint32_t> edits_;  // by unit
  bool met_ = false;                  // whether there was a meeting in this step
  bool ended_ = false;                // whether this rank's micro-batch has
  bool all_ended_ = false;
  bool is_ahead_ = false;  // whether this rank waits for others to come further
};

}  // namespace sluice::engine
