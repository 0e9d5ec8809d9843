"""Finds the ranks that train together, and lets them tell each other what they need before there are engines."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections import Counter
from typing import Any, Union

import torch
import torch.distributed
from torch.distributed.rendezvous import rendezvous

from ..errors import InvalidArgumentError, StateError

Which = Union["torch.distributed.ProcessGroup", bool, None]
"""Which ranks wrap a model together: None: those that are found; False: this process alone; a process group: its ranks."""

_Store = Any  # torch.distributed.Store, of which PyTorch tells type checkers nothing
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MISSING = "missing"  # where rank 0 says which ranks have not come
_TO_KNOW = datetime.timedelta(seconds=2)  # how much later others may know of it
_numbers: Counter[str] = Counter()  # of the groups that were made of the same ranks, which all make in the same order
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


def _store_of_environment(rank: int, limit: datetime.timedelta) -> _Store:
    """The store that torchrun's ranks share. One for the process, since the first rank may be its server."""
    if not _stores:
        # It would count the ranks that have come, and could not name the others: to it each is alone.
        _stores.append(next(iter(rendezvous("env://", rank, 1, timeout=limit)))[0])
    return _stores[0]


def _wait_for_all(store: _Store, rank: int, size: int, limit: datetime.timedelta) -> None:
    """Returns when all ranks have come. Raises StateError that names those that have not: rank 0 finds them and tells the others,
    so that all name the same. The store may be gone with rank 0, which waits until they know."""
    names = [f"rank {other}" for other in range(size)]
    store.set(names[rank], "came")
    if rank == 0:
        missing = _missing(store, names, limit)
        store.set(_MISSING, json.dumps(missing))
        if missing:
            with contextlib.suppress(RuntimeError):  # one that ends meanwhile needs no answer
                store.wait([f"{name} knows" for name in names[1:] if name not in missing], _TO_KNOW)
    elif _missing(store, [_MISSING], limit + _TO_KNOW):  # rank 0 has told nothing: it is late, or not there at all
        missing = [name for name in names if not store.check([name])] or names[:1]
    else:
        missing = json.loads(store.get(_MISSING))
        store.set(f"{names[rank]} knows", "")
    if missing:
        listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise StateError(
            f"{listed} of {size} ranks did not come within {limit.total_seconds():g} seconds (patience). Every rank calls "
            "sluice.torch.wrap(); with ranks=False this process trains alone"
        )


def _missing(store: _Store, names: list[str], limit: datetime.timedelta) -> list[str]:
    """Those of the names that are not in the store when all are, or the time has passed."""
    try:
        store.wait(names, limit)
        return []
    except RuntimeError:
        return [name for name in names if not store.check([name])]


class Group:
    """A Gloo group of the ranks' own, beside whatever the script uses. All ranks call the same functions in the same order.
    Errors are sluice.StateError, where another rank is gone. Thread rule: one thread at a time."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """group: a ProcessGroupGloo. Use found_group()."""
        self.group, self.rank, self.size = group, rank, size

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, as JSON has it: what a stranger may have sent is never run."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: self.group.allgather(lengths, torch.tensor([len(mine)])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda: self.group.allgather(texts, padded))
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def _wait(self, begin: Any) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise StateError(f"another rank is gone, or cannot be reached: {error}") from error

    def end(self) -> None:
        """Closes the connections. No other function is called afterwards."""
        self.group = None


def found_group(ranks: Which, patience: float) -> Group | None:
    """Makes the group. All ranks call it. Returns None where there is one rank. Raises StateError where the others do not
    come, or do not answer in a call of the group, within so many seconds."""
    size, rank = size_and_rank(ranks)
    if size < 2:
        return None
    if not torch.distributed.is_gloo_available():
        raise StateError(
            f"there are {size} ranks, and this build of PyTorch has no Gloo, by which they find each other; use another, or "
            "wrap the model with ranks=False"
        )
    theirs, limit = _process_group(ranks), datetime.timedelta(seconds=patience)
    of = "" if theirs is None else theirs.group_name
    number = _numbers[of]
    _numbers[of] += 1
    try:
        shared = _store_of_environment(rank, limit) if theirs is None else theirs.get_group_store()
        store = torch.distributed.PrefixStore(f"sluice/{number}", shared)  # type: ignore[attr-defined]
        _wait_for_all(store, rank, size, limit)
        made = torch.distributed.ProcessGroupGloo(store, rank, size, limit)
    except StateError:
        raise
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if theirs is None else "the process group's store"
        raise StateError(
            f"the {size} ranks do not find each other over {where}, which rank 0 or torchrun serves: {error}. Every rank calls "
            "sluice.torch.wrap(); with ranks=False this process trains alone"
        ) from error
    return Group(made, rank, size)


def place_of_process() -> list[Any]:
    """What two processes have in common that can open each other's memory: the machine and the processes' names in it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
        return [machine, os.stat("/proc/self/ns/pid").st_ino, os.geteuid()]
    except OSError:
        return [os.uname().nodename, os.getpid(), os.geteuid()]
