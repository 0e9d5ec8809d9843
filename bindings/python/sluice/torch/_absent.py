"""Parameters whose unit is not on the GPU: they have no elements, and an operation on one is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ..errors import StateError
from ._modes import Mode

Missed = Callable[[torch.nn.Parameter, str], None]
"""Brings a parameter in for what needs it, or raises the StateError that says where it is there."""

# What is asked for at every step, and does not need elements.
_ASKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "grad", "grad_fn", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
) | {torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.grad.__set__}  # type: ignore[union-attr]
# What finds elements without an operation, or gives the parameter others.
_TAKES = {
    getattr(torch.Tensor, name): f"{name}()" for name in ("data_ptr", "untyped_storage", "storage", "tolist", "share_memory_", "__dlpack__")
} | {torch.Tensor.data.__set__: "an assignment to .data"}  # type: ignore[attr-defined]


class Absent(torch.nn.Parameter):
    """The class that a parameter has while its unit is not on the GPU. It is one NaN, expanded to its shape."""

    _missed: Missed
    _was: type[torch.nn.Parameter]  # the class that it has otherwise

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)}, whose unit is not on the GPU now"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKS:
                return func(*args, **(kwargs or {}))
            if func in _TAKES:
                _need(args, _TAKES[func])
            with _Operations():
                return func(*args, **(kwargs or {}))


class _Operations(Mode):
    """Says which operations need elements of absent parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname if hasattr(func, "_opname") else ""
        if not (name.endswith("_like") or name.startswith("new_") or name == "_has_compatible_shallow_copy_type"):  # of `.data = ...`
            _need((args, kwargs or {}), f"{func}")
        return func(*args, **(kwargs or {}))


def _need(arguments: Any, what: str) -> None:
    for tensor in tree_iter(arguments):
        if isinstance(tensor, Absent):
            tensor._missed(tensor, what)
    if any(isinstance(tensor, Absent) for tensor in tree_iter(arguments)):  # one has taken the room of another
        raise StateError(f"{what} needs parameters of more units at once than may be held; wrap the model with a larger held_units")


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
    if isinstance(parameter, Absent):
        parameter.__class__ = parameter._was  # type: ignore[assignment]
        del parameter._missed
    with torch._C._DisableTorchDispatch():  # modes would see it as an operation on both
        parameter.data = memory


def conceal(parameter: torch.nn.Parameter, missed: Missed) -> None:
    """Makes a parameter an absent one."""
    if isinstance(parameter, Absent):
        return
    of_inference = parameter.is_inference()  # of such a tensor PyTorch counts no versions, and it stays one
    with torch._C._DisableTorchDispatch(), torch.inference_mode(of_inference):
        parameter.data = _nan(parameter.dtype, parameter.device, of_inference).expand(parameter.shape)
    parameter.__class__ = _absent(type(parameter))
    parameter._missed = missed  # type: ignore[attr-defined]


@functools.cache
def _absent(own: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    """The class of absent parameters that are of the class `own` otherwise."""
    return type("Absent", (Absent,) if own is torch.nn.Parameter else (Absent, own), {"_was": own})


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device, of_inference: bool) -> torch.Tensor:
    with torch.inference_mode(of_inference):
        return torch.full((), float("nan"), dtype=dtype, device=device)
