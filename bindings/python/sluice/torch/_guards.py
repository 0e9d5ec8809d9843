"""Guards of a wrapped model: what would break it unnoticed is done in another way, or is an error that says what to do. DDP and FSDP, and
what uses them (Accelerate, transformers' Trainer), would exchange its gradients or parameters a second time."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from typing import Any, NoReturn

import torch
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import StateError

_RESIZING = ("resize_token_embeddings", "resize_position_embeddings")


def guard(model: torch.nn.Module, dtypes: Set[torch.dtype], device: torch.device) -> None:
    """Guards a model and its modules. dtypes, device: of its parameters."""
    for module in model.modules():
        module.__dict__.setdefault(REGISTRY_KEY, _Registry())
        for name in _RESIZING:
            if callable(getattr(type(module), name, None)):
                module.__dict__[name] = functools.partial(_refuse_to_resize, name)
    for module in _with_parameters(model):
        module.__dict__["_apply"] = functools.partial(_apply, module, dtypes, device)
        module.__dict__["__deepcopy__"] = functools.partial(refuse_copy, "copied (copy.deepcopy) in whole or in part")
        module.__dict__["__reduce_ex__"] = functools.partial(refuse_copy, "pickled in whole or in part")


def unguard(model: torch.nn.Module) -> None:
    """Removes the guards."""
    for module in model.modules():
        if isinstance(module.__dict__.get(REGISTRY_KEY), _Registry):
            del module.__dict__[REGISTRY_KEY]
        if isinstance(compiled := module._compiled_call_impl, functools.partial):
            module._compiled_call_impl = compiled.args[1]  # see SavedTensors.guard() and Calls.install()
        for name in ("_apply", "_call_impl", "__deepcopy__", "__reduce_ex__", "no_sync", *_RESIZING):
            module.__dict__.pop(name, None)


def _with_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in model.modules() if next(module.parameters(), None) is not None)


def _apply(
    module: torch.nn.Module,
    dtypes: Set[torch.dtype],
    device: torch.device,
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> torch.nn.Module:
    """Replaces Module._apply, which .to(), .half(), .cuda() and the like call: buffers follow, parameters stay."""
    for probe in [torch.zeros(1, dtype=dtype, device=device) for dtype in dtypes]:
        was_shared = probe.is_shared()  # as every tensor on a GPU is
        moved = fn(probe)
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise StateError(
                f"a wrapped model is to be moved to {moved.dtype} on {moved.device}, and its parameters are the engine's: "
                f"{probe.dtype} on {probe.device}. Move it before sluice.torch.wrap(), or after sluice.torch.close()"
            )
        if moved.is_shared() and not was_shared:
            raise StateError(
                "a wrapped model is to be moved into memory that processes share, and its parameters are the engine's, "
                "which lives in one process; share it after sluice.torch.close(), or a copy of its state_dict()"
            )
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _refuse_to_resize(name: str, *_: Any, **__: Any) -> NoReturn:
    """Replaces what gives a model of transformers parameters of another size."""
    raise StateError(
        f"{name}() is called on a wrapped model, and the engine was planned for its parameters as they are; sluice.torch.close() the "
        f"model, call {name}(), and wrap it again"
    )


def refuse_copy(what: str, *_: Any) -> NoReturn:
    """Raises: a copy would refer to the engine's memory, and not have its contents."""
    raise StateError(
        f"a wrapped model is to be {what}, and its parameters are the engine's; save its state_dict(), or copy it after "
        "sluice.torch.close()"
    )


def _refuse_exchange(what: str) -> NoReturn:
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
            _refuse_exchange("FSDP (fully_shard, FullyShardedDataParallel) or replicate()")
        return super().__contains__(name)


def _on_submodule(parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Comes before a module gets a submodule. (Wrapped parameters are marked with `_sluice`.)"""
    if isinstance(parent, DistributedDataParallel) and any(hasattr(p, "_sluice") for p in module.parameters()):
        _refuse_exchange("DistributedDataParallel")


register_module_module_registration_hook(_on_submodule)
