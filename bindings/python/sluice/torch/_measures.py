"""Measures how long wrapping takes, and what the process and PyTorch take in the first steps; gives back what allocators keep."""

from __future__ import annotations

import contextlib
import ctypes
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._handle import call
from ..errors import BudgetError
from . import _safetensors
from ._gpu import HOST, Account, Gpu, Mark

_WORTH = 32 << 20  # bytes by which the process must grow before memory is given back again
_PAUSE = 2e-3  # seconds between looks at the process's memory, each of which takes some microseconds
_MIB = 1 << 20
_MORE = 32 << 20  # bytes that a warning adds to what was measured and a quarter of it, for the reserve that it names
_MUCH = 0.9  # the part of the bytes that a step moves below which another reserve is worth a warning
_COUNTED = range(2, 5)  # the steps that are timed: in those before, the engine learns their order, and maps memory
_trim = ctypes.CDLL(None).malloc_trim  # of glibc
_RATES = ("to_gpu", "from_gpu", "both_ways", "gpu_updates", "cpu_memory")

# The further entries of a plan for PyTorch on a GPU, before it is measured.
UNMEASURED: Mapping[str, Any] = {"beside": None, "host": None, "host_reserve": HOST, "seconds": None}


class Ready:
    """The seconds of each phase, by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body of the `with` is the phase, or more of it."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


def resident_bytes() -> int:
    """The bytes of the process that are in memory now, without what it sees of other ranks' memory."""
    resident = ctypes.c_uint64()
    call("sluice_process_memory", ctypes.byref(resident), None)
    return resident.value


