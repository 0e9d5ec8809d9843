"""Modes of PyTorch that see each operation of their thread, tensors among the arguments and results of calls, and what torch.compile() does
not compile."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A mode of its thread under which functions are compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise nothing is compiled while it is active, nothing that was compiled before is used, and what PyTorch is to compile
        then it never compiles."""
        return True


def parts_of(value: Any) -> Collection[Any] | None:
    """The parts of a list, a tuple, a namedtuple or a dict; None for all else."""
    if isinstance(value, MutableMapping):
        return value.values()
    if not isinstance(value, (list, tuple)):
        return None
    is_plain = type(value) in (list, tuple) or type(value).__bases__ == (tuple,) or hasattr(value, "_fields")
    return value if is_plain else None


def tensors_among(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value and in its parts."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in parts_of(value) or ():
            yield from tensors_among(part)


def mapped(value: Any, use: Callable[[torch.Tensor], Any]) -> Any:
    """The value with what `use` makes of each tensor in it and in its parts."""
    if isinstance(value, torch.Tensor):
        return use(value)
    if isinstance(value, MutableMapping):
        same_kind = copy.copy(value)
        for key, part in value.items():
            same_kind[key] = mapped(part, use)
        return same_kind
    if (parts := parts_of(value)) is None:
        return value
    made = [mapped(part, use) for part in parts]
    return getattr(type(value), "_make", type(value))(made)


_BREAKS = (
    "the parameters of a wrapped model come and go between operations, so it is no whole graph; compile its blocks instead, before "
    "sluice.torch.wrap() (model.blocks[i] = torch.compile(model.blocks[i])), or the model without fullgraph=True"
)


outside_of_graphs = functools.partial(torch.compiler.disable, reason=_BREAKS)
"""The same function, at which graphs of torch.compile() break, and which is compiled nowhere."""


def is_by_compiler(module: torch.nn.Module) -> bool:
    """Whether torch.compile() made the module of another one."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile() made the module of another one, or the module's own compile() was called."""
    return is_by_compiler(module) or module._compiled_call_impl is not None
