"""A wrapped model's state_dict() and load_state_dict() on a GPU, where parameters are there in calls of the model alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _abi
from ._full import full
from ._modes import outside_of_graphs
from ._presence import Presence

_REPLACED = ("state_dict", "load_state_dict")


def install(model: torch.nn.Module, presence: Presence) -> None:
    """Lets state_dict() of a model and its modules give copies of parameters, and load_state_dict() write them."""
    for module in model.modules():
        for name in _REPLACED:
            module.__dict__.setdefault(name, functools.partial(_with_parameters, module, presence, name))


def uninstall(model: torch.nn.Module) -> None:
    """Undoes install()."""
    for module in model.modules():
        for name in _REPLACED:
            made = module.__dict__.get(name)
            if isinstance(made, functools.partial) and made.func is _with_parameters:
                del module.__dict__[name]


@outside_of_graphs
def _with_parameters(module: torch.nn.Module, presence: Presence, name: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces that function of a module. The tensors of a state_dict are copies on the CPU; tied parameters have one."""
    homes = [presence.by_id[id(p)] for p in module.parameters() if id(p) in presence.by_id]
    with full(presence, homes, writeback=False) if name == "state_dict" else presence.by_use(_abi.EDIT):
        return getattr(type(module), name)(module, *args, **kwargs)
