"""The gradients of a wrapped model's parameters that are in the engine."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _abi
from ..errors import StateError
from . import _homes
from ._engine import ModelEngine
from ._homes import Home
from ._units import DTYPES


@dataclasses.dataclass(eq=False)
class Entry:
    """A parameter's gradient, from its first backward until it is given up."""

    index: int  # the parameter's
    alive: bool = dataclasses.field(default=True, init=False)
    absent: bool = dataclasses.field(default=False, init=False)  # this rank has added nothing to it; others may have


class Stored:
    """The gradients of one wrapped model. They share a lock with all that uses its engine."""

    def __init__(
        self,
        engine: ModelEngine,
        homes: Sequence[Home],
        lock: AbstractContextManager[Any],
        use: Callable[[int, int], None],
        by_storage: Mapping[int, Home],
    ) -> None:
        """use: makes a unit present, for an access; by_storage: the homes by the addresses of their memory."""
        self._engine, self._homes, self._lock, self._use, self._by_storage = engine, homes, lock, use, by_storage
        self.entries: dict[int, Entry] = {}  # by the parameter's index
        self.ended: deque[Entry] = deque()  # those to which there is no reference; finalizers add them, even inside of an engine's call

    def begin(self, entry: Entry, values: torch.Tensor | None = None) -> None:
        """Begins a parameter's gradient, in place of one that is still there. values: None: this rank has added nothing to it."""
        home = self._homes[entry.index]
        with self._lock:
            self.give_up(home)
            self.entries[entry.index] = entry  # comes first: what is added has an entry, and is dropped with it
            entry.absent = values is None
            if values is not None:
                self.add(home, values)

    def _lacks(self, home: Home) -> bool:
        """Whether no rank has added anything to the gradient. Where this rank has not, all ranks are asked: it is a use."""
        entry = self.entries.get(home.index)
        if entry is None or not entry.absent:
            return False
        try:
            self._engine._gradient_norms(_indices([home]))
            return False
        except StateError as error:
            if "has no gradient in this step" not in str(error):
                raise  # what ranks have differs
            ask = self._engine._handle.ask
            if self._engine.failure or any(ask("sluice_engine_has_gradient", span.index) for span in home.spans):
                raise
            return True

    def drop_absent(self, home: Home) -> bool:
        """Drops what other ranks have added where this one has added nothing. Returns whether that is so. It asks nobody. With
        `reproducible` every gradient that becomes zero is then such a one: zeros would be a gradient of no micro-batch."""
        with self._lock:
            entry = self.entries.get(home.index)
            if entry is None or not (entry.absent or self._engine.options.reproducible):
                return False
            self._drop(home)
            entry.absent = True
            return True

    def give_up(self, home: Home) -> None:
        """Ends the parameter's gradient in the engine, if there is one."""
        entry = self.entries.get(home.index)
        if entry is not None:
            self.end(entry)

    def end(self, entry: Entry) -> None:
        """Ends this gradient, which the engine drops."""
        self._drop(self._homes[entry.index])
        entry.alive = False
        del self.entries[entry.index]

    def drop_ended(self) -> None:
        """Ends the gradients to which there is no reference."""
        if not self.ended:
            return
        count = len(self.ended)  # finalizers may add others at any time, which an iterator would not bear
        ended = [entry for entry in (self.ended[i] for i in range(count)) if self.entries.get(entry.index) is entry]
        self._drop(*(self._homes[entry.index] for entry in ended))
        for entry in ended:
            entry.alive = False
            del self.entries[entry.index]
        for _ in range(count):
            self.ended.popleft()  # they stay where they could not be ended

    def _drop(self, *homes: Home) -> None:
        self._engine._drop_gradients(_indices(homes))

    def set(self, home: Home, values: torch.Tensor) -> None:
        """Sets the gradient to `values`."""
        if self._engine.options.reproducible:
            raise StateError(
                f"the gradient of '{home.name}' is to be written, and the model was wrapped with reproducible=True, whose gradients "
                "are those of micro-batches; scale it, clip it by norm, drop it (zero_grad()), or use wrap(clip_value=)"
            )
        with self._lock:
            self._drop(home)
            self.add(home, values)

    def add(self, home: Home, values: torch.Tensor) -> None:
        """Adds to the gradient."""
        dense = (values.to_dense() if values.layout != torch.strided else values).detach()
        if dense.dtype not in DTYPES:
            dense = dense.float()
        dense = _homes.outside(dense.contiguous(), self._by_storage)
        address, size, kind = dense.data_ptr(), dense.element_size(), _abi.DTYPES[DTYPES[dense.dtype]]
        with self._lock:
            if (entry := self.entries.get(home.index)) is not None:
                entry.absent = False
            self._engine.follow_stream()
            for span in home.spans:
                self._use(span.unit, _abi.GRADIENT_ONLY)
                self._engine._handle.call("sluice_engine_add_gradient", span.index, address + span.first * size, kind)

    def multiply(self, homes: Sequence[Home], factor: float) -> None:
        """Multiplies the gradients of these parameters."""
        for some in self._in_order(homes):
            self._engine._multiply_gradients(_indices(some), factor)

    def norms(self, homes: Sequence[Home]) -> list[float]:
        """The norm of each one's gradient: NaN where an element is, else infinite where one is."""
        found = {}
        for some in self._in_order(homes):
            parts = iter(self._engine._gradient_norms(_indices(some)))
            found.update({home.index: _together(list(itertools.islice(parts, len(home.spans)))) for home in some})
        return [found.get(home.index, 0.0) for home in homes]

    def _in_order(self, homes: Sequence[Home]) -> Iterator[Sequence[Home]]:
        """Those that have a gradient: all at once, or, where other ranks may have what this one lacks, one after another, since ranks use
        gradients in the same order."""
        if not any(entry.absent for home in homes if (entry := self.entries.get(home.index)) is not None):
            yield homes
            return
        for home in homes:
            if not self._lacks(home):
                yield [home]

    def read(self, home: Home) -> torch.Tensor:
        """A copy of the gradient."""
        if self._lacks(home):
            return torch.zeros_like(home.memory, memory_format=torch.contiguous_format)
        copy = torch.empty_like(home.memory, memory_format=torch.contiguous_format)
        kind = _abi.DTYPES[DTYPES[copy.dtype]]
        with self._lock:
            self._engine.follow_stream()
            for span in home.spans:
                to = span.of(copy.view(-1)).data_ptr()
                self._engine._handle.call("sluice_engine_get_gradient", span.index, to, kind)
        return copy


def _indices(homes: Iterable[Home]) -> list[int]:
    """The engine's numbers for all spans of these parameters."""
    return [span.index for home in homes for span in home.spans]


def _together(norms: Sequence[float]) -> float:
    """The norm of what has these norms in its parts."""
    if len(norms) == 1:
        return norms[0]
    nan = next((norm for norm in norms if math.isnan(norm)), None)  # for hypot() infinity comes before NaN
    return math.hypot(*norms) if nan is None else nan
