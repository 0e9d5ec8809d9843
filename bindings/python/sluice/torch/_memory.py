"""What the process holds, and how it gives back what its allocator keeps."""

from __future__ import annotations

import ctypes
import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
_WORTH = 32 << 20  # bytes that the process must have grown by, for another look at what is free


def resident_bytes() -> int:
    """What the process has in memory now."""
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read(256).split()[1]) * _PAGE


class Keeper:
    """Where the next operation might pass the budget, memory that PyTorch has freed and the C library keeps goes back to
    the system. That costs time when it is taken again, so not before."""

    def __init__(self, budget: int, largest_gradient: int) -> None:
        # Autograd has a tied parameter's gradients of both uses, and their sum, before any is given away.
        self._threshold = budget - 3 * largest_gradient - budget // 32
        self._after = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if self._trim is not None:
            self._trim.argtypes, self._trim.restype = [ctypes.c_size_t], ctypes.c_int

    def look(self) -> None:
        """Called now and then in a step."""
        if self._trim is not None and resident_bytes() > max(self._threshold, self._after + _WORTH):
            self._trim(0)
            self._after = resident_bytes()
        elif self._after and resident_bytes() < self._after:
            self._after = resident_bytes()
