"""What the ranks that wrap a model do alike: they compare what they were given, begin with rank 0's values, and keep buffers alike."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, TypeVar, Union

import torch

from ..errors import Error, InvalidArgumentError, StateError
from ..model import Folder, Path, folders_of
from ..ranks import Ranks
from ._joining import Which, join, size_and_rank

T = TypeVar("T")


class Together:
    """The ranks that wrap one model; without others (`ranks` is None) everything is left as it is. All ranks call the same
    functions in the same order. Thread rule: one thread at a time."""

    def __init__(
        self, ranks: Optional[Ranks] = None, here: int = 1, planned: Optional[tuple[int, int]] = None
    ) -> None:
        """here: how many ranks share this machine. planned: as Options has it, for a plan alone."""
        self.ranks, self.here, self.planned = ranks, here, planned
        self._model: Callable[[], Optional[torch.nn.Module]] = lambda: None
        self._seen: dict[str, bytes] = {}  # the digest of each buffer, as it was shared

    # ---- what they were given ----

    def agreed(self, make: Callable[[], T]) -> T:
        """What make() returns, where it raises on no rank; else an error on every one."""
        return make() if self.ranks is None else self.ranks.agreed("whether the model can be wrapped", make)

    def check_alike(self, given: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError that names what is not the same on all ranks."""
        if self.ranks is None:
            return
        own = {name: _short(value) for name, value in given.items()}
        theirs = [json.loads(text) for text in self.ranks.exchange("what wrap() was given", json.dumps(own).encode())]
        for rank, other in enumerate(theirs):
            for name in other.keys() | theirs[0].keys():
                if other.get(name) != theirs[0].get(name):
                    raise InvalidArgumentError(
                        f"{name} is {other.get(name)} on rank {rank}, and {theirs[0].get(name)} on rank 0; give all ranks the same"
                    )

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
        if self.ranks is not None:
            self._compare(self.ranks, model)
        self._share("a parameter", (p.data for p in model.parameters() if not p.is_meta))

    @contextlib.contextmanager
    def random_of_rank_0(self) -> Iterator[None]:
        """Lets all ranks draw rank 0's random numbers inside of the `with`, and the others go on with their own after it."""
        if self.ranks is None:
            yield
            return
        own = torch.get_rng_state()
        state = own.clone()
        self._share("the random state", [state])
        torch.set_rng_state(state)
        try:
            yield
        finally:
            if self.ranks.rank != 0:
                torch.set_rng_state(own)

    def watch_buffers(self, model: torch.nn.Module) -> None:
        """Brings rank 0's buffers to all ranks, now and at each share_buffers()."""
        self._model = weakref.ref(model)
        self.share_buffers()

    def share_buffers(self) -> None:
        """Brings rank 0's values of the buffers that any rank has changed to all ranks."""
        buffers = self._buffers()
        if self.ranks is None or not buffers and not self._seen:
            return
        # (Batch norm changes its buffers without a trace in their version counters.)
        changed = [i for i, (name, buffer) in enumerate(buffers.items()) if self._seen.get(name) != _digest(buffer)]
        found = [json.loads(text) for text in self.ranks.exchange("buffers", json.dumps([len(buffers), changed]).encode())]
        for rank, (count, _) in enumerate(found):
            if count != found[0][0]:
                raise StateError(
                    f"the model has {found[0][0]} buffers on rank 0, and {count} on rank {rank}; all ranks have the same"
                )
        chosen = sorted(set().union(*(numbers for _, numbers in found)))
        names = list(buffers)
        self._share("a buffer", (buffers[names[number]] for number in chosen))
        self._seen |= {names[number]: _digest(buffers[names[number]]) for number in chosen}

    def compare_buffers(self) -> None:
        """Refuses, on all ranks, buffers that are not the same on all of them."""
        if self.ranks is None:
            return
        own = {name: [list(b.shape), str(b.dtype), _digest(b).hex()] for name, b in self._buffers().items()}
        found = [json.loads(text) for text in self.ranks.exchange("buffers", json.dumps(own).encode())]
        for rank, theirs in enumerate(found):
            for name in sorted(theirs.keys() | found[0].keys()):
                if theirs.get(name) != found[0].get(name):
                    raise StateError(
                        f"the buffer '{name}'{self._owner(name)} has other values on rank {rank} than on rank 0, and the model was "
                        "wrapped with reproducible=True; let it depend neither on inputs nor on how many there were, or freeze "
                        "what changes it by eval()"
                    )

    def _buffers(self) -> dict[str, torch.Tensor]:
        model = self._model()
        return {} if model is None else {name: b for name, b in model.named_buffers() if b.numel() and not b.is_meta}

    def _owner(self, buffer: str) -> str:
        """Whose buffer that is, for messages."""
        model, (module, _, _) = self._model(), buffer.rpartition(".")
        owner = None if model is None else dict(model.named_modules()).get(module)
        return "" if owner is None else f" of '{module}' ({type(owner).__name__})"

    def _compare(self, ranks: Ranks, model: torch.nn.Module) -> None:
        """Refuses, on all ranks, a model that has other tensors on another rank, or has them without values."""
        of_meta = sum(p.is_meta for p in model.parameters())
        tensors = [(name, str(t.dtype), list(t.shape), t.is_meta) for name, t in (*model.named_parameters(), *model.named_buffers())]
        digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
        found = [json.loads(text) for text in ranks.exchange("the model", json.dumps([of_meta, digest]).encode())]
        for rank, (count, other) in enumerate(found):
            if count != found[0][0]:
                raise InvalidArgumentError(
                    f"{count} parameters are on the meta device on rank {rank}, and {found[0][0]} on rank 0; make the model alike "
                    "on all ranks"
                )
            if other != found[0][1]:
                raise InvalidArgumentError(
                    f"the model's parameters or buffers have other names, types or shapes on rank {rank} than on rank 0; make the "
                    "model alike on all ranks"
                )

    def _share(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        if self.ranks is None:
            return
        with torch.no_grad():
            for tensor in tensors:
                flat = tensor.contiguous()
                self.ranks.broadcast(what, flat.data_ptr(), flat.numel() * flat.element_size())
                if flat.data_ptr() != tensor.data_ptr():
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


def _digest(buffer: torch.Tensor) -> bytes:
    flat = buffer.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()


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
    joined = join(which, silence, patience)
    if joined is None:
        yield Together()
        return
    made = Together(*joined)
    try:
        yield made
    except BaseException as error:
        with contextlib.suppress(Error):
            joined.ranks.fail(f"{type(error).__name__}: {error}"[:4000])
        made.close()
        raise


def unmet(which: Which) -> Together:
    """This process' place among the ranks for a plan, without any other rank: those of the environment count as of this machine."""
    size, rank = size_and_rank(which)
    return Together() if size == 1 else Together(None, int(os.environ.get("LOCAL_WORLD_SIZE", size)), (rank, size))
