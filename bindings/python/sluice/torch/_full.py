"""Functions that read or write all parameters of a wrapped model between its calls: full_parameters(), state_dict(), load_state_dict() and
save_pretrained()."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import _abi
from ..errors import StateError
from . import _homes, _safetensors
from ._guards import override
from ._homes import Home
from ._modes import outside_of_graphs
from ._presence import Presence
from ._safetensors import save_file

_substituting = threading.RLock()


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
    what = "a copy of the parameters (that of one module after another takes less)"
    folder = _safetensors.room(presence.engine, sum(home.memory.nbytes for home in mine), what)
    try:
        for home in mine:
            copy = _safetensors.make(folder, tuple(home.memory.shape), home.memory.dtype)
            copy.copy_(in_gpu(presence, home, _abi.READ))
            _safetensors.flush(copy)
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
        if presence.first_step.measured is None and not presence.engine.in_step:
            presence.first_step.begin()  # the copies are no part of what it measures


def _write(presence: Presence, home: Home, values: torch.Tensor) -> None:
    """Gives a parameter these values where they differ: the optimizer's masters of others keep what the parameter's type cannot show."""
    if values.shape != home.memory.shape or values.dtype != home.memory.dtype:
        raise StateError(
            f"'{home.name}' was given {values.dtype} of shape {tuple(values.shape)} within full_parameters(), and it is {home.memory.dtype} of "
            f"shape {tuple(home.memory.shape)}; it keeps its values. Close the model, change it, and wrap it again"
        )
    bits = torch.int32 if values.element_size() == 4 else torch.int16
    if not torch.equal(in_gpu(presence, home, _abi.READ).view(bits), values.to(home.memory.device).view(bits)):
        in_gpu(presence, home, _abi.EDIT).copy_(values)


def in_gpu(presence: Presence, home: Home, access: int) -> torch.Tensor:
    """The memory of a parameter on a GPU, whose unit is held for that."""
    with torch.no_grad():  # it begins no step
        presence.use_together(dict.fromkeys(home.units, access), f"'{home.name}'")
    return home.memory.detach()


# ---- functions of modules that do so ----


def install(model: torch.nn.Module, presence: Presence) -> None:
    """Lets save_pretrained() of a model and its modules write by save_file(), and on a GPU state_dict() give copies of parameters, and
    load_state_dict() write them."""
    for module in model.modules():
        # On a GPU parameters are there in calls of the model alone. (A module without parameters may be in several stages of a pipeline.)
        has_absent = presence.engine.gpu is not None and next(module.parameters(), None) is not None
        for name in ("save_pretrained", "state_dict", "load_state_dict") if has_absent else ("save_pretrained",):
            if callable(getattr(type(module), name, None)) and name not in module.__dict__:
                override(module, name, functools.partial(_with_parameters, module, presence, name))


@outside_of_graphs
def _with_parameters(module: torch.nn.Module, presence: Presence, name: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces that function of a module. The tensors of a state_dict are copies on the CPU; tied parameters have one."""
    function = getattr(type(module), name)
    if name == "load_state_dict":
        with presence.by_use(_abi.EDIT):
            return function(module, *args, **kwargs)
    homes = [presence.by_id[id(p)] for p in module.parameters() if id(p) in presence.by_id]
    with full(presence, homes, writeback=False):
        if name == "state_dict":
            return function(module, *args, **kwargs)
        with _saving(module, function):
            return function(module, *args, **kwargs)


@contextlib.contextmanager
def _saving(module: torch.nn.Module, function: Any) -> Iterator[None]:
    """A `with` in which a library's save_pretrained(), which decides what to save in which files, calls save_file() by the name by
    which it calls that of safetensors, which leaves reading to the system."""
    names = inspect.unwrap(function).__globals__
    with _substituting:
        original = names.get("safe_save_file")
        if original is not None:
            names["safe_save_file"] = save_file
        try:
            yield
        except Exception as error:
            if "os error 14" not in str(error):
                raise
            raise StateError(
                f"{type(module).__name__}.save_pretrained() lets the system read parameters that are on disk ({error}); "
                "save with sluice.torch.save_file(model.state_dict(), path)"
            ) from error
        finally:
            if original is not None:
                names["safe_save_file"] = original
