"""Parameters whose unit is not on the GPU: no operation of PyTorch finds their elements without asking for the unit first, nor does what
asks where they are. bindings/python/README.md says for what PyTorch asks nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch.utils._pytree import tree_iter

from ..errors import StateError
from ._modes import Mode
from ._stances import graph_is_seen, is_traced

Missed = Callable[[str, Any], None]
"""Brings in the units of the model's parameters among these arguments, and of those that they are views of, all at once, or raises
StateError where nothing does; the text says what needs them."""

# What is asked for at every step, and does not need elements.
_ASKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("_version", "device", "dtype", "grad", "grad_fn", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
) | {
    torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.is_inference, torch.Tensor.numel,
    torch.Tensor.size, torch.Tensor.stride, torch.Tensor.grad.__set__,
}  # fmt: skip
# What says where elements are. PyTorch asks for it where it traces, too, and needs no elements then. (2.11 has no const_data_ptr.)
_PLACES = frozenset(
    getattr(torch.Tensor, name) for name in ("data_ptr", "const_data_ptr", "untyped_storage") if hasattr(torch.Tensor, name)
)
# What else finds elements without an operation.
_TAKES = _PLACES | {
    torch.Tensor.tolist, torch.Tensor.share_memory_, torch.Tensor.storage, torch.Tensor.__dlpack__,
    torch.Tensor.__cuda_array_interface__.__get__,  # type: ignore[attr-defined]
}  # fmt: skip
# torch.func.vmap() asks for the former of all that it batches, and then for the latter; what follows, nobody sees.
_BY_VMAP = (torch.Tensor.dim, torch.Tensor.size)


class Absent(torch.nn.Parameter):
    """The class that a parameter has while its unit is not on the GPU, where it shows NaN."""

    _missed: Missed

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Parameter of shape {tuple(self.shape)}, whose unit is not on the GPU now"

    def as_subclass(self, cls: Any) -> Any:
        """As PyTorch's, which asks nobody."""
        _bring_in((self,), "as_subclass()")
        return torch.Tensor.as_subclass(self, cls)  # it is no Absent any more, so that there is no super()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _BY_VMAP and _is_asked_by("torch._functorch.vmap"):
                _bring_in_batched(func, args)
            if func is torch.Tensor.view_as and _is_asked_by("torch.autograd.graph"):  # for the view's node alone
                return func(*args, **(kwargs or {}))
            if func in _ASKS or graph_is_seen() or (func in _PLACES and is_traced()):
                return func(*args, **(kwargs or {}))
            if func in _TAKES:
                _bring_in(args, _name_of(func))
            with _Operations():
                return func(*args, **(kwargs or {}))


class _Operations(Mode):
    """Brings in what each operation uses of a model, where it finds some of it absent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _needs_shapes_alone(func):
            _bring_in((args, kwargs or {}), f"{func}")
        return func(*args, **(kwargs or {}))


@torch._dynamo.assume_constant_result
def _is_asked_by(module: str) -> bool:
    return sys._getframe(2).f_globals.get("__name__") == module


def _bring_in_batched(func: Any, args: Any) -> None:
    if func is torch.Tensor.size:
        raise StateError(
            "torch.func.vmap() needs parameters of more units at once than may be held; wrap the model with a larger held_units, or use "
            "fewer at once"
        )
    _bring_in(args, "torch.func.vmap()")


def _name_of(func: Any) -> str:
    """The name of what a tensor was asked for, for messages."""
    return f"{func.__name__}()" if func.__name__ != "__get__" else func.__self__.fget.__name__


def _needs_shapes_alone(func: Any) -> bool:
    name = func._opname if hasattr(func, "_opname") else ""
    return name.endswith("_like") or name.startswith("new_") or name == "_has_compatible_shallow_copy_type"  # of `.data = ...`


def _bring_in(arguments: Any, what: str) -> None:
    for tensor in tree_iter(arguments):
        if type(tensor) is Absent:
            tensor._missed(what, arguments)


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's elements. An absent parameter stays absent: it is that of its NaN."""
    return int(_quietly(torch.Tensor.data_ptr, tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor is a view of. An absent parameter stays absent."""
    try:
        return int(_quietly(torch.Tensor.untyped_storage, tensor).data_ptr())
    except RuntimeError:
        if tensor._is_zerotensor():  # which forward-mode AD makes, and which has no elements
            return 0
        raise


def _quietly(ask: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    if type(tensor) is not Absent:
        return ask(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return ask(tensor)


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
