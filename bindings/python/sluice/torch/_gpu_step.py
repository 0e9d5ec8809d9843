"""Measures what the first steps of a model that is wrapped on a GPU take there, and on the host."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ._gpu import HOST, Account, Gpu, Mark
from ._memory import FirstStep

_MIB = 1 << 20
_COUNTED = range(2, 5)  # the steps that are timed: in those before, the engine learns their order, and maps memory
_RATES = ("to_gpu", "from_gpu", "both_ways", "gpu_updates", "cpu_memory")

# What a plan says besides of PyTorch on a GPU, before it is measured.
UNMEASURED: Mapping[str, Any] = {"beside": None, "host": None, "host_reserve": HOST, "seconds": None}


class _Steps:
    """The seconds of whole steps, each from the end of the one before."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._ended = 0
        self._begun = 0.0
        self._waits: list[tuple[Mark, Mark]] = []
        self._shortest: tuple[float, float] | None = None  # seconds, and those of them in which PyTorch's stream waited

    def mark(self) -> Mark | None:
        return self._gpu.mark() if self._ended in _COUNTED else None

    def waited(self, since: Mark | None) -> None:
        if since is not None and (now := self._gpu.mark()) is not None:
            self._waits.append((since, now))

    def end(self) -> None:
        now = time.perf_counter()
        if self._ended in _COUNTED:
            waiting = sum(self._gpu.seconds_between(*pair) for pair in self._waits)
            self._shortest = min(self._shortest or (now - self._begun, waiting), (now - self._begun, waiting))
        self._waits.clear()
        self._ended += 1
        self._begun = time.perf_counter()

    def as_dict(self) -> dict[str, float] | None:
        return None if self._shortest is None else {"step": self._shortest[0], "waiting": self._shortest[1]}


class FirstStepOnGpu(FirstStep):
    """Measures what PyTorch takes of a GPU's memory in the first step, through its allocator, which is bound to the reserve, and
    beside that; what the process takes of the host's memory; and the seconds of some steps.

    What is taken beside PyTorch's allocator and the engine, by CUDA's libraries and modules, is what less is free of the GPU. So what
    other processes take or give back from wrapping to the end of that step counts, too: CUDA tells nobody what a process has."""

    def __init__(
        self, gpu: Gpu, memory: int, reserve: int, estimated: int | None, account: Callable[[], Account], reserved: int
    ) -> None:
        """memory: of the host; reserve, estimated: of the GPU; account: tells how much the GPU has now; reserved: what the plan leaves
        there to PyTorch and CUDA."""
        self._reserved = reserved
        self._gpu, self._account, self._steps = gpu, account, _Steps(gpu)
        self._of_gpu: dict[str, int | None] = {"peak": estimated, "reserve": reserve, "measured": None}
        self._beside: int | None = None
        self._plan: Mapping[str, Any] = {}
        self._before, self._held_before = account(), gpu.held()
        super().__init__(memory, HOST, None, False)

    def begin(self) -> None:
        super().begin()
        self._held_on_gpu = self._gpu.held()
        self._gpu.begin_peak()

    def planned(self, plan: Mapping[str, Any]) -> None:
        super().planned(plan)
        self._plan = plan

    def mark(self) -> Mark | None:
        return self._steps.mark()

    def waited(self, since: Mark | None) -> None:
        self._steps.waited(since)

    def end(self) -> None:
        self._steps.end()
        if self.measured is not None:
            return
        peak = self._gpu.peak()
        self._of_gpu["measured"] = None if peak is None else peak - self._held_on_gpu
        now = self._account()
        explained = now.engine - self._before.engine + self._gpu.held() - self._held_before
        self._beside = max(0, self._before.free - now.free - explained)
        self._warn_of_the_gpu(self._beside)
        super().end()

    def _warn_of_the_gpu(self, beside: int) -> None:
        budget = self._plan["budget"]["device"]
        left = budget - self._plan["device"] + self._reserved - (self._of_gpu["reserve"] or 0)
        if beside <= left:
            return
        base = self._plan["bytes"]["device"]["base"] - self._reserved + beside - self._gpu.beside
        rates = ", ".join(f"{name}={self._plan['rates'][name]:.4g}" for name in _RATES)
        warnings.warn(
            f"{beside / _MIB:.0f} MiB of the GPU's memory were taken until the end of the first step beside PyTorch's allocator and "
            f"the engine, by CUDA's libraries (cuBLAS, cuDNN, kernels that were loaded) or by other processes, and the plan leaves "
            f"{max(0, left) / _MIB:.0f} MiB of the {budget / _MIB:.0f} MiB that were stated. Wrap the model with "
            f"device_facts=sluice.DeviceFacts({rates}, base='{base // _MIB + 1}MiB'), a smaller reserve, or more device_memory",
            RuntimeWarning,
            stacklevel=2,
        )

    def _advice(self, highest: int) -> str:
        return (
            f"To stay within that, wrap the model with memory='{max(0, 2 * self.memory - highest) // _MIB}MiB': on a GPU CUDA's "
            "libraries take memory of the host, too"
        )

    def computing(self) -> float | None:
        seconds = self._steps.as_dict()
        return None if seconds is None else seconds["step"] - seconds["waiting"]

    def as_dict(self) -> dict[str, Any]:
        told = {"beside": self._beside, "host": self.measured, "seconds": self._steps.as_dict()}
        return {**self._of_gpu, **UNMEASURED, **told}
