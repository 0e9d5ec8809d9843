"""What an engine is made of: units with parameters, the optimizer's settings, sizes and folders."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Optional, Union

from .errors import InvalidArgumentError
from .optimizers import AdamW, Optimizer

Size = Union[int, str]
"""Bytes, or a text such as "4GiB", "1.5GB", "512Mi"."""

Path = Union[str, "os.PathLike[str]"]
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_of(size: Size, what: str) -> int:
    """Bytes of a size; KiB, MiB, GiB, TiB are powers of 1024, and KB, MB, GB, TB of 1000."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", size)
        if found is None:
            raise InvalidArgumentError(f"{what} is '{size}'; a size looks like 512MiB, 4GiB, 1.5GB or 100000 (bytes)")
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit or ""]) if unit else int(float(number))
    elif isinstance(size, bool) or not isinstance(size, int):
        raise InvalidArgumentError(f"{what} is {size!r}; give bytes as an int, or a text such as '4GiB'")
    return whole(size, what, 2**64)


def whole(number: int, what: str, below: int = 2**32) -> int:
    """`number`, which C takes as it is; ctypes alone would take another's lower bits."""
    if not isinstance(number, int) or not 0 <= number < below:
        raise InvalidArgumentError(f"{what} is {number!r}; it is a whole number from 0 to {below - 1}")
    return int(number)


SPAN_GRAIN = 1 << 20
"""Elements of which all spans of a parameter but the last have a multiple."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A tensor to be trained: its logical name, unique in the model, its shape, and its group of settings. One that is
    frozen is never updated, and has no optimizer state; all parameters of a unit are frozen, or none is.

    span: first element, and how many, where a large parameter spans several units: each has the span that follows the one
        of the unit before, and nothing else; all but the last of a multiple of SPAN_GRAIN elements. They have one name in
        a checkpoint, and each its `key` here; elements of a span count from its first.
    dtype: "f32" or "bf16", one for all parameters of a unit; None: that of the options.
    by_elements: an optimizer of matrices (Muon) leaves it to AdamW, as it does all that has not two dimensions: best for
        embeddings and heads."""

    name: str
    shape: tuple[int, ...] = ()
    group: int = 0
    frozen: bool = False
    span: Optional[tuple[int, int]] = None
    dtype: Optional[str] = None
    by_elements: bool = False

    def __post_init__(self) -> None:
        shape = tuple(whole(length, f"a dimension of '{self.name}'", 2**63) for length in self.shape)
        if 0 in shape:
            raise InvalidArgumentError(
                f"'{self.name}' has the shape {shape}; none of its dimensions may be 0: leave it out"
            )
        object.__setattr__(self, "shape", shape)
        whole(self.group, f"the group of '{self.name}'")
        if self.span is not None:
            first, elements = (whole(n, f"the span of '{self.name}'", 2**63) for n in self.span)
            if elements == 0:
                raise InvalidArgumentError(f"the span of '{self.name}' at {first} has no elements")

    @property
    def key(self) -> str:
        """By which an engine knows it: its name, and of a span where it begins."""
        return self.name if self.span is None else f"{self.name}[{self.span[0]}:]"

    @property
    def elements(self) -> int:
        """How many values its unit has of it; 1 for the shape ()."""
        return math.prod(self.shape) if self.span is None else self.span[1]

    @property
    def first(self) -> int:
        """The element with which its unit's part begins."""
        return 0 if self.span is None else self.span[0]

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape in which its values are seen: a span is flat."""
        return self.shape if self.span is None else (self.span[1],)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are needed together, such as a block's. Best in the order of a forward pass."""

    name: str
    parameters: Sequence[Parameter]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder on disk, and how much of it may be taken; None: what is free, less a twentieth."""

    path: Path
    limit: Optional[Size] = None

    def __post_init__(self) -> None:
        if self.limit is not None and size_of(self.limit, f"the limit of '{os.fspath(self.path)}'") == 0:
            raise InvalidArgumentError(f"the limit of '{os.fspath(self.path)}' is 0; leave it out for what is free")


@dataclasses.dataclass(frozen=True)
class Options:
    """How an engine is made. Only `memory` must be stated.

    memory: the budget of the whole process, what the caller itself needs (`reserved`) included.
    disk: a folder, or several that are striped, for what does not fit in memory.
    reserved: what the caller will take beyond what the process holds now: activations, workspace, gradients.
    optimizer: the settings of all parameters, or a list of one for each group: AdamW, Adam, Lion,
        SGD, Adafactor or Muon.
    dtype: of parameters that have none of their own, "f32", "bf16" or "f16"; of the narrower ones the optimizer keeps f32
        masters.
    state: of the optimizer's arrays, "f32", "bf16" or "8bit".
    master: "none": no masters are kept of what is bf16, and updates are rounded stochastically, by `seed`.
    threads: of updates; 0: the cores that the process may use.
    held_units: the most units that are held at once.
    trace_events: how many of the latest are kept for Engine.save_trace(); 0: none.
    prefetch: accesses fetched ahead; 0: planned.
    place: "memory" or "disk" for everything, or a mapping of "parameters", "gradients" and "state" to these; None:
        planned. For tests and measurements.
    given_back: what the process holds now and gives back until the last unit has its values.
    update_in_backward: a unit is updated as soon as it is released with gradients, which are never stored;
        Engine.begin_step() then has the settings, and clipping by the norm and kept gradients are not to be had.
    serve_touches: what is read at a parameter's address while its unit is not held is brought in; else the process ends
        with a message.
    sgemm: the address of a BLAS' sgemm_ (32-bit integers) that Muon's products are made by, in memory that `reserved` has;
        None: the matrix library beside Sluice's is loaded, with an OpenMP of its own. See sluice.torch.sgemm().
    team: the address of libgomp's GOMP_parallel, or of a function like it, that the engine's loops run on: for a caller
        whose own loops do; None: threads of the engine's own. See sluice.torch.team().
    """

    memory: Size
    disk: Union[Path, Folder, Sequence[Union[Path, Folder]], None] = None
    reserved: Size = 0
    optimizer: Union[Optimizer, Sequence[Optimizer]] = dataclasses.field(default_factory=AdamW)
    dtype: str = "f32"
    threads: int = 0
    held_units: int = 1
    trace_events: int = 0
    prefetch: int = 0
    place: Union[str, Mapping[str, str], None] = None
    given_back: Size = 0
    serve_touches: bool = False
    state: str = "f32"
    master: str = "f32"
    seed: int = 0
    update_in_backward: bool = False
    sgemm: Optional[int] = None
    team: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step found: the norm of all gradients before clipping, and the factor that clipping took (1: none)."""

    gradient_norm: float
    clip_factor: float


@dataclasses.dataclass(frozen=True)
class Counters:
    """Over an engine's life: seconds in which the caller waited for transfers, seconds of the optimizer's arithmetic, and
    touches that were served."""

    wait_seconds: float
    optimizer_seconds: float
    touches: int


@dataclasses.dataclass(frozen=True)
class LedgerLine:
    """Bytes of one purpose ("total": of all) in one tier ("host", "disk"), now and at most so far."""

    tier: str
    purpose: str
    current: int
    peak: int
