"""How a process finds the ranks that train together, and joins them: over memory that they share on a host, else over Gloo."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed
from torch.distributed.rendezvous import rendezvous

from ..errors import Error, InvalidArgumentError, StateError
from ..ranks import MOST_LOCAL, Ranks, check_deadlines, shared_memory
from ._gloo_links import GlooLinks

Which = Union["torch.distributed.ProcessGroup", bool, None]
"""Which ranks wrap a model together: None: those that are found; False: this process alone; a process group: its ranks."""

_Store = Any  # torch.distributed.Store, of which PyTorch tells type checkers nothing
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_numbers: Counter[str] = Counter()  # of the models that the same ranks have wrapped, which all do in the same order
_stores: list[_Store] = []  # the store that torchrun's ranks share, once there is one


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
    """What torchrun tells of the ranks; one where it has not started this process."""
    given = {name: os.environ.get(name, "") for name in _OF_TORCHRUN}
    if not all(given.values()) or not torch.distributed.is_available():
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
    """Where ranks tell each other what they need before there are engines: a store of torch.distributed. All ranks call the same
    functions in the same order. Errors are StateErrors."""

    def __init__(self, which: Which, patience: float) -> None:
        """patience: after so many seconds a rank that has not come is missing."""
        self.size, self.rank = size_and_rank(which)
        self._limit = datetime.timedelta(seconds=patience)
        theirs = _process_group(which)
        self._where, of = "the process group's store", "" if theirs is None else theirs.group_name
        if theirs is None:
            self._where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with self._telling():
            shared = self._store_of_torchrun() if theirs is None else theirs.get_group_store()
            self._store: _Store = torch.distributed.PrefixStore(f"sluice/{_numbers[of]}", shared)  # type: ignore[attr-defined]
        _numbers[of] += 1
        self._gathered = 0

    def _store_of_torchrun(self) -> _Store:
        """The store that torchrun's ranks share. One for the process, since the first rank may be its server."""
        if not _stores:
            # It would count the ranks that have come, and could not name the others: to it each is alone.
            _stores.append(next(iter(rendezvous("env://", self.rank, 1, timeout=self._limit)))[0])
        return _stores[0]

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, as JSON has it: what a stranger may have sent is never run. Raises StateError that names the ranks
        that have not come within the time."""
        keys = [f"{self._gathered} of rank {rank}" for rank in range(self.size)]
        self._gathered += 1
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
        with self._telling():
            return torch.distributed.ProcessGroupGloo(self._store, self.rank, self.size, self._limit)

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


class Joined(NamedTuple):
    """This process' place among the ranks, and how many of them share this machine."""

    ranks: Ranks
    here: int


def join(which: Which, silence: float, patience: float) -> Optional[Joined]:
    """Joins the ranks that there are. All ranks call it. Returns None where this process trains alone. Warns where ranks of one
    machine cannot share memory. The arguments are wrap()'s."""
    check_deadlines(silence, patience)
    if size_and_rank(which)[0] < 2:
        return None
    meeting = Meeting(which, patience)
    places = meeting.gather(place_of_process())
    here = sum(place == places[meeting.rank] for place in places)
    descriptor = _opened(meeting) if here == meeting.size <= MOST_LOCAL else None
    if descriptor is None:
        host = "" if here == meeting.size else str(places[meeting.rank])  # ranks of a host alone share its memory
        return Joined(Ranks.linked(GlooLinks(meeting.gloo()), "Gloo", host=host, silence=silence, patience=patience), here)
    try:
        ranks = Ranks.local(descriptor, meeting.rank, silence=silence, patience=patience)
    finally:
        os.close(descriptor)
    try:
        ranks.barrier("joining")
    except BaseException:
        ranks.close()
        raise
    return Joined(ranks, here)


def place_of_process() -> list[Any]:
    """What two processes have in common that can open each other's memory: the machine and the processes' names in it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return [file.read().strip(), os.stat("/proc/self/ns/pid").st_ino, os.geteuid()]


def _opened(meeting: Meeting) -> Optional[int]:
    """A descriptor of memory that all ranks share, which rank 0 makes. None where one of them cannot open it."""
    with contextlib.ExitStack() as unless_all_have_it:
        descriptor, problem = None, None
        try:
            if meeting.rank == 0:
                descriptor = shared_memory(meeting.size)
                unless_all_have_it.callback(os.close, descriptor)
        except Error as error:
            problem = str(error)
        pid, number = meeting.gather([os.getpid(), descriptor])[0]
        if meeting.rank != 0 and number is not None:
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                unless_all_have_it.callback(os.close, descriptor)
            except OSError as error:
                problem = f"rank {meeting.rank} cannot open rank 0's: {error.strerror}"
        problems = [text for text in meeting.gather(problem) if text is not None]
        if not problems:
            unless_all_have_it.pop_all()
            return descriptor
    if meeting.rank == 0:
        warnings.warn(
            f"the ranks of this machine cannot exchange bytes through memory ({problems[0]}), and do so over Gloo, which is slower",
            RuntimeWarning,
            stacklevel=7,
        )
    return None
