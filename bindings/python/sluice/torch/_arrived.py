"""Which gradients have come in a backward pass, so that ranks sum them beside the rest of it."""

from __future__ import annotations

from ._homes import Home
from ._presence import Presence


class Arrived:
    """Tells the engine when all gradients of a unit have come, which sums them over the ranks then where this is the last
    micro-batch of a step. It tells of units of which each gradient came once in an earlier pass: one that comes again would be
    added to a mean. One that does not come is summed with the others when backward ends."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._of_unit = [0] * len(presence.engine.units)  # how many gradients a unit has
        for home in presence.homes:
            for unit in home.units if home.trainable else ():
                self._of_unit[unit] += 1
        self._came: set[int] = set()
        self._missing = list(self._of_unit)
        self._complete: set[int] = set()  # units all of whose gradients have come in this pass
        self._known: set[int] = set()  # those of which they have in an earlier one
        self._repeated: set[int] = set()  # those of which one has come twice in a pass

    def forget(self) -> None:
        """Begins a backward pass."""
        self._known |= self._complete
        self._complete.clear()
        self._came.clear()
        self._missing = list(self._of_unit)

    def note(self, home: Home) -> None:
        """Comes when the engine has the parameter's gradient of this backward pass."""
        with self._presence.lock:
            if home.index in self._came:
                self._repeated.update(home.units)
                return
            self._came.add(home.index)
            for unit in home.units:
                self._missing[unit] -= 1
                if self._missing[unit] > 0:
                    continue
                self._complete.add(unit)
                if unit in self._known and unit not in self._repeated:
                    self._presence.engine._handle.call("sluice_engine_end_gradients", unit)
