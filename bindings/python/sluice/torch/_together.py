"""The ranks that wrap a model together: they find and join each other, compare what they were given, begin with rank 0's values, and keep
buffers alike."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar, Union

import torch
import torch.distributed
from torch.distributed.rendezvous import rendezvous

from ..errors import Error, InvalidArgumentError, StateError
from ..model import Folder, Path, folders_of
from ..ranks import Ranks, along, check_deadlines
from ._gloo_links import GlooLinks
from ._gpu import Gpu

T = TypeVar("T")

Which = Union["torch.distributed.ProcessGroup", "Together", bool, None]
"""Which ranks wrap a model together: None: those that are found; False: this process alone; a process group: its ranks. Together: those that
have met already."""

_Store = Any  # torch.distributed.Store, of which PyTorch tells type checkers nothing
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # mpirun, mpiexec, srun
_numbers: Counter[str] = Counter()  # of the models that the same ranks have wrapped, which all do in the same order
_stores: list[_Store] = []  # the store that torchrun's ranks share, once there is one


class Together:
    """The ranks that wrap one model; without others (`ranks` is None) everything is left as it is. All ranks call the same
    functions in the same order. Thread rule: one thread at a time."""

    def __init__(
        self, ranks: Optional[Ranks] = None, here: int = 1, planned: Optional[tuple[int, int]] = None
    ) -> None:
        """here: how many ranks share this machine. planned: as Options has it, for a plan alone."""
        self.ranks, self.here, self.planned = ranks, here, planned
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def along(self, mesh: str, axis: str) -> Together:
        """Returns the ranks along an axis of a mesh, as Ranks.along() does."""
        return Together(along(self.ranks, mesh, axis), self.here)

    # ---- what they were given ----

    def agreed(self, make: Callable[[], T], what: str = "whether the model can be wrapped") -> T:
        """Returns what make() returns. Raises on every rank where it raises on one."""
        return make() if self.ranks is None else self.ranks.agreed(what, make)

    def check_alike(self, given: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Raises InvalidArgumentError that names what is not the same on all ranks."""
        if self.ranks is None:
            return
        given = {
            **given,
            "which parameters are on the meta device": [name for name, p in model.named_parameters() if p.is_meta],
            "the model (its buffers)": [(name, b.dtype, tuple(b.shape), b.is_meta) for name, b in model.named_buffers()],
        }
        own = {name: _short(value) for name, value in given.items()}
        theirs = self._exchange("what wrap() was given", own)
        for rank, other in enumerate(theirs):
            for name in {**theirs[0], **other}:  # in one order on all ranks
                if other.get(name) != theirs[0].get(name):
                    raise InvalidArgumentError(
                        f"{name} is {other.get(name)} on rank {rank}, and {theirs[0].get(name)} on rank 0; give all ranks the same"
                    )

    def _exchange(self, name: str, own: Any) -> list[Any]:
        assert self.ranks is not None, "there are others"
        return [json.loads(text) for text in self.ranks.exchange(name, json.dumps(own).encode())]

    # ---- what they share of a machine ----

    def threads(self, stated: int) -> int:
        """How many threads update: what is stated, else PyTorch's, but no more than this rank's share of the cores."""
        if stated or self.here == 1:
            return stated or torch.get_num_threads()
        return min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // self.here))

    def folders(self, disk: Union[Path, Folder, Sequence[Union[Path, Folder]], None]) -> Any:
        """The disk folders, with this rank's share of the free space where no limit is stated."""
        if disk is None or self.here == 1:
            return disk
        return [_shared(folder, self.here) for folder in folders_of(disk)]

    # ---- values ----

    def share_values(self, model: torch.nn.Module) -> None:
        """Brings rank 0's values of parameters that have some to all ranks."""
        self._share("a parameter", (p.data for p in model.parameters() if not p.is_meta))

    @contextlib.contextmanager
    def random_of_rank_0(self, gpu: Optional[Gpu] = None) -> Iterator[None]:
        """Lets all ranks draw rank 0's random numbers inside of the `with`, also on their GPUs, and the others go on with their own after
        it."""
        devices = [] if gpu is None or gpu.device.type != "cuda" else [gpu.device]
        with torch.random.fork_rng(devices=devices, enabled=self.ranks is not None and self.ranks.rank != 0):
            state = torch.get_rng_state()
            self._share("the random state", [state])
            torch.set_rng_state(state)
            for device in devices:
                state = torch.cuda.get_rng_state(device)  # a tensor on the CPU
                self._share("the random state of the GPUs", [state])
                torch.cuda.set_rng_state(state, device)
            yield

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Brings rank 0's values of the buffers in which ranks differ to all of them."""
        self._share("a buffer", [model.get_buffer(name) for name in sorted(self._differing(model))])

    def compare_buffers(self, model: torch.nn.Module) -> None:
        """Refuses, on all ranks, buffers that are not the same on all of them."""
        for name, rank in self._differing(model).items():
            owner = name.rpartition(".")[0]
            of = f" of '{owner}' ({type(model.get_submodule(owner)).__name__})"
            raise StateError(
                f"the buffer '{name}'{of} has other values on rank {rank} than on rank 0, and the model was "
                "wrapped with reproducible=True; let it depend neither on inputs nor on how many there were, or freeze "
                "what changes it by eval()"
            )

    def _differing(self, model: torch.nn.Module) -> dict[str, int]:
        """The buffers that a rank has otherwise than rank 0, with that rank. (Batch norm changes its buffers without a trace in their
        version counters.)"""
        if self.ranks is None:
            return {}
        buffers = {name: b for name, b in model.named_buffers() if b.numel() and not b.is_meta}
        if not buffers:
            return {}
        kinds = hashlib.sha256(repr([(name, b.dtype, tuple(b.shape)) for name, b in buffers.items()]).encode()).hexdigest()
        found = self._exchange("buffers", [kinds, *(_digest(buffer) for buffer in buffers.values())])
        differing: dict[str, int] = {}
        for rank, (other, *digests) in enumerate(found):
            if other != found[0][0]:
                raise StateError(
                    f"the model's buffers have other names, types or shapes on rank {rank} than on rank 0; all ranks have the same"
                )
            differing |= {name: rank for name, one, first in zip(buffers, digests, found[0][1:], strict=True) if one != first}
        return differing

    def _share(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        if self.ranks is None:
            return
        with torch.no_grad():
            for tensor in tensors:
                flat = tensor.cpu().contiguous()  # a copy of what is on a GPU
                self.ranks.broadcast(what, flat.data_ptr(), flat.numel() * flat.element_size())
                if flat is not tensor and self.ranks.rank != 0:
                    tensor.copy_(flat)

    # ---- the end ----

    def close(self) -> None:
        """Leaves the other ranks."""
        if self.ranks is not None:
            self.ranks.close()


def _short(value: Any) -> str:
    """A value as a text that can be compared; what is long by its digest."""
    text = repr(value)
    if len(text) <= 200:
        return text
    return f"{text[:60]}... ({len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _digest(buffer: torch.Tensor) -> str:
    flat = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def _shared(folder: Folder, ranks: int) -> Folder:
    if folder.limit is not None:
        return folder
    try:
        free = os.statvfs(folder.path)
    except OSError:
        return folder  # the engine says what is wrong with it
    return Folder(folder.path, max(1, free.f_bavail * free.f_frsize * 19 // 20 // ranks))


@contextlib.contextmanager
def together(which: Which, silence: float, patience: float) -> Iterator[Together]:
    """Joins the other ranks, where there are any. An exception inside of the `with` ends the work of all of them."""
    made = _join(which, silence, patience)
    try:
        yield made
    except BaseException as error:
        if made.ranks is not None:
            with contextlib.suppress(Error):
                made.ranks.fail(f"{type(error).__name__}: {error}"[:4000])
        made.close()
        raise


def unmet(which: Which) -> Together:
    """This process' place among the ranks for a plan, without any other rank: those of the environment count as of this machine."""
    size, rank = size_and_rank(which)
    return Together() if size == 1 else Together(None, int(os.environ.get("LOCAL_WORLD_SIZE", size)), (rank, size))


# ---- how they find and join each other ----


def size_and_rank(ranks: Which = None) -> tuple[int, int]:
    """How many ranks there are, and which this is, without telling them anything."""
    group = _process_group(ranks)
    if group is not None:
        return group.size(), group.rank()
    return _of_environment() if ranks is None else (1, 0)


def _process_group(ranks: Any) -> torch.distributed.ProcessGroup | None:
    """The process group that is given, or the script's own; None where there is none."""
    if ranks is None or ranks is False:
        found = ranks is None and torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.group.WORLD if found else None
    if torch.distributed.is_available() and isinstance(ranks, torch.distributed.ProcessGroup):
        return ranks
    raise InvalidArgumentError(
        f"ranks is {ranks!r:.80}; it is a process group of torch.distributed that this process belongs to, None for the ranks "
        "that are found, or False for this process alone"
    )


def _of_environment() -> tuple[int, int]:
    """The number of ranks and this one's, as torchrun tells; one where no launcher has started this process with others."""
    given = {name: os.environ.get(name, "") for name in _OF_TORCHRUN}
    missing = [name for name, value in given.items() if not value]
    if missing and given["WORLD_SIZE"] not in ("", "1"):
        raise InvalidArgumentError(
            f"the environment has WORLD_SIZE={given['WORLD_SIZE']}, and no {', '.join(missing)}, without which the ranks do not find "
            "each other; start the script with torchrun, or unset WORLD_SIZE; with ranks=False this process trains alone"
        )
    for name in _OF_OTHER_LAUNCHERS:
        if not given["WORLD_SIZE"] and os.environ.get(name, "1") != "1":
            raise InvalidArgumentError(
                f"mpirun or srun has started {os.environ[name]} processes ({name}), which do not find each other: call "
                "torch.distributed.init_process_group() before, or start the script with torchrun; with ranks=False each trains alone"
            )
    if missing or not torch.distributed.is_available():
        return 1, 0
    try:
        size, rank = int(given["WORLD_SIZE"]), int(given["RANK"])
    except ValueError:
        size, rank = 0, 0
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"the environment has RANK={given['RANK']} and WORLD_SIZE={given['WORLD_SIZE']}, which are no rank and no number of "
            "ranks; start the script with torchrun, or unset them"
        )
    return size, rank


class Meeting:
    """The place where ranks exchange values before there are engines: a store of torch.distributed. All ranks call the same
    functions in the same order. Errors are StateErrors. The store may outlive the ranks: torchrun keeps its own when it restarts them."""

    def __init__(self, which: Which, patience: float) -> None:
        """patience: after so many seconds a rank that has not come is missing."""
        self.size, self.rank = size_and_rank(which)
        self._limit = datetime.timedelta(seconds=patience)
        theirs = _process_group(which)
        self._where, of = "the process group's store", "" if theirs is None else theirs.group_name
        if theirs is None:
            self._where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        number = _numbers[of]
        _numbers[of] += 1
        self._gathered = 0
        self._told: list[str] = []
        with self._telling():
            shared = self._store_of_torchrun() if theirs is None else theirs.get_group_store()
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # ranks that ended while they joined have left values
            self._store: _Store = torch.distributed.PrefixStore(f"sluice/{attempt}/{number}", shared)  # type: ignore[attr-defined]

    def _store_of_torchrun(self) -> _Store:
        """The store that torchrun's ranks share. One for the process, since the first rank may be its server."""
        if not _stores:
            # It would count the ranks that have come, and could not name the others: to it each is alone.
            _stores.append(next(iter(rendezvous("env://", self.rank, 1, timeout=self._limit)))[0])
        return _stores[0]

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value of each rank, as JSON: a stranger's bytes are never run. Raises StateError that names the ranks that have not
        come within the time."""
        keys = [f"{self._gathered} of rank {rank}" for rank in range(self.size)]
        self._gathered += 1
        self._told.append(keys[self.rank])
        with self._telling():
            self._store.set(keys[self.rank], json.dumps(value))
            try:
                self._store.wait(keys, self._limit)
            except RuntimeError:
                missing = [f"rank {rank}" for rank, key in enumerate(keys) if not self._store.check([key])]
                if missing:
                    listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                    raise StateError(
                        f"{listed} of {self.size} ranks did not come within {self._limit.total_seconds():g} seconds (patience). Every "
                        "rank calls sluice.torch.wrap(); with ranks=False this process trains alone"
                    ) from None
            return [json.loads(self._store.get(key)) for key in keys]

    def gloo(self) -> Any:
        """A Gloo group of the ranks, beside whatever the script uses."""
        apart = self.gather(uuid.uuid4().hex)[0]  # what Gloo tells stays in the store
        with self._telling():
            store = torch.distributed.PrefixStore(apart, self._store)  # type: ignore[attr-defined]
            return torch.distributed.ProcessGroupGloo(store, self.rank, self.size, self._limit)

    def forget(self) -> None:
        """Deletes what this rank has told, once all have read it: restarted ranks would take it for that of each other."""
        with contextlib.suppress(RuntimeError):  # not each kind of store can
            for key in self._told:
                self._store.delete_key(key)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Lets errors of the store say what to do."""
        try:
            yield
        except StateError:
            raise
        except (RuntimeError, ValueError) as error:
            raise StateError(
                f"the {self.size} ranks do not find each other over {self._where}, which rank 0 or torchrun serves: {error}. Every rank "
                "calls sluice.torch.wrap(); with ranks=False this process trains alone"
            ) from error


def _join(which: Which, silence: float, patience: float) -> Together:
    """Joins the ranks that there are: over Gloo, and those of a host over memory that they share. All ranks call it. The arguments are
    wrap()'s."""
    check_deadlines(silence, patience)
    if isinstance(which, Together):
        return which
    if size_and_rank(which)[0] < 2:
        return Together()
    meeting = Meeting(which, patience)
    places = meeting.gather(place_of_process())
    host = places[meeting.rank]
    ranks = Ranks.linked(GlooLinks(meeting.gloo()), "Gloo", host=str(host), silence=silence, patience=patience)
    try:
        ranks.barrier("joining")
    except BaseException:
        ranks.close()
        raise
    meeting.forget()
    return Together(ranks, places.count(host))


def place_of_process() -> list[Any]:
    """The machine, the names of processes in it, and the user: processes that have these in common can open each other's memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return [file.read().strip(), os.stat("/proc/self/ns/pid").st_ino, os.geteuid()]
