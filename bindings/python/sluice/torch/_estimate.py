"""What PyTorch itself will allocate in a step, found out without memory: the model runs on fake tensors."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from ..errors import Error, InvalidArgumentError
from ._fakes import faked

_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_FIXED = 160 << 20  # code of libraries that is loaded in the first step, thread stacks, small objects
_SHARE = 0.25  # of the peak: what the allocator keeps between blocks, and operators use inside


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes beyond the parameters: the most that are alive at once, and the most with a margin."""

    peak: int
    reserve: int


class _Alive(TorchDispatchMode):
    """Adds up the memory that tensors made inside hold, as long as they live."""

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self._ignored = ignored
        self._seen: set[int] = set()
        self.current = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen or key in self._ignored:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.current -= size


def estimate(model: torch.nn.Module, batch: Any, train: bool) -> Estimate:
    """batch: what the model is called with: a dict of keyword arguments, a tuple of arguments, or one argument; of its
    tensors only shapes and types count. The loss is the output's `loss`, else the sum of what it gives."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = _call_of(
        tree_map(lambda value: fake.from_tensor(value) if isinstance(value, torch.Tensor) else value, batch)
    )
    with faked(model, fake, train) as tensors:
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_give_up)  # the engine has it then
        alive = _Alive({tensor.untyped_storage()._cdata for tensor in tensors})
        try:
            with fake, alive, torch.set_grad_enabled(train):
                _step(model, args, kwargs, train)
        except Error:
            raise
        except Exception as error:
            why = "its operations depend on values" if isinstance(error, _ON_VALUES) else "it was run without memory"
            raise InvalidArgumentError(
                f"what the model takes for this sample_batch cannot be estimated: {why}, and {type(error).__name__} came of "
                f"it ({error}). If model(sample_batch) runs by itself, give wrap() a reserve that was measured instead"
            ) from error
        return Estimate(alive.peak, alive.peak + int(alive.peak * _SHARE) + _FIXED)


def _step(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
    output = model(*args, **kwargs)
    loss = _loss_of(output) if train else None
    if loss is not None and loss.requires_grad:
        loss.backward()


def _give_up(p: torch.Tensor) -> None:
    p.grad = None


def _call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)), {}


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [t.float().sum() for t in tree_iter(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not parts:
        raise InvalidArgumentError(f"the model gave {type(output).__name__}, which has no tensor to go backward from")
    return torch.stack(parts).sum()
