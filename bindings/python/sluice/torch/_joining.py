"""How a rank joins the others: over memory that they share on a host, else over Gloo."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import NamedTuple, Optional

from ..errors import Error
from ..ranks import MOST_LOCAL, Ranks, check_deadlines, shared_memory
from ._gloo_links import GlooLinks
from ._group import Group, Which, found_group, place_of_process


class Joined(NamedTuple):
    """This process' place among the ranks, and how many of them share this machine."""

    ranks: Ranks
    here: int


def join(which: Which, silence: float, patience: float) -> Optional[Joined]:
    """Joins the ranks that there are. All ranks call it. Returns None where this process trains alone. Warns where ranks of one
    machine cannot share memory. The arguments are wrap()'s."""
    check_deadlines(silence, patience)
    group = found_group(which, patience)
    if group is None:
        return None
    places = group.gather(place_of_process())
    here = sum(place == places[group.rank] for place in places)
    descriptor = _opened(group) if here == group.size <= MOST_LOCAL else None
    if descriptor is None:
        host = "" if here == group.size else str(places[group.rank])  # ranks of a host alone share its memory
        return Joined(Ranks.linked(GlooLinks(group), "Gloo", host=host, silence=silence, patience=patience), here)
    try:
        ranks = Ranks.local(descriptor, group.rank, silence=silence, patience=patience)
    finally:
        os.close(descriptor)
    try:
        ranks.barrier("joining")
    except BaseException:
        ranks.close()
        raise
    group.end()
    return Joined(ranks, here)


def _opened(group: Group) -> Optional[int]:
    """A descriptor of memory that all ranks share, which rank 0 makes. None where one of them cannot open it."""
    with contextlib.ExitStack() as unless_all_have_it:
        descriptor, problem = None, None
        try:
            if group.rank == 0:
                descriptor = shared_memory(group.size)
                unless_all_have_it.callback(os.close, descriptor)
        except Error as error:
            problem = str(error)
        pid, number = group.gather([os.getpid(), descriptor])[0]
        if group.rank != 0 and number is not None:
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                unless_all_have_it.callback(os.close, descriptor)
            except OSError as error:
                problem = f"rank {group.rank} cannot open rank 0's: {error.strerror}"
        problems = [text for text in group.gather(problem) if text is not None]
        if not problems:
            unless_all_have_it.pop_all()
            return descriptor
    if group.rank == 0:
        warnings.warn(
            f"the ranks of this machine cannot exchange bytes through memory ({problems[0]}), and do so over Gloo, which is slower",
            RuntimeWarning,
            stacklevel=7,
        )
    return None
