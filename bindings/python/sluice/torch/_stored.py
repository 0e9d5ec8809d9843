"""The gradients that an engine has of a wrapped model's parameters."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .. import _abi
from . import _homes
from ._homes import Home, ModelEngine
from ._units import DTYPES

if TYPE_CHECKING:
    from ._gradients import Slot


class Stored:
    """Of one session, whose lock it shares."""

    def __init__(
        self,
        engine: ModelEngine,
        lock: AbstractContextManager[Any],
        use: Callable[[int, int], None],
        by_storage: Mapping[int, Home],
    ) -> None:
        """use: makes a unit present, for an access; by_storage: whose memory begins where."""
        self._engine, self._lock, self._use, self._by_storage = engine, lock, use, by_storage
        self.slots: dict[int, Slot] = {}  # by the parameter's index
        # Gradients that nobody refers to, (parameter, serial); the collector may say so inside of an engine's call.
        self.ended: deque[tuple[int, int]] = deque()

    def begin(self, slot: Slot, values: torch.Tensor) -> None:
        """A first gradient; one that the engine still has of this parameter ends."""
        with self._lock:
            self.give_up(slot.home)
            self.slots[slot.home.index] = slot
            self.set(slot.home, values)

    def give_up(self, home: Home) -> None:
        """The gradient that the engine has of this parameter, if any, ends."""
        slot = self.slots.get(home.index)
        if slot is not None:
            self.end(slot)

    def end(self, slot: Slot) -> None:
        """It is none any more."""
        self._drop(slot.home)
        slot.alive = False
        del self.slots[slot.home.index]

    def drop_ended(self) -> None:
        """Those end to which nobody refers."""
        while self.ended:
            index, serial = self.ended.popleft()
            slot = self.slots.get(index)
            if slot is not None and slot.serial == serial:
                self.end(slot)

    def _drop(self, home: Home) -> None:
        for span in home.spans:
            self._engine._handle.call("sluice_engine_drop_gradient", span.index)

    def set(self, home: Home, values: torch.Tensor) -> None:
        """The gradient is `values`, and nothing else."""
        with self._lock:
            self._drop(home)
            self.add(home, values)

    def add(self, home: Home, values: torch.Tensor) -> None:
        """Adds to the gradient."""
        dense = (values.to_dense() if values.layout != torch.strided else values).detach()
        if dense.dtype not in DTYPES:
            dense = dense.float()
        flat = _homes.outside(dense.contiguous(), self._by_storage).view(-1)
        kind = _abi.DTYPES[DTYPES[flat.dtype]]
        with self._lock:
            for span in home.spans:
                self._use(span.unit, _abi.GRADIENT_ONLY)
                self._engine._handle.call("sluice_engine_add_gradient", span.index, span.of(flat).data_ptr(), kind)

    def multiply(self, home: Home, factor: float) -> None:
        """Multiplies the gradient."""
        for span in home.spans:
            self._engine._handle.call("sluice_engine_multiply_gradient", span.index, factor)

    def norm(self, home: Home) -> float:
        """Its norm; infinite where an element is not finite."""
        norms = []
        for span in home.spans:
            norm = ctypes.c_double()
            self._engine._handle.call("sluice_engine_gradient_norm", span.index, ctypes.byref(norm))
            norms.append(norm.value)
        return norms[0] if len(norms) == 1 else math.hypot(*norms)

    def read(self, home: Home) -> torch.Tensor:
        """A copy of the gradient."""
        copy = torch.empty(tuple(home.parameter.shape), dtype=home.memory.dtype)
        kind = _abi.DTYPES[DTYPES[copy.dtype]]
        for span in home.spans:
            to = span.of(copy.view(-1)).data_ptr()
            self._engine._handle.call("sluice_engine_get_gradient", span.index, to, kind)
        return copy
