"""Parameters whose unit is not on the GPU: no operation of PyTorch finds their elements without asking for the unit first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ..errors import StateError
from ._modes import Mode
from ._stances import graph_is_seen

Missed = Callable[[str], None]
"""Brings the unit in, or raises StateError where nothing does; the text says what needs it."""

# What is asked for at every step, and does not need elements.
_ASKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("_version", "device", "dtype", "grad", "grad_fn", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
) | {
    torch.Tensor.data_ptr, torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.is_inference,
    torch.Tensor.numel, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.untyped_storage, torch.Tensor.grad.__set__,
}  # fmt: skip
# What finds elements without an operation.
_TAKES = frozenset({torch.Tensor.tolist, torch.Tensor.share_memory_})


class Absent(torch.nn.Parameter):
    """The class that a parameter has while its unit is not on the GPU, where it shows NaN."""

    _missed: Missed

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Parameter of shape {tuple(self.shape)}, whose unit is not on the GPU now"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKS or graph_is_seen():
                return func(*args, **(kwargs or {}))
            if func in _TAKES:
                _bring_in(args, f"{func.__name__}()")
            with _Operations():
                return func(*args, **(kwargs or {}))


class _Operations(Mode):
    """Brings in what each operation finds absent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _needs_shapes_alone(func):
            _bring_in((args, kwargs or {}), f"{func}")
        return func(*args, **(kwargs or {}))


def _needs_shapes_alone(func: Any) -> bool:
    name = func._opname if hasattr(func, "_opname") else ""
    return name.endswith("_like") or name.startswith("new_") or name == "_has_compatible_shallow_copy_type"  # of `.data = ...`


def _bring_in(arguments: Any, what: str) -> None:
    for tensor in tree_iter(arguments):
        if type(tensor) is Absent:
            tensor._missed(what)
    if any(type(tensor) is Absent for tensor in tree_iter(arguments)):
        raise StateError(
            f"{what} needs parameters of more units at once than may be held; wrap the model with a larger held_units, or use fewer "
            "at once"
        )


def show(parameter: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """Lets a parameter refer to this memory."""
    with torch._C._DisableTorchDispatch():  # modes, also those that look for uses, would see it as an operation on both
        parameter.data = memory


def conceal(parameter: torch.nn.Parameter, missed: Missed) -> None:
    """Makes a parameter an absent one."""
    if type(parameter) is torch.nn.Parameter:  # of other classes it shows NaN, and tells nobody
        parameter._missed = missed  # type: ignore[attr-defined]
        parameter.__class__ = Absent


def reveal(parameter: torch.nn.Parameter) -> None:
    """Makes an absent parameter a plain one again."""
    if type(parameter) is Absent:
        parameter.__class__ = torch.nn.Parameter
        del parameter._missed
