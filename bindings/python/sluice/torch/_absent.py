"""Parameters whose unit is not on the GPU: they have no elements, and an operation on one is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_iter

from ._modes import Mode

Missed = Callable[[torch.nn.Parameter, str], NoReturn]
"""Raises the StateError that says what needs a parameter, and where it is there."""

# What is asked for at every step, and does not need elements.
_ASKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "grad", "grad_fn", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
) | {torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.grad.__set__}
# What finds elements without an operation.
_TAKES = frozenset(
    getattr(torch.Tensor, name) for name in ("data_ptr", "untyped_storage", "storage", "tolist", "share_memory_", "__dlpack__")
)


class Absent(torch.nn.Parameter):
    """The class that a parameter has while its unit is not on the GPU. It is one NaN, expanded to its shape."""

    _missed: Missed

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Parameter of shape {tuple(self.shape)}, whose unit is not on the GPU now"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKS:
                return func(*args, **(kwargs or {}))
            if func in _TAKES:
                _refuse(args, f"{func.__name__}()")
            with _Operations():
                return func(*args, **(kwargs or {}))


class _Operations(Mode):
    """Refuses operations on absent parameters that need their elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname if hasattr(func, "_opname") else ""
        if not (name.endswith("_like") or name.startswith("new_") or name == "_has_compatible_shallow_copy_type"):  # of `.data = ...`
            _refuse((args, kwargs or {}), f"{func}")
        return func(*args, **(kwargs or {}))


def _refuse(arguments: Any, what: str) -> None:
    for tensor in tree_iter(arguments):
        if type(tensor) is Absent:
            tensor._missed(tensor, what)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor is a view of."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        if tensor._is_zerotensor():  # which forward-mode AD makes, and which has no elements
            return 0
        raise


def show(parameter: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """Makes a parameter a plain one that refers to this memory."""
    if type(parameter) is Absent:
        parameter.__class__ = torch.nn.Parameter
        del parameter._missed
    with torch._C._DisableTorchDispatch():  # modes would see it as an operation on both
        parameter.data = memory


def conceal(parameter: torch.nn.Parameter, missed: Missed) -> None:
    """Makes a parameter an absent one. One of a class of its own keeps that class, shows NaN, and tells nobody."""
    with torch._C._DisableTorchDispatch():
        parameter.data = _nan(parameter.dtype, parameter.device).expand(parameter.shape)
    if type(parameter) is torch.nn.Parameter:
        parameter._missed = missed  # type: ignore[attr-defined]
        parameter.__class__ = Absent


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((), float("nan"), dtype=dtype, device=device)
