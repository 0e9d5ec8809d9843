"""Modes of PyTorch that see each operation of their thread, tensors among the arguments and results of calls, and what torch.compile() does
not compile."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._python_dispatch import TorchDispatchMode

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[..., None]


class Mode(TorchDispatchMode):
    """A mode of its thread under which functions are compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise nothing is compiled while it is active, nothing that was compiled before is used, and what PyTorch is to compile
        then it never compiles."""
        return True


def parts_of(value: Any) -> Collection[Any] | None:
    """The parts of a list, a tuple, a namedtuple or a dict; None for all else, such as a PackedSequence, whose tensors belong together."""
    if isinstance(value, MutableMapping):
        return value.values()
    is_plain = type(value) in (list, tuple) or (isinstance(value, tuple) and type(value).__bases__ == (tuple,))
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
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


_BREAKS = (
    "the parameters of a wrapped model come and go between operations, so it is no whole graph; compile its blocks instead, before "
    "sluice.torch.wrap() (model.blocks[i] = torch.compile(model.blocks[i])), or the model without fullgraph=True"
)


def is_by_compiler(module: torch.nn.Module) -> bool:
    """Whether torch.compile() made the module of another one. Where the compiler, which takes as long to load as the rest of PyTorch, is
    not loaded yet, it has made none."""
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.OptimizedModule)


def outside_of_graphs(function: Function) -> Function:
    """The same function, at which graphs of torch.compile() break, and which is compiled nowhere. torch.compiler.disable() does that, but
    loads the compiler; so it is called when a frame is first compiled that comes here."""
    disabled: Function | None = None

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if get_eval_frame_callback() is None:  # no frame is compiled in this thread
            return function(*args, **kwargs)
        disabled = disabled or torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, _BREAKS  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]
