"""A wrapped model's state_dict(), load_state_dict() and save_pretrained(), which read or write all of its parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .. import _abi
from ..errors import StateError
from ._full import full
from ._modes import outside_of_graphs
from ._presence import Presence
from ._safetensors import save_file

_ON_A_GPU = ("state_dict", "load_state_dict")  # where parameters are there in calls of the model alone
_substituting = threading.RLock()


def install(model: torch.nn.Module, presence: Presence) -> None:
    """Lets save_pretrained() of a model and its modules write by save_file(), and on a GPU state_dict() give copies of parameters, and
    load_state_dict() write them."""
    names = ("save_pretrained", *(() if presence.engine.gpu is None else _ON_A_GPU))
    for module in model.modules():
        for name in names:
            if callable(getattr(type(module), name, None)):
                module.__dict__.setdefault(name, functools.partial(_with_parameters, module, presence, name))


def uninstall(model: torch.nn.Module) -> None:
    """Undoes install()."""
    for module in model.modules():
        for name in ("save_pretrained", *_ON_A_GPU):
            made = module.__dict__.get(name)
            if isinstance(made, functools.partial) and made.func is _with_parameters:
                del module.__dict__[name]


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
