"""full_parameters(): parameters of a wrapped model that are there to be read and written between its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from .. import _abi
from ..errors import StateError
from . import _homes, _state_files
from ._homes import Home
from ._presence import Presence


@contextlib.contextmanager
def full(presence: Presence, homes: Sequence[Home], writeback: bool = True) -> Iterator[None]:
    """Inside of the `with` these parameters are there. writeback: they may be written, and the optimizer's masters follow."""
    with presence.users:
        if writeback:
            presence.release_all()
        try:
            with contextlib.nullcontext() if presence.engine.gpu is None else _on_the_host(presence, homes, writeback):
                yield
        finally:
            if writeback:
                presence.release_all()
                presence.changed()


@contextlib.contextmanager
def _on_the_host(presence: Presence, homes: Sequence[Home], writeback: bool) -> Iterator[None]:
    """Inside of the `with` parameters of a GPU are tensors on the CPU, in files of the disk folder where there is one."""
    presence.check_between_calls("full_parameters() is called")
    mine = [home for home in homes if home.index not in presence.full]
    presence.check_unwritten(mine)
    folder = _state_files.room(presence.engine, sum(home.memory.nbytes for home in mine), "a copy of the model's parameters")
    try:
        for home in mine:
            copy = _state_files.make(folder, tuple(home.memory.shape), home.memory.dtype)
            copy.copy_(_in_gpu(presence, home, _abi.READ))
            _state_files.flush(copy)
            _homes.show(home.parameter, copy)
            presence.full.add(home.index)
        yield
    finally:
        shown = [(home, home.parameter.detach()) for home in mine if home.index in presence.full]
        for home, _ in shown:
            presence.full.discard(home.index)
            _homes.show(home.parameter, home.memory)
            presence.conceal(home)
            home.note_values()
        for home, values in shown if writeback else ():
            _write(presence, home, values)


def _write(presence: Presence, home: Home, values: torch.Tensor) -> None:
    """Gives a parameter these values where they differ: the optimizer's masters of others keep what the parameter's type cannot show."""
    if values.shape != home.memory.shape or values.dtype != home.memory.dtype:
        raise StateError(
            f"'{home.name}' was given {values.dtype} of shape {tuple(values.shape)} within full_parameters(), and it is {home.memory.dtype} of "
            f"shape {tuple(home.memory.shape)}; it keeps its values. Close the model, change it, and wrap it again"
        )
    bits = torch.int32 if values.element_size() == 4 else torch.int16
    if not torch.equal(_in_gpu(presence, home, _abi.READ).view(bits), values.to(home.memory.device).view(bits)):
        _in_gpu(presence, home, _abi.EDIT).copy_(values)


def _in_gpu(presence: Presence, home: Home, access: int) -> torch.Tensor:
    with torch.no_grad():  # it begins no step
        presence.use_together(dict.fromkeys(home.units, access), f"'{home.name}'")
    return home.memory.detach()