def _peak_bytes() -> int:
    """The most that they ever were."""
    peak = ctypes.c_uint64()
    call("sluice_process_memory", None, ctypes.byref(peak))
    return peak.value


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
        self._began: tuple[int, int] | None = None  # of the process, when a step began: its bytes, and the most that they ever were
        self._has_told = False  # of a later step

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
        if self._began is not None:
            self._began = self._began[0] + grown, self._peak_before

    def note(self, resident: int) -> None:
        """Comes before a call, and now and then in a step, with the bytes of the process."""
        if self._began is None:
            self._began = resident, _peak_bytes()
        self._seen = max(self._seen, resident)

    def mark(self) -> Any:
        """Comes before a unit is acquired; what it returns waited() gets afterwards."""

    def waited(self, since: Any) -> None:
        """Comes when the unit is acquired."""

    def end(self) -> None:
        """Comes after each step, and warns where the first took more than was stated, or a later one more than there was room for."""
        peak = _peak_bytes()  # where it has changed, it was reached in this step
        before, self._began = self._began, None
        if self.measured is not None:
            seen, self._seen = self._seen, 0
            if before is not None and not self._has_told:
                self._compare(before[0], peak if peak > before[1] else seen)
            return
        highest = peak if peak > self._peak_before else max(self._seen, resident_bytes())
        self.measured = max(0, highest - self.held)
        self._seen = 0
        room = self.reserve if self._stated else self.room
        if self.measured <= room:
            return
        self.lacking = self.measured - self.reserve + self.measured // 16
        if self._stated or highest > self.memory:
            warnings.warn(
                f"PyTorch took {self.measured >> 20} MiB in the first step, and {self.reserve >> 20} MiB were planned for it"
                + ("" if self._estimated is None else f" ({self._estimated >> 20} MiB were estimated)")
                + f"; the process has {highest >> 20} MiB at most, and the memory that was stated is "
                f"{self.memory >> 20} MiB. {self._advice(highest)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _compare(self, before: int, highest: int) -> None:
        """Warns, once, where a later step took more than there is room for, and the process has more than was stated. A call that was
        estimated by the values of one batch may take more with another one. before, highest: bytes of the process in this step."""
        took, room = highest - before, self.reserve if self._stated else self.room
        self._has_told = took > room and highest > self.memory
        if self._has_told:
            warnings.warn(
                f"PyTorch took {took >> 20} MiB in a later step than the first, and {room >> 20} MiB were left for it; the process had "
                f"{highest >> 20} MiB, and the memory that was stated is {self.memory >> 20} MiB. Wrap the model with "
                f"reserve='{(took + took // 16 >> 20) + 1}MiB', or give less at once",
                RuntimeWarning,
                stacklevel=2,
            )

    def _advice(self, highest: int) -> str:
        """Advises on the reserve. highest: the most bytes that the process had."""
        assert self.measured is not None, "the step was measured"
        return f"Wrap the model with reserve='{(self.measured >> 20) + 1}MiB'"

    def as_dict(self) -> dict[str, Any]:
        """Returns the entries of plan(), mostly in bytes; None where a value is not known."""
        return {"peak": self._estimated, "reserve": self.reserve, "measured": self.measured}


class FirstStepOnGpu(FirstStep):
    """Measures what PyTorch takes of a GPU's memory in the first step, through its allocator, which is bound to the reserve, and
    beside that; what the process takes of the host's memory; and the seconds of some steps.

    Memory beside PyTorch's allocator and the engine, of CUDA's libraries and modules, is found by how much less of the GPU is free. So
    memory that other processes take or give back from wrapping to the end of that step counts, too: CUDA does not tell processes apart."""

    def __init__(
        self,
        gpu: Gpu,
        memory: int,
        reserve: int,
        estimated: int | None,
        account: Callable[[], Account],
        reserved: int,
        plan_with: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        """memory: of the host; reserve, estimated: of the GPU; account: tells how much the GPU has now; reserved: what the plan leaves
        there to PyTorch and CUDA; plan_with: makes the plan with another reserve, where the user has stated nothing of it."""
        self._reserved, self._plan_with = reserved, plan_with
        self._gpu, self._account = gpu, account
        self._steps = 0  # that have ended
        self._step_begun = 0.0
        self._waits: list[tuple[Mark, Mark]] = []
        self._shortest: dict[str, float] | None = None  # the seconds of a step, and those of them in which PyTorch's stream waited
        self._of_gpu: dict[str, int | None] = {"peak": estimated, "reserve": reserve, "measured": None}
        self._taken_beside: int | None = None
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
        return self._gpu.mark() if self._steps in _COUNTED else None

    def waited(self, since: Mark | None) -> None:
        if since is not None and (now := self._gpu.mark()) is not None:
            self._waits.append((since, now))

    def end(self) -> None:
        now = time.perf_counter()
        if self._steps in _COUNTED:
            step = {"step": now - self._step_begun, "waiting": sum(self._gpu.seconds_between(*pair) for pair in self._waits)}
            self._shortest = min(self._shortest or step, step, key=lambda each: tuple(each.values()))
        self._waits.clear()
        self._steps += 1
        self._step_begun = time.perf_counter()
        if self.measured is not None:
            return
        peak = self._gpu.peak()
        self._of_gpu["measured"] = None if peak is None else peak - self._held_on_gpu
        there = self._account()
        if not there.shared:  # otherwise other ranks' memory would count, too
            explained = there.engine - self._before.engine + self._gpu.held() - self._held_before
            self._taken_beside = max(0, self._before.free - there.free - explained)
            self._warn_of_the_gpu(self._taken_beside)
        self._tell_of_less()
        super().end()

    def _tell_of_less(self) -> None:
        """Warns where a plan that leaves PyTorch what it has taken moves much less than this one."""
        reserve, measured = self._of_gpu["reserve"] or 0, self._of_gpu["measured"]
        if self._plan_with is None or measured is None:
            return
        enough = (measured + measured // 4 + _MORE) // _MIB * _MIB
        if enough >= reserve:
            return
        with contextlib.suppress(BudgetError):
            now, then = _moved(self._plan), _moved(self._plan_with(enough))
            if then < _MUCH * now:
                warnings.warn(
                    f"PyTorch took {measured // _MIB} MiB of the GPU's memory in the first step, and may take {reserve // _MIB} MiB, since "
                    f"neither reserve nor sample_batch was stated. Where no step is larger, wrap the model with reserve='{enough // _MIB}MiB': "
                    f"a step then moves {then / 1e9:.3g} GB to and from the GPU and the disk, and now {now / 1e9:.3g} GB",
                    RuntimeWarning,
                    stacklevel=2,
                )

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
        return None if self._shortest is None else self._shortest["step"] - self._shortest["waiting"]

    def as_dict(self) -> dict[str, Any]:
        told = {"beside": self._taken_beside, "host": self.measured, "seconds": self._shortest}
        return {**self._of_gpu, **UNMEASURED, **told}


def _moved(plan: Mapping[str, Any]) -> int:
    """The bytes that a step moves by a plan for a GPU."""
    return sum(plan["step"][way] for way in ("bytes_in", "bytes_out", "bytes_read", "bytes_written"))


class Keeper:
    """Gives memory back to the system where the next operation might pass the budget: what PyTorch has freed and the C
    library keeps, and what was read of an optimizer's state_dict. It does not do so earlier, since taking the memory
    again costs time."""

    def __init__(self, budget: int, largest_gradient: int) -> None:
        # Autograd holds a tied parameter's gradients of both uses, and their sum, at once.
        self._threshold = budget - 3 * largest_gradient - budget // 32
        self._after = 0
        self._next = 0.0  # when it is to look again

    def look(self) -> int | None:
        """Comes often in a step. Gives memory back where that is due; returns the bytes that the process had, or None where it has looked
        just before."""
        if (now := time.perf_counter()) < self._next:
            return None
        self._next = now + _PAUSE
        resident = resident_bytes()
        if resident > max(self._threshold, self._after + _WORTH):
            self._after = self.give_back()
        elif self._after:
            self._after = min(self._after, resident)
        return resident

    def give_back(self) -> int:
        """Gives the memory back at once; returns the bytes that the process has then."""
        _trim(0)
        _safetensors.give_up_all()
        return resident_bytes()
