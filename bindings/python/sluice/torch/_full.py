"""full_parameters(): parameters of a wrapped model that are there to be read and written between its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from .. import _abi
from . import _absent, _state, _state_files
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
    folder = _state.room(presence, sum(home.memory.nbytes for home in mine), "a copy of the model's parameters")
    try:
        for home in mine:
            copy = _state.make(folder, tuple(home.memory.shape), home.memory.dtype)
            copy.copy_(_in_gpu(presence, home, _abi.READ))
            _state_files.flush(copy)
            _absent.show(home.parameter, copy)
            presence.full.add(home.index)
        yield
    finally:
        for home in mine:
            if home.index in presence.full:
                _put_back(presence, home, writeback)
                presence.full.discard(home.index)


def _put_back(presence: Presence, home: Home, writeback: bool) -> None:
    values = home.parameter.detach()
    if writeback and (values.shape != home.memory.shape or not torch.equal(_in_gpu(presence, home, _abi.READ), values.to(home.memory.device))):
        _in_gpu(presence, home, _abi.EDIT).copy_(values)
    _absent.show(home.parameter, home.memory)
    presence.conceal(home)
    home.note_values()


def _in_gpu(presence: Presence, home: Home, access: int) -> torch.Tensor:
    with torch.no_grad():  # it begins no step
        presence.use_together(dict.fromkeys(home.units, access), f"'{home.name}'")
    return home.memory.detach()
