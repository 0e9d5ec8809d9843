"""Runs a model on fake tensors, which have no memory, and restores it."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ._modes import Mode

CPU = torch.device("cpu")
_OPAQUE = (torch.Tensor, type, str, bytes, types.ModuleType, types.FunctionType, types.MethodType)


class Fakes(FakeTensorMode, Mode):
    """The mode in which tensors have no memory."""


@contextlib.contextmanager
def faked(
    model: torch.nn.Module, fake: Fakes, train: bool, call: Sequence[Any] = (), device: torch.device = CPU
) -> Iterator[list[torch.Tensor]]:
    """Inside of the `with`, fake tensors stand in for the model's parameters and buffers, wherever its modules hold them,
    and for tensors of objects among its arguments (caches), which are yielded. Afterwards modules, and the lists, dicts,
    sets and objects that they hold, have what they had, whatever forward and backward put there. device: where those on the
    meta device will be; a GPU: where all will be."""
    with fake:
        made = {id(p): _like(p, device).requires_grad_(p.requires_grad and train) for p in model.parameters()}
        made |= {id(b): _like(b, device) for b in model.buffers() if id(b) not in made}
    gradients = [(p, p.grad) for p in model.parameters()]
    held = [(holder, _contents(holder)) for holder in _holders(call)]
    made |= {id(t): fake_of(fake, t, train, device) for t in _plain_tensors(contents for _, contents in held)}
    known = {id(holder) for holder, _ in held}
    held += [(holder, _contents(holder)) for holder in _holders([model]) if id(holder) not in known]
    try:
        for holder, contents in held:
            swapped = _swapped(contents, made)
            if not _same(swapped, contents):
                _fill(holder, swapped)
        yield list(made.values())
    finally:
        for holder, contents in held:
            if not _same(_contents(holder), contents):
                _fill(holder, contents)
        for p, gradient in gradients:
            if p.grad is not gradient:
                p.grad = gradient


def fake_of(fake: Fakes, tensor: torch.Tensor, train: bool, device: torch.device = CPU) -> torch.Tensor:
    """A fake tensor that is like this one, and a leaf of backward. device: a GPU where it is to be."""
    made: torch.Tensor = fake.from_tensor(tensor.detach())
    if device.type != "cpu":
        with fake:
            made = made.to(device)
    return made.requires_grad_(train and tensor.requires_grad)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    is_moved = tensor.is_meta or device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device if is_moved else tensor.device)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that these objects hold."""
    return _plain_tensors(_contents(holder) for holder in _holders(values))


def _plain_tensors(held: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in these holders that are not fake."""
    found: list[torch.Tensor] = []
    for contents in held:
        for value in contents.values() if isinstance(contents, dict) else contents:
            several = value if type(value) is tuple else (value,)
            found += [t for t in several if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor)]
    return found


def _holders(values: Sequence[Any]) -> list[Any]:
    """All dicts, lists, deques and sets in these values, attributes of modules and other objects included."""
    found: list[Any] = []
    seen: set[int] = set()
    open_ends: list[Any] = list(values)
    while open_ends:
        value = open_ends.pop()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, deque, set)):
            found.append(value)
            open_ends += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (tuple, frozenset)):
            open_ends += value
        elif isinstance(attributes := getattr(value, "__dict__", None), dict) and _is_of_the_model(value):
            open_ends.append(attributes)
    return found


def _is_of_the_model(value: Any) -> bool:
    """Whether an object belongs to the model, and not to PyTorch itself, such as the compiler's state."""
    return isinstance(value, torch.nn.Module) or not type(value).__module__.startswith("torch")


def _contents(holder: Any) -> Any:
    return dict(holder) if isinstance(holder, dict) else set(holder) if isinstance(holder, set) else list(holder)


def _same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {id(item) for item in one} == {id(item) for item in other}
    if isinstance(one, dict) and any(a is not b for a, b in zip(one, other, strict=True)):
        return False
    values = (one.values(), other.values()) if isinstance(one, dict) else (one, other)
    return all(a is b for a, b in zip(*values, strict=True))


def _fill(holder: Any, contents: Any) -> None:
    holder.clear()
    holder.extend(contents) if isinstance(holder, (list, deque)) else holder.update(contents)


def _swapped(contents: Any, made: Mapping[int, torch.Tensor]) -> Any:
    def swap(value: Any) -> Any:
        if type(value) is tuple and any(id(item) in made for item in value):
            return tuple(made.get(id(item), item) for item in value)
        return made.get(id(value), value)

    if isinstance(contents, dict):
        return {key: swap(value) for key, value in contents.items()}
    return contents if isinstance(contents, set) else [swap(value) for value in contents]
