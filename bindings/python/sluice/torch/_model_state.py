"""A wrapped model's state_dict() and load_state_dict() on a GPU, where parameters are there in calls of the model alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _state, _state_files
from ._absent import storage_of
from ._looking import edited, is_editing, reading
from ._presence import Presence
from ._stances import outside_of_graphs

_REPLACED = ("state_dict", "load_state_dict")


def install(model: torch.nn.Module, presence: Presence) -> None:
    """Lets state_dict() of a model and its modules give copies of parameters, and load_state_dict() edit them."""
    for module in model.modules():
        module.__dict__.setdefault("state_dict", functools.partial(_state_dict, module, presence))
        module.__dict__.setdefault("load_state_dict", functools.partial(_load_state_dict, module, presence))


def uninstall(model: torch.nn.Module) -> None:
    """Undoes install()."""
    for module in model.modules():
        for name in _REPLACED:
            made = module.__dict__.get(name)
            if isinstance(made, functools.partial) and made.func in (_state_dict, _load_state_dict):
                del module.__dict__[name]


@outside_of_graphs
def _state_dict(module: torch.nn.Module, presence: Presence, *args: Any, **kwargs: Any) -> Any:
    """Replaces Module.state_dict(). Within sluice.torch.edit() the tensors are parameters' memory, as PyTorch has it; elsewhere
    they are copies, as an optimizer's state_dict() has them. Tied parameters have one copy."""
    if is_editing():
        return type(module).state_dict(module, *args, **kwargs)
    with reading(presence):
        found = type(module).state_dict(module, *args, **kwargs)
        if not kwargs.get("keep_vars"):
            _copy(found, presence)
    return found


def _copy(found: dict[str, Any], presence: Presence) -> None:
    """Replaces what is a parameter's memory by copies on the CPU."""
    kept: dict[Any, list[str]] = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and storage_of(value) in presence.by_storage:
            kept.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), []).append(name)
    tensors = [found[names[0]] for names in kept.values()]
    folder = _state.room(presence, sum(t.numel() * t.element_size() for t in tensors), "the model's state_dict")
    for tensor, names in zip(tensors, kept.values(), strict=True):
        copy = _state.make(folder, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        _state_files.flush(copy)
        found.update(dict.fromkeys(names, copy))


@outside_of_graphs
def _load_state_dict(module: torch.nn.Module, presence: Presence, *args: Any, **kwargs: Any) -> Any:
    """Replaces Module.load_state_dict()."""
    if is_editing():
        return type(module).load_state_dict(module, *args, **kwargs)
    with edited(presence):
        return type(module).load_state_dict(module, *args, **kwargs)
