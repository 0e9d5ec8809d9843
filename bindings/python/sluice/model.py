"""The description from which an engine is made: units with parameters, the optimizer's settings, sizes and folders."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Optional, Union

from .errors import InvalidArgumentError, knows_its_keywords
from .optimizers import AdamW, Optimizer
from .ranks import Ranks

Size = Union[int, str]
"""Bytes, or a text such as "4GiB", "1.5GB", "512Mi"."""

Path = Union[str, "os.PathLike[str]"]
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_of(size: Size, what: str) -> int:
    """The bytes of a size. KiB, MiB, GiB, TiB are powers of 1024, and KB, MB, GB, TB of 1000."""
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
    """Returns `number`, or raises where C cannot represent it: ctypes would silently cut off its upper bits."""
    if not isinstance(number, int) or not 0 <= number < below:
        raise InvalidArgumentError(f"{what} is {number!r}; it is a whole number from 0 to {below - 1}")
    return int(number)


SPAN_GRAIN = 1 << 20
"""All spans of a parameter but the last have a multiple of so many elements."""


@knows_its_keywords
@dataclasses.dataclass(frozen=True)
class Parameter:
    """A tensor to be trained: its logical name, unique in the model, its shape, and its group of settings. A frozen one is
    never updated, and has no optimizer state; either all parameters of a unit are frozen, or none is.

    span: where a large parameter spans several units, the first element and how many its unit has. The spans follow each
        other in consecutive units, which have no other parameters; all but the last have a multiple of SPAN_GRAIN
        elements. They share one name in a checkpoint, and each has its `key` here; elements of a span count from its
        first.
    dtype: "f32", "bf16" or "f16", one for all parameters of a unit; None: that of the options.
    by_elements: an optimizer of matrices (Muon) leaves the parameter to AdamW, as it does those that have not two
        dimensions: best for embeddings and heads."""

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
        """The name that an engine uses: the parameter's, and for a span also its first element."""
        return self.name if self.span is None else f"{self.name}[{self.span[0]}:]"

    @property
    def elements(self) -> int:
        """The number of elements in its unit; 1 for the shape ()."""
        return math.prod(self.shape) if self.span is None else self.span[1]

    @property
    def first(self) -> int:
        """The first element in its unit."""
        return 0 if self.span is None else self.span[0]

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape in which its values are handed out: a span is flat."""
        return self.shape if self.span is None else (self.span[1],)


@knows_its_keywords
@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are needed together, such as a block's. Units are best given in the order of a forward pass."""

    name: str
    parameters: Sequence[Parameter]


@knows_its_keywords
@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder on disk, and the bytes that may be allocated there; None: the free space, less a twentieth."""

    path: Path
    limit: Optional[Size] = None

    def __post_init__(self) -> None:
        if self.limit is not None and size_of(self.limit, f"the limit of '{os.fspath(self.path)}'") == 0:
            raise InvalidArgumentError(f"the limit of '{os.fspath(self.path)}' is 0; leave it out for what is free")


def folders_of(disk: Union[Path, Folder, Sequence[Union[Path, Folder]], None]) -> list[Folder]:
    """Returns the folders as objects; a text may be "FOLDER:SIZE", as for the program."""
    each = [disk] if isinstance(disk, (str, os.PathLike, Folder)) else [] if disk is None else disk
    if not isinstance(each, Sequence) or not all(isinstance(folder, (str, os.PathLike, Folder)) for folder in each):
        raise InvalidArgumentError(f"disk is {disk!r:.80}; give a folder, 'FOLDER:SIZE' or sluice.Folder, or a list of these")
    return [folder if isinstance(folder, Folder) else _folder(os.fspath(folder)) for folder in each]


def _folder(text: str) -> Folder:
    path, colon, size = text.rpartition(":")
    if not colon or "/" in size or (size and size[0] not in "0123456789"):
        path, size = text, "-"
    if not path or not size:
        raise InvalidArgumentError(f"the disk is '{text}', which is not FOLDER or FOLDER:SIZE, such as /scratch:20GiB")
    return Folder(path, None if size == "-" else size)


@knows_its_keywords
@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Facts about a GPU, from which a plan decides the place of every part, and which units the CPU updates; no bit
    depends on them.

    to_gpu, from_gpu, both_ways: bytes a second of copies to the GPU alone, from it alone, and in both directions at once, added
        up.
    gpu_updates: elements a second that the GPU updates in its memory.
    cpu_memory: bytes a second that loops of the CPU read and write in memory, while copies run in both directions.
    base: the memory of the GPU that CUDA's context and Sluice's kernels take.
    computing: seconds that the caller computes on the GPU in a step, for the plan's prediction of the step's time; 0: not known.
    between_gpus: bytes a second that a GPU reads from the memory of the host's other GPUs, while all GPUs do so; 0: it is measured,
        and plan() assumes that the GPUs do not read each other's memory.
    """

    to_gpu: float
    from_gpu: float
    both_ways: float
    gpu_updates: float
    cpu_memory: float
    base: Size
    computing: float = 0.0
    between_gpus: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sections:
    """The ranks that have sections of one model: all units of the model, in the model's order, and the number of units of each
    rank, or, where each has several chunks of consecutive units, of the first chunks of all ranks, then of the second ones."""

    ranks: Ranks
    units: tuple[Unit, ...]
    counts: tuple[int, ...]


