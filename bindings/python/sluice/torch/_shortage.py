"""PyTorch's out-of-memory error in a call or a backward pass of a model that is wrapped on a GPU, in terms of what was stated."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..engine import plan
from ..errors import BudgetError, Error, InvalidArgumentError
from ._estimate import Estimate, reserve_for
from ._presence import Presence
from ._modes import outside_of_graphs

_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
_MIB = 1 << 20


class OutOfMemoryError(BudgetError, torch.OutOfMemoryError):
    """PyTorch has no room for a call of a wrapped model, or for its backward pass. It is PyTorch's error, too, for who catches that."""


class Shortage:
    """Says what PyTorch may take of a GPU's memory, what a call takes by an estimate, and what to state instead, where PyTorch only says
    how large the GPU is. Nothing is estimated before."""

    def __init__(self, presence: Presence, estimated: Callable[[Any, Any], Estimate], may_take: int) -> None:
        """estimated: a method, which gives the estimate for a call of the model with these arguments; may_take: the bytes of PyTorch."""
        self._presence, self._estimated, self._may_take = presence, estimated, may_take
        self._latest: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None  # the call whose backward pass may come
        if presence.engine.gpu is not None:
            _watch(self)

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called so."""
        if self._presence.engine.gpu is not None:
            self._latest = (args, kwargs) if torch.is_grad_enabled() and self._presence.trainable else None

    def end(self) -> None:
        """No backward pass of the latest call comes any more."""
        self._latest = None

    @property
    def awaits_pass(self) -> bool:
        """Whether a backward pass may come."""
        return self._latest is not None and not self._presence.engine.closed

    def told(self, error: BaseException, call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None) -> BaseException:
        """The error to raise for one of PyTorch's in a call of the model with these arguments, or in the latest one's backward pass."""
        gpu, model = self._presence.engine.gpu, self._presence.model()
        if gpu is None or model is None or isinstance(error, Error):
            return error
        what = f"this call of {type(model).__name__}" if call else f"the backward pass of a call of {type(model).__name__}"
        need = self._need(call or self._latest)
        says = str(error).partition(" GPU ")[0].rstrip(". ")
        return OutOfMemoryError(
            f"PyTorch has no room for {what}: {says}. Of the memory of GPU {gpu.index} it may take {self._may_take // _MIB} MiB beside the "
            f"model (reserve)" + ("" if need is None else f", and the call takes {need // _MIB} MiB by an estimate") + f". {self._advice(need)}"
        )

    def _need(self, call: Any) -> int | None:
        try:
            return None if call is None else reserve_for(self._estimated(*call))
        except InvalidArgumentError:
            return None  # its operations depend on values

    def _advice(self, need: int | None) -> str:
        """What to state instead. Where the estimate is less than there is, the loop keeps something there, or memory lies in pieces."""
        engine = self._presence.engine
        if need is None or need <= self._may_take:
            need = self._may_take + self._may_take // 4
        reserve = f"reserve='{need // _MIB + 1}MiB'"
        less = "give less at once (a smaller batch, gradient checkpointing, accumulation)"
        given_back = sum(line.current for line in engine.ledger() if (line.tier, line.purpose) == ("host", "total"))
        of_device = (need // _MIB + 1) * _MIB + (0 if engine.gpu is None else engine.gpu.beside)
        try:
            plan(engine.units, dataclasses.replace(engine.options, device_reserved=of_device, given_back=given_back))
        except BudgetError as short:
            return f"With {reserve} the model itself has no room any more: {short}. Or {less}"
        return f"Wrap the model with {reserve}, for which there is room beside it, or {less}"


# ---- backward passes, which call nothing of the model's at their end ----

_open: weakref.WeakSet[Shortage] = weakref.WeakSet()


def _watch(shortage: Shortage) -> None:
    """Lets an error in a backward pass be told by this one, whose object this does not keep alive."""
    _open.add(shortage)
    torch.autograd._engine_run_backward = _run_told  # type: ignore[attr-defined]


@outside_of_graphs
def _run_told(*args: Any, **kwargs: Any) -> Any:
    try:
        made = _run_backward(*args, **kwargs)
        # After the outermost pass nothing keeps the arguments of the calls before it. Passes within it are those of checkpoints.
        if torch._C._current_graph_task_id() == -1:
            for shortage in list(_open):
                shortage.end()
        return made
    except torch.OutOfMemoryError as error:
        for shortage in list(_open):
            if shortage.awaits_pass:
                told = shortage.told(error)
                if told is not error:
                    raise told from error
        raise
