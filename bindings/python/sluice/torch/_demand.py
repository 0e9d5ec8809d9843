"""The memory that PyTorch will take for a call of a wrapped model: it is estimated before anything is computed, and planned for. On a GPU,
where the plan is made once, it is estimated where PyTorch has no room."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import BudgetError, Error, StateError
from ._backward import in_pass, on_failures
from ._estimate import Estimate, estimate_call, kind_of, reserve_for, tensors_in, with_margin
from ._measures import resident_bytes
from ._order import Counts
from ._presence import Presence
from ._split_backward import Halves

_SLACK = 8  # calls that keep nothing for backward may grow by one eighth, which is in an estimate's margin
_MOST = 32  # the most estimates that are kept for one kind of calls
_MIB = 1 << 20


@dataclasses.dataclass
class InFlight:
    """The calls in flight beside a call. A pipeline changes them between calls."""

    part: int = 0  # of the model, that is called
    calls: Sequence[Counts] = (Counts((1,), (0,)),)  # at each moment, by part
    bytes: int = 0  # that others keep
    known: dict[int, Estimate] = dataclasses.field(default_factory=dict)  # of the last call of each part
    halves: Halves | None = None  # where backward passes leave gradients of weights for later

    def beside(self, part: int, known: Mapping[int, Estimate]) -> int:
        """The most bytes that calls keep beside one of this part, as far as it is known."""
        moments = (counts for counts in self.calls if counts.keep[part])
        kept = (sum(now.keep[other] * each.kept + now.left[other] * each.left for other, each in known.items()) for now in moments)
        return max(kept) - known[part].kept + self.bytes


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


class Demand:
    """Plans for the calls of one wrapped model that come from outside: of the model, or of a module in it where the model
    itself is not called. The engine is planned for the estimate of the call and for what earlier calls keep for backward
    passes that have not come. Where there is no such plan, the call is refused. A reserve that the user stated is never changed."""

    def __init__(self, presence: Presence, stated: bool, fitted: bool, may_take: int) -> None:
        """stated: the user stated the reserve; fitted: it was estimated for a batch; may_take: the bytes of PyTorch where it computes."""
        self._presence, self.stated, self._fitted, self._may_take = presence, stated, fitted, may_take
        self.in_flight = InFlight()
        self._seen: dict[Any, list[_Seen]] = {}
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._most = 0  # the most bytes that a call needed
        self._grown: int | None = None  # the bytes of other use that the process took from wrapping to the first call
        self.inside = False  # whether a call from outside has not ended
        self._estimating: int | None = None  # the thread that estimates a call now
        self._called_in: int | None = None  # the thread of the last call
        if presence.engine.gpu is not None:
            on_failures.add(self)

    @property
    def estimating(self) -> bool:
        """Whether this thread runs the model for an estimate, in which its calls do nothing else."""
        return self._estimating is not None and self._estimating == threading.get_ident()

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Comes before a module is called. Returns the bytes that the call keeps for backward, for end(), or None where it is not
        planned for. Raises BudgetError, with nothing changed, where the call would pass the stated memory,
        InvalidArgumentError where it cannot be estimated, and what the model itself raises."""
        if not in_pass():
            self._called_in = threading.get_ident()
        if self.stated or self.inside or _is_no_call():
            return None
        train = torch.is_grad_enabled() and self._presence.trainable
        found = self._find(module, args, kwargs, train)
        self._provide(module, found, train)
        self._presence.keeps_casts = self._plan_for_casts(found)
        self.in_flight.known[self.in_flight.part] = found
        self._presence.first_step.note(resident_bytes())
        self.inside = True
        if not train:
            return 0
        return found.with_casts().kept if self._presence.keeps_casts else found.kept

    def end(self, keeps: int, output: Any) -> None:
        """Comes after that call, with its output, or with None after an exception."""
        self.inside = False
        if keeps:
            kept = _Kept(keeps)
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
        seen = self._seen.setdefault((self.in_flight.part, kind), [])
        for each in seen:
            planned = self._need(each.estimate) <= self._presence.first_step.room
            if each.sizes == sizes or (planned and each.covers(sizes, train)):
                return each.estimate
        found = self._estimated(module, args, kwargs, train)
        del seen[: max(0, len(seen) - _MOST + 1)]
        seen.append(_Seen(sizes, found))
        return found

    def _estimated(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool) -> Estimate:
        model = self._presence.model()
        assert model is not None, "it was called"
        self._estimating = threading.get_ident()
        try:
            with contextlib.nullcontext() if self.in_flight.halves is None else self.in_flight.halves.leaving() as left:
                return estimate_call(model, module, args, kwargs, train, self._presence.engine.device, left=left)
        finally:
            self._estimating = None

    # ---- the plan for it ----

    def _kept_by_others(self, part: int, known: Mapping[int, Estimate]) -> int:
        """The bytes that are kept beside a call of this part for backward passes: by those in flight, or, where it is called now, by those
        before it."""
        earlier = sum(kept.size for kept in self._kept) if part == self.in_flight.part else 0
        return max(earlier + self.in_flight.bytes, self.in_flight.beside(part, known))

    def _need(self, found: Estimate, casts: bool = False) -> int:
        """Returns the bytes that the call takes. Other calls follow, when there may be gradients, so that it cannot be planned otherwise
        any more. casts: autograd keeps casts of parameters."""
        known = {**self.in_flight.known, self.in_flight.part: found}
        if casts:
            known = {part: each.with_casts() for part, each in known.items()}
        most = max(each.reserve + with_margin(self._kept_by_others(part, known)) for part, each in known.items())
        return most + (self._grown or 0) + self._presence.first_step.lacking

    def _provide(self, module: torch.nn.Module, found: Estimate, train: bool) -> None:
        presence = self._presence
        with presence.lock:
            first = presence.first_step
            if self._grown is None:
                self._grown = presence.grown()
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
                raise BudgetError(self._refusal(module, found, error)) from error
            self._fitted = self._fitted or train
            self._most = max(self._most, need)

    def _plan_for_casts(self, found: Estimate) -> bool:
        """Whether there is room, beside all else, for autograd to keep the casts of parameters, so that backward need not make them again.
        It is in the plan then."""
        presence = self._presence
        if found.casts == 0:
            return False
        with presence.lock:
            first, whole = presence.first_step, self._need(found, casts=True)
            if whole > first.room:
                return False
            if whole > first.reserve:
                try:
                    presence.replan(max(whole, self._most), found.with_casts().peak)
                except (BudgetError, StateError):
                    return False
            return True

    def _refusal(self, module: torch.nn.Module, found: Estimate, error: Error) -> str:
        first, need, part = self._presence.first_step, self._need(found), self.in_flight.part
        kept = self._kept_by_others(part, {**self.in_flight.known, part: found})
        before = f" (with {kept >> 20} MiB that other calls keep for backward)" if kept else ""
        return (
            f"this call of {type(module).__name__} is not begun: by an estimate for its arguments PyTorch takes "
            f"{need >> 20} MiB{before}, {first.room >> 20} MiB are left for it, and the memory that was stated, "
            f"{first.memory >> 20} MiB, cannot be planned otherwise now: {error}. Give less at once (a smaller batch, "
            "gradient checkpointing, accumulation), or wrap the model with more memory"
        )

    # ---- where PyTorch has no room on a GPU ----

    def tell_of_pass(self, error: BaseException) -> None:
        """Raises the error for one of PyTorch's in a backward pass of this thread, unless none of this model's may come."""
        is_called_here = self._called_in == threading.get_ident()  # and not another stage of a pipeline
        if is_called_here and not self._presence.engine.closed and self._presence.engine.in_step:
            self.tell(error)

    def tell(self, error: BaseException, call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None) -> None:
        """Raises the error for one of PyTorch's in a call of the model with these arguments, or in a backward pass, unless that is told."""
        gpu, model = self._presence.engine.gpu, self._presence.model()
        if gpu is None or model is None or isinstance(error, Error):
            return
        what = f"this call of {type(model).__name__}" if call else f"the backward pass of a call of {type(model).__name__}"
        need = None if call is None else self._need_of_call(model, *call)
        says = str(error).partition(" GPU ")[0].rstrip(". ")
        raise OutOfMemoryError(
            f"PyTorch has no room for {what}: {says}. Of the memory of GPU {gpu.index} it may take {self._may_take // _MIB} MiB beside the "
            f"model (reserve)" + ("" if need is None else f", and the call takes {need // _MIB} MiB by an estimate") + f". {self._advice(need)}"
        ) from error

    def _need_of_call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        try:
            return reserve_for(self._estimated(model, args, kwargs, torch.is_grad_enabled() and self._presence.trainable))
        except Exception:  # its operations depend on values, or the model itself raises with none
            return None

    def _advice(self, need: int | None) -> str:
        """Advises on the reserve. Where the estimate is less than there is, the loop keeps something there, or memory lies in pieces."""
        engine = self._presence.engine
        if need is None or need <= self._may_take:
            need = self._may_take + self._may_take // 4
        reserve = f"reserve='{need // _MIB + 1}MiB'"
        less = "give less at once (a smaller batch, gradient checkpointing, accumulation)"
        try:
            engine.plan_with((need // _MIB + 1) * _MIB)
        except BudgetError as short:
            return f"With {reserve} the model itself has no room any more: {short}. Or {less}"
        return f"Wrap the model with {reserve}, for which there is room beside it, or {less}"


def _is_no_call() -> bool:
    """Whether no estimate is made: in backward, where checkpointing calls modules whose first call was estimated, and in
    transforms of torch.func and traces of TorchScript, where no model runs with fakes."""
    if torch.jit.is_tracing() or in_pass():  # type: ignore[attr-defined]
        return True
    try:
        torch.empty(0).requires_grad_()  # which PyTorch refuses in transforms
    except RuntimeError:
        return True
    return False


class OutOfMemoryError(BudgetError, torch.OutOfMemoryError):
    """PyTorch has no room for a call of a wrapped model, or for its backward pass. It is PyTorch's error, too, for who catches that."""
