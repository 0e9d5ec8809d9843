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

    # ---- what they were given ----

    def agreed(self, make: Callable[[], T]) -> T:
        """What make() returns, where it raises on no rank; else an error on every one."""
        return make() if self.ranks is None else self.ranks.agreed("whether the model can be wrapped", make)

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
            for name in other.keys() | theirs[0].keys():
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
    def random_of_rank_0(self) -> Iterator[None]:
        """Lets all ranks draw rank 0's random numbers inside of the `with`, and the others go on with their own after it."""
        with torch.random.fork_rng(devices=(), enabled=self.ranks is not None and self.ranks.rank != 0):
            state = torch.get_rng_state()
            self._share("the random state", [state])
            torch.set_rng_state(state)
            yield

    def watch_buffers(self, model: torch.nn.Module) -> None:
        """Brings rank 0's buffers to all ranks, now and at each share_buffers()."""
        self._model = weakref.ref(model)
        self.share_buffers()

    def share_buffers(self) -> None:
        """Brings rank 0's values of the buffers in which ranks differ to all of them."""
        buffers = self._buffers()
        self._share("a buffer", [buffers[name] for name in sorted(self._differing(buffers))])

    def compare_buffers(self) -> None:
        """Refuses, on all ranks, buffers that are not the same on all of them."""
        for name, rank in self._differing(self._buffers()).items():
            raise StateError(
                f"the buffer '{name}'{self._owner(name)} has other values on rank {rank} than on rank 0, and the model was "
                "wrapped with reproducible=True; let it depend neither on inputs nor on how many there were, or freeze "
                "what changes it by eval()"
            )

    def _differing(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The buffers that a rank has otherwise than rank 0, with that rank. (Batch norm changes its buffers without a trace in their
        version counters.)"""
        if self.ranks is None or not buffers:
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

    def _buffers(self) -> dict[str, torch.Tensor]:
        model = self._model()
        return {} if model is None else {name: b for name, b in model.named_buffers() if b.numel() and not b.is_meta}

    def _owner(self, buffer: str) -> str:
        """Whose buffer that is, for messages."""
        model, (module, _, _) = self._model(), buffer.rpartition(".")
        owner = None if model is None else dict(model.named_modules()).get(module)
        return "" if owner is None else f" of '{module}' ({type(owner).__name__})"

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


def _digest(buffer: torch.Tensor) -> str:
    flat = buffer.detach().contiguous().view(-1).view(torch.uint8)
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
