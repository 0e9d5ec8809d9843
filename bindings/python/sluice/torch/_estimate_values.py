"""Values in an estimate: its tensors are without memory, but what a model is called with, small integers and flags, and small results of these
alone have values beside, since models decide by masks, lengths and places what they compute."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode

from ._gpu import CPU
from ._modes import Mode, mapped, tensors_among

ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_aten = torch.ops.aten
_NOT_FINITE = (_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default)
_MOST = 8 << 20  # bytes of the values of a tensor; larger ones have none, so that an estimate takes little memory
_MAKE = (torch.tensor, torch.as_tensor)
_FLAGS = (torch.bool, torch.uint8)  # as indices they are masks


class Values(Mode):
    """Knows the values of fake tensors, which are on the CPU, and runs operations on these as well. It is entered after the fake mode."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self._lent: set[int] = set()  # the storages of values that are a caller's own tensors, which nothing is written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})

    def give(self, made: torch.Tensor, tensor: torch.Tensor, *, is_argument: bool = False) -> torch.Tensor:
        """The fake tensor, which has the values of this one if they are integers or flags, and not too many, or a single number. is_argument:
        of the model's call, whose other numbers count, too, and are not copied."""
        if not _is_plain(tensor):
            return made
        if _is_whole(tensor) and _is_small(tensor):
            with unset_fake_temporarily():
                made.value = tensor.detach().to(CPU, copy=True)  # type: ignore[attr-defined]
        elif is_argument and tensor.device == CPU:
            made.value = tensor.detach()  # type: ignore[attr-defined]
            self._lent.add(_storage_of(tensor))
        return made

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation makes of tensors with values alone has values, too."""
        if func is _aten.index.Tensor:
            args = (args[0], self._places(args[1]), *args[2:])
        values = {id(tensor): _value_of(tensor) for tensor in tensors_among([*args, *kwargs.values()])}
        written = _written_by(func, args) if any(value is not None for value in values.values()) else []
        if None in values.values() or not _is_repeatable(func, bool(values)) or any(map(self._is_lent, written)):
            return self._without_values(func, args, kwargs, values, written)
        result = None
        with contextlib.suppress(*ON_VALUES):
            result = func(*args, **kwargs)
            if not _may_have_values(result, bool(values)):
                return _forgotten(result, written)
        real = _on_values(func, args, kwargs, values)
        if real is None:  # as of an operation that a GPU alone has
            return func(*args, **kwargs) if result is None else _forgotten(result, written)
        if result is None:
            device = next(tensor.device for tensor in tensors_among([*args, *kwargs.values()]))
            return mapped(real, lambda value: self._with(value, device))
        for made, value in zip(tensors_among(result), tensors_among(real)):
            made.value = value  # type: ignore[attr-defined]
        return result

    def _without_values(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        values: Mapping[int, torch.Tensor | None],
        written: Sequence[torch.Tensor],
    ) -> Any:
        try:
            result = _forgotten(func(*args, **kwargs), written)
            if (assumed := _assumed(func, args)) is not None:
                with unset_fake_temporarily():
                    result.value = torch.tensor(assumed).expand(result.shape)
            return result
        except ON_VALUES:
            return self._with_shapes(func, args, kwargs, values)

    def _with_shapes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, torch.Tensor | None]) -> Any:
        """The result, without values, of an operation whose shape follows from those tensors that have values, as a CTC loss's does from
        lengths. It is run on zeros in place of the others."""
        others = [tensor for tensor in tensors_among([*args, *kwargs.values()]) if values[id(tensor)] is None]
        if len(others) == len(values) or not all(tensor.is_floating_point() and _is_small(tensor) for tensor in others):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            zeros = {id(tensor): torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in others}
        real = _on_values(func, args, kwargs, {**values, **zeros})
        return func(*args, **kwargs) if real is None else mapped(real, lambda tensor: self.fake.from_tensor(tensor).to(others[0].device))

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        value = _value_of(tensor)
        return value is not None and _storage_of(value) in self._lent

    def _with(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        made: torch.Tensor = self.fake.from_tensor(value).to(device)
        made.value = value  # type: ignore[attr-defined]
        return made

    def _places(self, indices: Sequence[Any]) -> list[Any]:
        """The same indices with places instead of masks, from whose shapes that of the result follows."""
        found: list[Any] = []
        for index in indices:
            value = None if index is None else _value_of(index)
            if value is None or value.dtype not in _FLAGS:
                found.append(index)
                continue
            with unset_fake_temporarily():
                places = value.nonzero(as_tuple=True)
            found += [self._with(place, index.device) for place in places]
        return found


class NumbersFromTensors(TorchFunctionMode):
    """While it is active, torch.tensor() takes the values of fake tensors in lists, which it would look for in their memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKE and args and isinstance(args[0], (list, tuple)):
            args = (mapped(args[0], lambda tensor: tensor.tolist()), *args[1:])
        return func(*args, **(kwargs or {}))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it has integers or flags, or a single number."""
    return tensor.numel() == 1 or not (tensor.is_floating_point() or tensor.is_complex())


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _MOST


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "value", None)
    return tensor if _is_plain(tensor) and _is_whole(tensor) and _is_small(tensor) else None


def _is_repeatable(func: Any, has_arguments: bool) -> bool:
    """Whether the operation can be run beside: chance has no part in it, or it draws numbers by which a model may choose its layers."""
    tags = getattr(func, "tags", None)
    return tags is not None and (torch.Tag.nondeterministic_seeded not in tags or not has_arguments)


def _assumed(func: Any, args: Sequence[Any]) -> bool | None:
    """What a test finds, everywhere, of results that are finite, as those of an estimate are taken to be; None: it is none."""
    if func in _NOT_FINITE:
        return False
    if getattr(func, "overloadpacket", None) not in (_aten.eq, _aten.ne):
        return None
    is_equal = func.overloadpacket is _aten.eq
    if args[0] is args[1]:  # NaN alone differs from itself
        return is_equal
    return not is_equal if isinstance(args[1], float) and math.isinf(args[1]) else None


def _may_have_values(result: Any, has_arguments: bool) -> bool:
    """has_arguments: the operation had tensors with values; of others only integers, flags and single numbers are kept."""
    made = list(tensors_among(result))
    return bool(made) and all(_is_small(tensor) and (has_arguments or _is_whole(tensor)) for tensor in made)


def _on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, torch.Tensor | None]) -> Any:
    """The operation's result on the values of its tensors; None where it fails on them."""
    with contextlib.suppress(Exception), unset_fake_temporarily():
        return func(*_on_cpu(list(args), values), **_on_cpu(dict(kwargs), values))
    return None


def _on_cpu(arguments: Any, values: Mapping[int, torch.Tensor | None]) -> Any:
    """The arguments of an operation with the values of tensors, and the CPU as the device."""
    on_cpu = mapped(arguments, lambda tensor: values[id(tensor)])
    if isinstance(on_cpu, dict):
        return {key: CPU if isinstance(value, torch.device) else value for key, value in on_cpu.items()}
    return [CPU if isinstance(value, torch.device) else value for value in on_cpu]


def _forgotten(result: Any, written: Sequence[torch.Tensor]) -> Any:
    """The result of an operation that has written something without values into these, which have none any more."""
    for tensor in written:
        tensor.value = None  # type: ignore[attr-defined]
    return result


def _written_by(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The fake tensors into which the operation writes."""
    schema = getattr(func, "_schema", None)
    infos = [(argument.alias_info, value) for argument, value in zip(schema.arguments if schema is not None else (), args)]
    written = [value for info, value in infos if info is not None and info.is_write]
    return [tensor for tensor in tensors_among(written) if isinstance(tensor, FakeTensor)]
