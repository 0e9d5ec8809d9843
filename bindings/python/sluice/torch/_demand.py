"""Estimates what PyTorch will take for a call of a wrapped model, before anything is computed, and plans for it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import BudgetError, Error, StateError
from ._estimate import Estimate, estimate_call, kind_of, with_margin
from ._fakes import CPU, tensors_in
from ._presence import Presence

_SLACK = 8  # calls that keep nothing for backward may grow by one eighth, which is in an estimate's margin
_MOST = 32  # the most estimates that are kept for one kind of calls


class _Seen(NamedTuple):
    """The estimate that holds for calls of one kind up to these sizes."""

    sizes: tuple[int, ...]
    estimate: Estimate

    def covers(self, sizes: tuple[int, ...], train: bool) -> bool:
        slack = 0 if train else 1
        return all(size <= seen + slack * seen // _SLACK for size, seen in zip(sizes, self.sizes, strict=True))


class _Kept:
    """The bytes that a call keeps for backward. Its graph keeps this object, so that both end together."""

    def __init__(self, size: int) -> None:
        self.size = size


class _Call(NamedTuple):
    """A call from outside the model that has not ended."""

    module: torch.nn.Module
    whole: bool  # whether it is a call of the model itself
    keeps: int  # bytes that it keeps for backward


class Demand:
    """Plans for the calls of one wrapped model that come from outside: of the model, or of a module in it where the model
    itself is not called. The engine is planned for the estimate of the call and for what earlier calls keep for backward
    passes that have not come. Where there is no such plan, the call is refused.

    A reserve that the user stated is never changed. Calls may come from any thread; while one is estimated, which needs
    the model's modules, others wait."""

    def __init__(self, presence: Presence, stated: bool, fitted: bool) -> None:
        """stated: the user stated the reserve; fitted: it was estimated for a batch."""
        self._presence, self._stated, self._fitted = presence, stated, fitted
        self._seen: dict[Any, list[_Seen]] = {}
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._most = 0  # the most bytes that a call needed
        self._besides: int | None = None  # bytes of other use that the process took from wrapping to the first call
        self._changed = threading.Condition()
        self._inside: dict[int, _Call] = {}  # the call that each thread is in
        self._estimating: int | None = None  # the thread that estimates a call now

    @property
    def estimating(self) -> bool:
        """Whether this thread runs the model for an estimate, in which its hooks do nothing."""
        return self._estimating is not None and self._estimating == threading.get_ident()

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Comes before a module is called. Raises BudgetError, with nothing changed, where the call would pass the stated
        memory, and InvalidArgumentError where it cannot be estimated."""
        if self._stated or self.estimating or _is_no_call():
            return
        thread = threading.get_ident()
        outer = self._inside.get(thread)
        if outer is not None and (outer.whole or any(inner is module for inner in outer.module.modules())):
            return
        with self._changed:
            self._inside.pop(thread, None)  # a call that was interrupted, without an end
            train = torch.is_grad_enabled() and self._presence.trainable
            found = self._find(module, args, kwargs, train)
            self._provide(module, found, train)
            self._inside[thread] = _Call(module, module is self._presence.model(), found.kept if train else 0)

    def end(self, module: torch.nn.Module, output: Any) -> None:
        """Comes after a module's call, with its output, or with None after an exception."""
        call = None if self.estimating else self._inside.get(threading.get_ident())
        if call is None or call.module is not module:
            return
        with self._changed:
            del self._inside[threading.get_ident()]
            self._changed.notify_all()
            if call.keeps:
                kept = _Kept(call.keeps)
                for tensor in tensors_in([[output]]):
                    if tensor.grad_fn is not None:
                        tensor.grad_fn.metadata[id(self)] = kept  # type: ignore[index]
                        self._kept.add(kept)

    def freed(self) -> None:
        """Comes in a backward pass, which frees what was kept for it."""
        self._kept.clear()

    # ---- what a call takes ----

    def _find(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> Estimate:
        kind, sizes = kind_of(module, args, kwargs, train)
        seen = self._seen.setdefault(kind, [])
        for each in seen:
            planned = self._need(each.estimate) <= self._presence.first_step.room
            if each.sizes == sizes or (planned and each.covers(sizes, train)):
                return each.estimate
        found = self._estimated(module, args, kwargs, train)
        del seen[: max(0, len(seen) - _MOST + 1)]
        seen.append(_Seen(sizes, found))
        return found

    def estimated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Estimate:
        """The estimate for a call of the model with these arguments. Raises InvalidArgumentError where there is none."""
        model = self._presence.model()
        assert model is not None, "it was called"
        with self._changed:
            return self._estimated(model, args, kwargs, torch.is_grad_enabled() and self._presence.trainable)

    def _estimated(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool) -> Estimate:
        model, gpu = self._presence.model(), self._presence.engine.gpu
        assert model is not None, "it was called"
        with self._alone():
            return estimate_call(model, module, args, kwargs, train, CPU if gpu is None else gpu.device)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other threads out of the model inside of the `with`."""
        while self._inside.keys() & {thread.ident for thread in threading.enumerate()}:
            self._changed.wait(1.0)
        self._estimating = threading.get_ident()
        try:
            yield
        finally:
            self._estimating = None

    # ---- the plan for it ----

    def _left(self) -> int:
        """The bytes that earlier calls keep for backward passes."""
        return sum(kept.size for kept in self._kept)

    def _need(self, found: Estimate) -> int:
        return found.reserve + with_margin(self._left()) + (self._besides or 0) + self._presence.first_step.lacking

    def _provide(self, module: torch.nn.Module, found: Estimate, train: bool) -> None:
        presence = self._presence
        with presence.lock:
            first = presence.first_step
            if self._besides is None:
                self._besides = presence.grown()
            need = self._need(found)
            fits = need <= first.room
            if fits and (self._fitted or (presence.trainable and not train)):
                self._most = max(self._most, need)
                return
            try:
                presence.replan(max(need, self._most), found.peak)
            except (BudgetError, StateError) as error:
                if fits:
                    return
                raise BudgetError(self._refusal(module, need, error)) from error
            self._fitted = self._fitted or train
            self._most = max(self._most, need)

    def _refusal(self, module: torch.nn.Module, need: int, error: Error) -> str:
        first = self._presence.first_step
        left = self._left()
        before = f" (with {left >> 20} MiB that earlier calls keep for backward)" if left else ""
        return (
            f"this call of {type(module).__name__} is not begun: by an estimate for its arguments PyTorch takes "
            f"{need >> 20} MiB{before}, {first.room >> 20} MiB are left for it, and the memory that was stated, "
            f"{first.memory >> 20} MiB, cannot be planned otherwise now: {error}. Give less at once (a smaller batch, "
            "gradient checkpointing, accumulation), or wrap the model with more memory"
        )


def _is_no_call() -> bool:
    """Whether no estimate is made: in backward, where checkpointing calls modules whose first call was estimated, and in
    transforms of torch.func, where no model runs with fakes."""
    return torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None
