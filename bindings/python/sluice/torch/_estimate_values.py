"""Values in an estimate: its tensors are without memory, but integers, flags, what a model is called with, and small results of these alone
have values beside, since models decide by masks, lengths and places what they compute."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from ._homes import written_by
from ._modes import Mode, mapped, tensors_among

ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_aten = torch.ops.aten
# Bytes of values, of one tensor and of all, so that an estimate takes little memory; and of an argument that is looked at.
_MOST, _MOST_TOGETHER, _MOST_LENT = 8 << 20, 64 << 20, 32 << 20
_MAKE = (torch.tensor, torch.as_tensor)
_FLAGS = (torch.bool, torch.uint8)  # as indices they are masks


class _Known(NamedTuple):
    """The value of a fake tensor, which is its attribute."""

    value: torch.Tensor  # on the CPU; views of one fake tensor have views of one value
    of: weakref.ref[Any]  # the storage that the fake tensor had when it got the value


class Values(Mode):
    """Knows the values of fake tensors, and runs operations on these as well. It is entered after the fake mode.

    Only copies that this class has made are ever written to. Where an operation writes what is not known into a fake tensor, the
    values of all fake tensors of its storage are forgotten."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self._lent: set[int] = set()  # the storages of values that are a caller's own tensors
        self._unknown: set[int] = set()  # the storages of fake tensors whose values were forgotten
        self._own: set[int] = set()  # the storages of all other values
        self._bytes = 0  # of these

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})

    def give(self, made: torch.Tensor, tensor: torch.Tensor, *, is_argument: bool = False) -> torch.Tensor:
        """The fake tensor, which has the values of this one if they are integers or flags, and not too many, or a single number. is_argument:
        of the model's call, whose other numbers count, too, and are not copied."""
        if not _is_plain(tensor):
            return made
        if _is_whole(tensor) and tensor.nbytes <= _MOST:
            with unset_fake_temporarily():
                self._set(made, tensor.detach().to(CPU, copy=True))
        elif is_argument and tensor.device == CPU and tensor.nbytes <= _MOST_LENT:
            self._lent.add(id(tensor.untyped_storage()))
            self._set(made, tensor.detach())
        return made

    # ---- operations ----

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _aten.index.Tensor:
            args = (args[0], self._places(args[1]), *args[2:])
        values = {id(tensor): self._value_of(tensor) for tensor in tensors_among([*args, *kwargs.values()])}
        written = list(written_by(func, args, kwargs))
        known = {key: value for key, value in values.items() if value is not None}
        if len(known) < len(values) or not _is_repeatable(func, kwargs, known) or any(map(self._is_anothers, written)):
            return self._without_values(func, args, kwargs, values, written)
        result = None
        with contextlib.suppress(*ON_VALUES):
            result = func(*args, **kwargs)
            if not _may_have_values(func, result):
                return self._forgotten(result, written)
        real = _on_values(func, args, kwargs, known)
        if real is None:  # it fails on them, as an operation does that a GPU alone has
            return func(*args, **kwargs) if result is None else self._forgotten(result, written)
        if result is None:
            device = next(tensor.device for tensor in tensors_among([*args, *kwargs.values()]))
            return mapped(real, lambda value: self._with(value, device))
        for made, value in zip(tensors_among(result), tensors_among(real)):
            self._set(made, value)
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
            return self._forgotten(func(*args, **kwargs), written)
        except ON_VALUES:
            return self._with_shapes(func, args, kwargs, values)

    def _with_shapes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, torch.Tensor | None]) -> Any:
        """The result, without values, of an operation whose shape follows from those tensors that have values, as a CTC loss's does from
        lengths. It is run on zeros in place of the others."""
        others = [tensor for tensor in tensors_among([*args, *kwargs.values()]) if values[id(tensor)] is None]
        if len(others) == len(values) or not all(tensor.is_floating_point() and tensor.nbytes <= _MOST_LENT for tensor in others):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            zeros = {id(tensor): torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for tensor in others}
        real = _on_values(func, args, kwargs, {**{key: value for key, value in values.items() if value is not None}, **zeros})
        return func(*args, **kwargs) if real is None else mapped(real, lambda tensor: self.fake.from_tensor(tensor).to(others[0].device))

    def _places(self, indices: Sequence[Any]) -> list[Any]:
        """The same indices with places instead of masks, from whose shapes that of the result follows."""
        found: list[Any] = []
        for index in indices:
            value = None if index is None else self._value_of(index)
            if value is None or value.dtype not in _FLAGS:
                found.append(index)
                continue
            with unset_fake_temporarily():
                places = value.nonzero(as_tuple=True)
            found += [self._with(place, index.device) for place in places]
        return found

    # ---- what is known ----

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values; a real tensor, such as a constant of the model, has its own."""
        if not isinstance(tensor, FakeTensor):
            return tensor if _is_plain(tensor) and _is_whole(tensor) and tensor.nbytes <= _MOST else None
        known: _Known | None = getattr(tensor, "known", None)
        storage = tensor.untyped_storage()
        return None if known is None or known.of() is not storage or id(storage) in self._unknown else known.value

    def _set(self, made: torch.Tensor, value: torch.Tensor) -> None:
        """Gives a fake tensor its values, where there is room for them."""
        of_value = value.untyped_storage()
        if id(of_value) not in self._own and id(of_value) not in self._lent:
            if self._bytes + of_value.nbytes() > _MOST_TOGETHER:
                self._forget(made)
                return
            self._own.add(id(of_value))
            self._bytes += of_value.nbytes()
            weakref.finalize(of_value, self._gave_back, id(of_value), of_value.nbytes()).atexit = False
        made.known = _Known(value, weakref.ref(made.untyped_storage()))  # type: ignore[attr-defined]

    def _gave_back(self, key: int, size: int) -> None:
        self._own.discard(key)
        self._bytes -= size

    def _forget(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._unknown:
            self._unknown.add(id(storage))
            weakref.finalize(storage, self._unknown.discard, id(storage)).atexit = False

    def _forgotten(self, result: Any, written: Sequence[torch.Tensor]) -> Any:
        """The result of an operation that has written something without values into these."""
        for tensor in written:
            if isinstance(tensor, FakeTensor):
                self._forget(tensor)
        return result

    def _is_anothers(self, tensor: torch.Tensor) -> bool:
        """Whether its values are a caller's, or a model's, own tensor."""
        value = self._value_of(tensor)
        return not isinstance(tensor, FakeTensor) or (value is not None and id(value.untyped_storage()) in self._lent)

    def _with(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        made: torch.Tensor = self.fake.from_tensor(value).to(device)
        self._set(made, value)
        return made


class NumbersFromTensors(TorchFunctionMode):
    """While it is active, torch.tensor() takes the values of fake tensors in lists, which it would look for in their memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _MAKE or not args or not isinstance(args[0], (list, tuple)):
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # it has found no memory
            return func(mapped(args[0], lambda tensor: tensor.item()), *args[1:], **kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it has integers or flags, or a single number."""
    return tensor.numel() == 1 or not (tensor.is_floating_point() or tensor.is_complex())


def _is_repeatable(func: Any, kwargs: Mapping[str, Any], known: Mapping[int, torch.Tensor]) -> bool:
    """Whether the operation can be run on values, too. One that draws random numbers for given tensors cannot, nor one that draws from a
    generator of the model's own, nor one that writes what its schema does not declare, as batch norms do."""
    tags = getattr(func, "tags", None)
    if tags is None or kwargs.get("generator") is not None or "batch_norm" in func.name():
        return False
    return torch.Tag.nondeterministic_seeded not in tags or not known


def _may_have_values(func: Any, result: Any) -> bool:
    """Whether the result is small. Of random numbers only integers and single ones have values, by which models choose layers and places."""
    made = list(tensors_among(result))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return bool(made) and all(tensor.nbytes <= _MOST and (_is_whole(tensor) or not draws) for tensor in made)


def _on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, torch.Tensor]) -> Any:
    """The operation's result on the values of its tensors; None where it fails on them."""
    with contextlib.suppress(Exception), unset_fake_temporarily():
        return func(*_on_cpu(list(args), values), **_on_cpu(dict(kwargs), values))
    return None


def _on_cpu(arguments: Any, values: Mapping[int, torch.Tensor]) -> Any:
    """The arguments of an operation with the values of tensors, and the CPU as the device."""
    on_cpu = mapped(arguments, lambda tensor: values[id(tensor)])
    if isinstance(on_cpu, dict):
        return {key: CPU if isinstance(value, torch.device) else value for key, value in on_cpu.items()}
    return [CPU if isinstance(value, torch.device) else value for value in on_cpu]
