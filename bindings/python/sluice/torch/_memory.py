"""Measures what the process holds, and gives back what its allocator keeps."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Mapping
from typing import Any

from . import _state_files

_PAGE = os.sysconf("SC_PAGE_SIZE")
_WORTH = 32 << 20  # bytes by which the process must grow before memory is given back again


def resident_bytes() -> int:
    """The bytes of the process that are in memory now."""
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read(256).split()[1]) * _PAGE


def _peak_bytes() -> int:
    """The most bytes of the process that were ever in memory."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


class FirstStep:
    """Measures what PyTorch takes in the first step (without an optimizer: the first forward pass): by how much the process
    grows beyond what it held when the model was wrapped, which includes all memory of the engine."""

    def __init__(self, memory: int, reserve: int, estimated: int | None, stated: bool) -> None:
        """reserve: the bytes that were planned for PyTorch; estimated: the most that are alive at once, where they were
        estimated; stated: the reserve is the user's, who is warned where it is too small. Otherwise the plan changes."""
        self.memory, self.reserve, self._estimated, self._stated = memory, reserve, estimated, stated
        self.room = reserve  # the reserve, and what the plan leaves free
        self.begin()
        self.measured: int | None = None
        self.lacking = 0  # the bytes by which the reserve was too small

    def begin(self) -> None:
        """Comes before the step."""
        self.held, self._peak_before = resident_bytes(), _peak_bytes()
        self._seen = 0

    def computing(self) -> float | None:
        """The seconds of a step in which the GPU did not wait for the engine; None: not measured, or the CPU computes."""
        return None

    def planned(self, plan: Mapping[str, Any]) -> None:
        """Comes when the engine has a plan."""
        self.room = self.reserve + max(0, self.memory - plan["predicted_peak"])

    def replanned(self, reserve: int, estimated: int, grown: int) -> None:
        """Comes when the engine has another plan, which takes `grown` bytes more."""
        self.reserve, self._estimated = reserve, estimated
        self.held += grown
        self._seen += grown
        self._peak_before = max(self._peak_before, _peak_bytes())

    def note(self, resident: int) -> None:
        """Comes now and then in the step, with the bytes of the process."""
        self._seen = max(self._seen, resident)

    def mark(self) -> Any:
        """Comes before a unit is acquired; what it returns waited() gets afterwards."""

    def waited(self, since: Any) -> None:
        """Comes when the unit is acquired."""

    def end(self) -> None:
        """Comes after each step, and warns where the first took more than was stated."""
        if self.measured is not None:
            return
        peak = _peak_bytes()  # where it has changed, it was reached in this step
        highest = peak if peak > self._peak_before else max(self._seen, resident_bytes())
        self.measured = max(0, highest - self.held)
        room = self.reserve if self._stated else self.room
        if self.measured <= room:
            return
        self.lacking = self.measured - self.reserve + self.measured // 16
        if self._stated or highest > self.memory:
            warnings.warn(
                f"PyTorch took {self.measured >> 20} MiB in the first step, and {self.reserve >> 20} MiB were planned for "
                f"it{self._of_estimate()}; the process has {highest >> 20} MiB at most, and the memory that was stated is "
                f"{self.memory >> 20} MiB. {self._advice(highest)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _advice(self, highest: int) -> str:
        """What to state instead. highest: the most bytes that the process had."""
        assert self.measured is not None, "the step was measured"
        return f"Wrap the model with reserve='{(self.measured >> 20) + 1}MiB'"

    def _of_estimate(self) -> str:
        return "" if self._estimated is None else f" ({self._estimated >> 20} MiB were estimated)"

    def as_dict(self) -> dict[str, Any]:
        """What plan() shows, mostly in bytes; None for what is not known."""
        return {"peak": self._estimated, "reserve": self.reserve, "measured": self.measured}


class Keeper:
    """Gives memory back to the system where the next operation might pass the budget: what PyTorch has freed and the C
    library keeps, and what was read of an optimizer's state_dict. It does not do so earlier, since taking the memory
    again costs time."""

    def __init__(self, budget: int, largest_gradient: int) -> None:
        # Autograd holds a tied parameter's gradients of both uses, and their sum, at once.
        self._threshold = budget - 3 * largest_gradient - budget // 32
        self._after = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if self._trim is not None:
            self._trim.argtypes, self._trim.restype = [ctypes.c_size_t], ctypes.c_int

    def look(self) -> int:
        """Comes now and then in a step. Gives memory back where that is due; returns the bytes that the process had."""
        resident = resident_bytes()
        if self._trim is not None and resident > max(self._threshold, self._after + _WORTH):
            self._after = self.give_back()
        elif self._after:
            self._after = min(self._after, resident)
        return resident

    def give_back(self) -> int:
        """Gives the memory back at once; returns the bytes that the process has then."""
        if self._trim is not None:
            self._trim(0)
        _state_files.give_up_all()
        return resident_bytes()