@knows_its_keywords
@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an engine. Only `memory` must be stated.

    memory: the budget of the whole process, including the caller's own memory (`reserved`).
    disk: a folder, or several that are striped, for the parts that do not fit in memory: "FOLDER", "FOLDER:SIZE" or
        Folder.
    reserved: memory that the caller will allocate beyond the process's present memory: activations, workspace,
        gradients.
    optimizer: AdamW, Adam, Lion, SGD, Adafactor or Muon with its settings, or a list with one for each group.
    dtype: the type of parameters that state none, "f32", "bf16" or "f16"; the optimizer keeps f32 masters of the
        narrower types.
    state: the type of the optimizer's arrays, "f32", "bf16" or "8bit".
    master: "none": no masters of bf16 parameters are kept, and updates are rounded stochastically, by `seed`.
    threads: the number of threads for updates; 0: one for each core that the process may use.
    held_units: the maximum number of units that are held at once.
    trace_events: the number of latest events that are kept for Engine.save_trace(); 0: none.
    prefetch: the number of accesses to prefetch; 0: as planned.
    place: "memory", "disk" (or on a GPU "device") for everything, or a mapping of "parameters", "gradients" and "state" to
        these; None: as planned. It is for tests and measurements.
    given_back: the bytes that the process holds now and gives back before the last unit has its values.
    update_in_backward: a unit is updated as soon as it is released with gradients, which are never stored.
        Engine.begin_step() then takes the settings; gradients can neither be clipped by their norm nor kept.
    serve_touches: an access to a unit that is not held is served as a page fault, which fetches the unit; otherwise
        such an access ends the process with a message.
    sgemm: the address of a BLAS' sgemm_ (32-bit integers) for Muon's products, whose memory is in `reserved`; None: the
        matrix library beside Sluice's is loaded, with an OpenMP of its own. See sluice.torch.sgemm().
    ranks: this process's place among several that train the model together (sluice.Ranks); update_in_backward then
        needs `micro_batches` to be their number. None: the process trains alone.
    stage: the ZeRO stage, which says what is partitioned over the ranks, from 0 (nothing) to 3 (also parameters); None:
        the plans choose.
    planned: for sluice.plan() without `ranks`: a rank, and the number of ranks; None: the process trains alone.
    reproducible: gradients are the mean over the `micro_batches` that a step has over all ranks, with the same bits at any
        number of ranks: Engine.end_micro_batch() ends each.
    micro_batches: the micro-batches of a step over all ranks, a multiple of the number of ranks, where
        Engine.end_micro_batch() ends each;
        0: they are not counted. Without `reproducible` the number tells when sums over ranks may begin:
            Engine.end_gradients().
    sum_gradients: when ranks sum gradients: "step", when a step's last micro-batches end; or, at a stated stage of 2 or 3, "each_backward",
        after which a rank keeps its own part alone, and adds later ones to it.
    device_memory: the budget of a GPU's memory, and makes the engine compute on the GPU; 0: the CPU computes.
    device_reserved: the part of device_memory that the engine leaves to the caller. The memory of CUDA's context is counted in
        addition.
    device: the index of the GPU among those that the process may use. None: with `ranks` that of the environment variable LOCAL_RANK, where
        that is set and the process sees several GPUs, and otherwise the first one. Ranks share a GPU only if each gives its index and
        device_facts.
    updates: the processor of updates where a GPU computes, "gpu" or "cpu"; None: the plan chooses for each unit, and says why. Bits
        are the same.
    links: how ranks on GPUs exchange data: "gpus" of one host read each other's memory, "nccl" sends, or "host" memory is between them;
        None: measured rates decide. Bits are the same.
    device_facts: facts about the GPU. None: an engine measures them (DeviceEngine.facts()), and plan() assumes them.
    team: the address of libgomp's GOMP_parallel, or of a function like it, for the engine's loops, where the caller's
        own loops use it; None: the engine has threads of its own. See sluice.torch.team().
    sections: the ranks among which the model is cut, where the engine has one rank's units. `ranks` are then the ranks with the same
        section: both are Ranks.along() of the same ranks. None: the engine has all units.
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
    ranks: Optional[Ranks] = None
    stage: Optional[int] = None
    planned: Optional[tuple[int, int]] = None
    reproducible: bool = False
    micro_batches: int = 0
    sum_gradients: str = "step"
    device_memory: Size = 0
    device_reserved: Size = 0
    device: Optional[int] = None
    updates: Optional[str] = None
    links: Optional[str] = None
    device_facts: Optional[DeviceFacts] = None
    sections: Optional[Sections] = None

    @property
    def groups(self) -> list[Ranks]:
        """`ranks` and the sections' ranks, where they are given."""
        given = (self.ranks, None if self.sections is None else self.sections.ranks)
        return [ranks for ranks in given if ranks is not None]

    @property
    def others(self) -> Optional[Ranks]:
        """All ranks that train the model together, each with all of it or with a section."""
        return self.ranks if self.sections is None else self.sections.ranks.all


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The norm of all gradients of a step before clipping, and the factor that clipping multiplied them by."""

    gradient_norm: float
    clip_factor: float


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts since an engine was made: seconds in which the caller waited for transfers, seconds of the optimizer's
    arithmetic, and page faults that were served."""

    wait_seconds: float
    optimizer_seconds: float
    touches: int


@dataclasses.dataclass(frozen=True)
class LedgerLine:
    """The bytes of one purpose ("total": of all purposes) in one tier ("host", "disk", "device"), now and at most so far."""

    tier: str
    purpose: str
    current: int
    peak: int
