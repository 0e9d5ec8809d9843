"""Refuses what would exchange a wrapped model's gradients or parameters a second time: DistributedDataParallel, FSDP, and what
uses them (Accelerate, transformers' Trainer)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import StateError


def _refuse(what: str) -> NoReturn:
    raise StateError(
        f"{what} is to be applied to a model that sluice.torch.wrap() has wrapped, whose parameters and gradients go over the "
        "ranks already; leave it out. With Accelerate prepare the loader and the optimizer, and not the model; transformers' "
        "Trainer, which always applies it under torchrun, is to be replaced by a loop of your own"
    )


class _Registry(OrderedDict[str, Any]):
    """What torch.distributed keeps of a module for fully_shard() and replicate(). These, and FullyShardedDataParallel, look into
    it before they change the module."""

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            _refuse("FSDP (fully_shard, FullyShardedDataParallel) or replicate()")
        return super().__contains__(name)


def guard(model: torch.nn.Module) -> None:
    """Guards a wrapped model."""
    for module in model.modules():
        if REGISTRY_KEY not in module.__dict__:
            module.__dict__[REGISTRY_KEY] = _Registry()


def unguard(model: torch.nn.Module) -> None:
    """Removes the guards."""
    for module in model.modules():
        if isinstance(module.__dict__.get(REGISTRY_KEY), _Registry):
            del module.__dict__[REGISTRY_KEY]


def _on_submodule(parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Comes before a module gets a submodule. (Wrapped parameters are marked with `_sluice`.)"""
    if isinstance(parent, DistributedDataParallel) and any(hasattr(p, "_sluice") for p in module.parameters()):
        _refuse("DistributedDataParallel")


register_module_module_registration_hook(_on_submodule)
