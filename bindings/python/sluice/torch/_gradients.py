"""p.grad of a wrapped parameter: a tensor without memory, whose elements the engine has."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from .. import _abi
from ..errors import InvalidArgumentError, StateError
from ._homes import Home, name_of, outside, written_by
from ._modes import mapped, outside_of_graphs, tensors_among
from ._presence import Presence
from ._units import DTYPES

_aten = torch.ops.aten


@dataclasses.dataclass(eq=False)
class Slot:
    """A parameter's gradient, from its first backward until it is given up. It keeps neither the presence nor the parameter alive: Python's
    collector does not see what p.grad refers to, so that they would never end."""

    index: int  # the parameter's
    owner: weakref.ref[Presence]
    alive: bool = True  # whether it was not given up
    absent: bool = False  # this rank has added nothing to it; others may have
    applied: bool = False  # it was applied in backward, and nothing is left of it
    zeroed: bool = False  # zero_grad() was called since it was applied
    gradient: weakref.ref[Gradient] | None = None  # the tensor whose version counter its views share
    version: int | None = None  # that tensor's version where it has views and none was written; None: it has none

    @property
    def presence(self) -> Presence:
        """The wrapped model's presence. Raises StateError where the model is gone."""
        presence = self.owner()
        if presence is None:
            raise StateError("the wrapped model whose gradient this was is gone; clone() what is needed later")
        return presence

    @property
    def home(self) -> Home:
        """The home of the gradient's parameter."""
        return self.presence.homes[self.index]

    def check(self) -> None:
        """Raises StateError where the gradient was given up, or a view of it was written."""
        presence = self.presence
        if presence.engine.closed:
            presence.check_open(
                f"this gradient of '{self.home.name}' is of a wrapped model that was closed, and ended with it; clone() what is needed later"
            )
        if self.applied and not self.zeroed:
            raise StateError(
                f"the gradient of '{self.home.name}' is gone: it was applied in backward (update_in_backward=True). Clipping by the norm, "
                "gradient accumulation, loss scaling (GradScaler) and anything else that looks at p.grad need it: wrap the model "
                "without update_in_backward, or call zero_grad() before the next backward"
            )
        if not self.alive:
            raise StateError(
                f"this gradient of '{self.home.name}' was given up (zero_grad(), or another took its place); "
                "clone() what is needed later"
            )
        gradient = None if self.gradient is None or self.version is None else self.gradient()
        if gradient is not None and gradient._version != self.version:
            self.version = None
            raise StateError(
                f"a view of the gradient of '{self.home.name}' was written, which is a copy: the gradient is the engine's. Change a "
                "clone(), and copy_() that into the gradient"
            )

    def values(self) -> torch.Tensor:
        """The gradient in plain memory."""
        self.check()
        if self.applied:
            return torch.zeros_like(self.home.memory)
        copy: torch.Tensor = self.presence.gradients.read(self.home)
        return copy

    def replace(self, values: torch.Tensor) -> None:
        """Sets the gradient to `values`."""
        self.check()
        if values.shape != self.home.parameter.shape:
            raise InvalidArgumentError(
                f"the gradient of '{self.home.name}' is of shape {tuple(self.home.parameter.shape)}, and is to be of "
                f"{tuple(values.shape)}; give values of its shape"
            )
        if self.applied:
            self.presence.apply_gradient(self.home, values)
            self.zeroed = False
            return
        self.presence.gradients.set(self.home, values)


class Gradient(torch.Tensor):
    """A gradient in the engine, which adds, scales and takes norms. Other readers get a copy, and few operations write it."""

    _slot: Slot

    @staticmethod
    def __new__(cls, presence: Presence, home: Home) -> Gradient:
        p = home.parameter
        made: Gradient = torch.Tensor._make_wrapper_subclass(cls, p.shape, dtype=p.dtype, device=p.device)
        return made

    def __init__(self, presence: Presence, home: Home) -> None:
        self._slot = Slot(home.index, weakref.ref(presence))

    __torch_function__ = torch.nn.Parameter.__torch_function__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        there = self._slot.alive and not self._slot.applied
        return f"sluice.torch.Gradient({self._slot.values()!r})" if there else "sluice.torch.Gradient(gone)"

    def tolist(self) -> Any:
        """The values as a list."""
        return self._slot.values().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, which is read-only, since writes to it would be lost."""
        copy = self._slot.values().numpy(force=force)
        copy.flags.writeable = False
        return copy

    @property
    def data(self) -> Gradient:
        """The gradient itself; setting it sets the values."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is not self:
            self._slot.replace(values.detach().to(self.dtype).clone())

    def _refuse_memory(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: the engine's gradients have no address, and writes to shared memory would be lost."""
        several = self._slot.presence.engine.options.ranks is not None
        raise StateError(
            f"the gradient of '{self._slot.home.name}' is to be used by its address, and it is the engine's, which may have "
            "it on disk; use a clone(), and copy_() back what is written to that"
            + (". It is the mean over the ranks already: leave out an all_reduce() of it" if several else "")
        )

    data_ptr = share_memory_ = __dlpack__ = __dlpack_device__ = _refuse_memory

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._slot.values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._slot.values().__reduce_ex__(protocol)

    @classmethod
    @outside_of_graphs
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":  # collectives do not say what they write, nor when
            next(value for value in _gradients_in([args, kwargs or {}]))._refuse_memory()
        result = _run(func, args, kwargs or {})
        for value in _gradients_in(list(written_by(func, args, kwargs or {}))):
            if value._slot.version is not None:
                value._slot.version += 1  # by this operation
        return result


class Gradients:
    """The gradients of one wrapped model, which the engine has. They share a lock with all that uses the engine.

    The objects that p.grad shows are made between steps: small objects that are made in backward would stay in memory that big ones leave,
    and break it up."""

    def __init__(self, presence: Presence) -> None:
        self._presence, self._engine, self._lock = presence, presence.engine, presence.lock
        self.slots: dict[int, Slot] = {}  # of those that the engine may have, by the parameter's index
        self._ended: deque[Slot] = deque()  # those to which there is no reference; finalizers add them, even inside of an engine's call
        self._ready: dict[int, Gradient] = {}  # that no backward pass has needed yet
        self.prepare()

    def prepare(self) -> None:
        """Makes the objects that the next backward may need."""
        for home in self._presence.homes:
            if home.trainable and home.index not in self._ready:
                self._ready[home.index] = self._make(home)

    def _make(self, home: Home) -> Gradient:
        gradient = Gradient(self._presence, home)
        gradient._slot.gradient = weakref.ref(gradient)
        # The finalizer must not keep this object, which keeps the gradients that are ready.
        weakref.finalize(gradient, self._ended.append, gradient._slot).atexit = False
        return gradient

    def put(self, home: Home, values: torch.Tensor | None) -> Gradient:
        """Puts a plain gradient into the engine, in place of one that is there. It lives as long as the Gradient that is returned. With
        updates in backward it is applied, and nothing stays in the engine. values: None: this rank has added nothing to it."""
        gradient = self._ready.pop(home.index) if home.index in self._ready else self._make(home)
        slot = gradient._slot
        if self._presence.updates.in_backward:
            if values is not None:
                self._presence.apply_gradient(home, values)
            slot.applied = True
            return gradient
        with self._lock:
            self.give_up(home)
            self.slots[home.index] = slot  # comes first: what is added has a slot, and is dropped with it
            slot.absent = values is None
            if values is not None:
                self.add(home, values)
        return gradient

    # ---- their end ----

    def give_up(self, home: Home) -> None:
        """Ends the parameter's gradient in the engine, if there is one."""
        self.end(slot for slot in [self.slots.get(home.index)] if slot is not None)

    def end(self, slots: Iterable[Slot]) -> None:
        """Ends these gradients, which the engine drops."""
        ended = list(slots)
        self._drop(*(self._presence.homes[slot.index] for slot in ended))
        for slot in ended:
            slot.alive = False
            del self.slots[slot.index]

    def drop_ended(self) -> None:
        """Ends the gradients to which there is no reference."""
        count = len(self._ended)  # finalizers may add others at any time, which an iterator would not bear
        self.end(slot for slot in (self._ended[i] for i in range(count)) if self.slots.get(slot.index) is slot)
        for _ in range(count):
            self._ended.popleft()  # they stay where they could not be ended

    def drop_absent(self, home: Home) -> bool:
        """Drops what other ranks have added where this one has added nothing. Returns whether that is so. It asks nobody. With
        `reproducible` every gradient that becomes zero is then such a one: zeros would be a gradient of no micro-batch."""
        with self._lock:
            slot = self.slots.get(home.index)
            if slot is None or not (slot.absent or self._engine.options.reproducible):
                return False
            self._drop(home)
            slot.absent = True
            return True

    def _drop(self, *homes: Home) -> None:
        if homes:
            self._engine._drop_gradients(_indices(homes))

    # ---- their elements ----

    def _lacks(self, home: Home) -> bool:
        """Whether no rank has added anything to the gradient. Where this rank has not, all ranks are asked: it is a use."""
        slot = self.slots.get(home.index)
        if slot is None or not slot.absent:
            return False
        try:
            self._engine._gradient_norms(_indices([home]))
            return False
        except StateError as error:
            if "has no gradient in this step" not in str(error):
                raise  # what ranks have differs
            ask = self._engine._handle.ask
            if self._engine.failure or any(ask("sluice_engine_has_gradient", span.index) for span in home.spans):
                raise
            return True

    def set(self, home: Home, values: torch.Tensor) -> None:
        """Sets the gradient to `values`."""
        if self._engine.options.reproducible:
            raise StateError(
                f"the gradient of '{home.name}' is to be written, and the model was wrapped with reproducible=True, whose gradients "
                "are those of micro-batches; scale it, clip it by norm, drop it (zero_grad()), or use wrap(clip_value=)"
            )
        with self._lock:
            self._drop(home)
            self.add(home, values)

    def add(self, home: Home, values: torch.Tensor) -> None:
        """Adds to the gradient."""
        dense = (values.to_dense() if values.layout != torch.strided else values).detach()
        if dense.dtype not in DTYPES:
            dense = dense.float()
        dense = outside(dense.contiguous(), self._presence.by_storage)
        address, size, kind = dense.data_ptr(), dense.element_size(), _abi.DTYPES[DTYPES[dense.dtype]]
        with self._lock:
            if (slot := self.slots.get(home.index)) is not None:
                slot.absent = False
            self._engine.follow_stream()
            for span in home.spans:
                self._presence.use(span.unit, _abi.GRADIENT_ONLY)
                self._engine._handle.call("sluice_engine_add_gradient", span.index, address + span.first * size, kind)

    def multiply(self, homes: Sequence[Home], factor: float) -> None:
        """Multiplies the gradients of these parameters."""
        for some in self._in_order(homes):
            self._engine._multiply_gradients(_indices(some), factor)

    def norms(self, homes: Sequence[Home]) -> list[float]:
        """The norm of each one's gradient: NaN where an element is, else infinite where one is."""
        found = {}
        for some in self._in_order(homes):
            parts = iter(self._engine._gradient_norms(_indices(some)))
            found.update({home.index: _together(list(itertools.islice(parts, len(home.spans)))) for home in some})
        return [found.get(home.index, 0.0) for home in homes]

    def _in_order(self, homes: Sequence[Home]) -> Iterator[Sequence[Home]]:
        """Yields homes that have a gradient: all at once, or, where other ranks may have what this one lacks, one after another, since
        ranks use gradients in the same order."""
        if not any(slot.absent for home in homes if (slot := self.slots.get(home.index)) is not None):
            yield homes
            return
        for home in homes:
            if not self._lacks(home):
                yield [home]

    def read(self, home: Home) -> torch.Tensor:
        """A copy of the gradient."""
        if self._lacks(home):
            return torch.zeros_like(home.memory, memory_format=torch.contiguous_format)
        copy = torch.empty_like(home.memory, memory_format=torch.contiguous_format)
        kind = _abi.DTYPES[DTYPES[copy.dtype]]
        with self._lock:
            self._engine.follow_stream()
            for span in home.spans:
                to = span.of(copy.view(-1)).data_ptr()
                self._engine._handle.call("sluice_engine_get_gradient", span.index, to, kind)
        return copy


def _indices(homes: Iterable[Home]) -> list[int]:
    """The engine's numbers for all spans of these parameters."""
    return [span.index for home in homes for span in home.spans]


def _together(norms: Sequence[float]) -> float:
    """The norm of what has these norms in its parts."""
    if len(norms) == 1:
        return norms[0]
    nan = next((norm for norm in norms if math.isnan(norm)), None)  # for hypot() infinity comes before NaN
    return math.hypot(*norms) if nan is None else nan


class Arrived:
    """Tells the engine when all gradients of a unit have come, which sums them over the ranks then where this is the last
    micro-batch of a step. It tells of units of which each gradient came once in an earlier pass: one that comes again would be
    added to a mean. One that does not come is summed with the others when backward ends."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._of_unit: dict[int, set[int]] = {}  # by unit: the parameters whose gradients it has
        for home in presence.homes:
            for unit in home.units if home.trainable else ():
                self._of_unit.setdefault(unit, set()).add(home.index)
        self._came: set[int] = set()
        self._known: set[int] = set()  # units all of whose gradients have come in an earlier pass
        self._repeated: set[int] = set()  # those of which one has come twice in a pass

    def begin_pass(self) -> None:
        """Comes when a backward pass begins."""
        self._known.update(unit for unit, homes in self._of_unit.items() if homes <= self._came)
        self._came.clear()

    def note(self, home: Home) -> None:
        """Comes when the engine has the parameter's gradient of this backward pass."""
        with self._presence.lock:
            if home.index in self._came:
                self._repeated.update(home.units)
                return
            self._came.add(home.index)
            for unit in home.units:
                if unit in self._known and unit not in self._repeated and self._of_unit[unit] <= self._came:
                    self._presence.engine._handle.call("sluice_engine_end_gradients", unit)


_Copies = dict[int, tuple[Gradient, torch.Tensor]]  # by the slot's id


_WRITES = frozenset(
    ("copy_", "add_", "sub_", "mul_", "div_", "zero_", "fill_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "set_", "_amp_foreach_non_finite_check_and_unscale_")
)


def _plain(copies: _Copies, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient; another tensor itself."""
    if not isinstance(tensor, Gradient):
        return tensor
    if id(tensor._slot) not in copies:
        copies[id(tensor._slot)] = (tensor, tensor._slot.values())
    return copies[id(tensor._slot)][1]


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    handler = functools.partial(_foreach, func) if name_of(func) in _FOREACH else _HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(*args, **kwargs)
    return _on_copies(func, args, kwargs) if result is NotImplemented else result


def _on_copies(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    written = list(_gradients_in(list(written_by(func, args, kwargs))))
    if written and name_of(func).removeprefix("_foreach_") not in _WRITES:
        raise StateError(
            f"the gradient of '{written[0]._slot.home.name}' is written by {func}, and the engine, which has it, copies, adds, multiplies, "
            "clamps and zeroes; change a clone(), and copy_() that into the gradient"
        )
    copies: _Copies = {}
    use = functools.partial(_plain, copies)
    result = func(*mapped(list(args), use), **mapped(kwargs, use))
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        for gradient, _ in copies.values():
            gradient._slot.version = gradient._version  # what the operation made is a view of a copy
    for gradient in written:
        copy = copies[id(gradient._slot)][1]
        gradient._slot.replace(copy)
        if result is copy:
            result = gradient
    return result


def _gradients_in(value: Any) -> Iterator[Gradient]:
    return (tensor for tensor in tensors_among(value) if isinstance(tensor, Gradient))


def _add(target: Any, other: Any, *, alpha: float = 1) -> Any:
    if not isinstance(target, Gradient) or isinstance(other, Gradient) or not isinstance(other, torch.Tensor):
        return NotImplemented
    if alpha != 1 or other.shape != target.shape:
        return NotImplemented
    target._slot.check()
    if target._slot.applied:
        target._slot.replace(other)
        return target
    target._slot.presence.gradients.add(target._slot.home, other)
    return target


def _scalar(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not isinstance(value, Gradient):
        return float(value)
    return None


def _multiply(target: Any, other: Any) -> Any:
    factor = _scalar(other)
    if not isinstance(target, Gradient) or factor is None:
        return NotImplemented
    _multiply_all([target], factor)
    return target


def _multiply_all(gradients: Sequence[Gradient], factor: float) -> None:
    """Multiplies gradients in the engine, which may be of several models."""
    for presence, slots in _by_model(gradients).items():
        presence.gradients.multiply([slot.home for slot in slots], factor)


def _by_model(gradients: Iterable[Gradient]) -> dict[Presence, list[Slot]]:
    """The slots of those that are in an engine, by their model. Raises StateError where one was given up."""
    found: dict[Presence, list[Slot]] = {}
    for gradient in gradients:
        gradient._slot.check()
        if not gradient._slot.applied:
            found.setdefault(gradient._slot.presence, []).append(gradient._slot)
    return found


def _divide(target: Any, other: Any) -> Any:
    divisor = _scalar(other)
    return NotImplemented if not divisor else _multiply(target, 1.0 / divisor)


def _zero(target: Gradient) -> Gradient:
    if target._slot.applied:
        target._slot.zeroed = True
        return target
    target._slot.check()
    if target._slot.presence.gradients.drop_absent(target._slot.home):
        return target
    target._slot.replace(torch.zeros_like(target._slot.home.memory))
    return target


def _norm(value: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    _refuse_of_stage([value], "norms", "call clip_grad_norm_() of the Pipeline")
    norms = _norms_of([value]) if ord == 2 and dim is None and not keepdim else None
    return NotImplemented if norms is None else torch.tensor(norms[0], dtype=dtype or value.dtype, device=value.device)


def _norms_of(values: Sequence[Any]) -> list[float] | None:
    """The norms of gradients in the engine; None where one is none."""
    if any(type(value) is not Gradient for value in values):
        return None
    by_model = _by_model(values)
    if sum(map(len, by_model.values())) < len(values):
        return None
    norms: dict[int, float] = {}
    for presence, slots in by_model.items():
        norms.update(zip(map(id, slots), presence.gradients.norms([slot.home for slot in slots]), strict=True))
    return [norms[id(value._slot)] for value in values]


def is_there(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank has added to a parameter's gradient since it became None or zero."""
    gradient = parameter.grad
    return gradient is not None and not (isinstance(gradient, Gradient) and gradient._slot.absent)


def norms_of(values: Sequence[torch.Tensor]) -> list[float]:
    """The norm of each gradient, be it in the engine or the user's own, also of one stage."""
    found = _norms_of(values)
    return [float(torch.linalg.vector_norm(_plain({}, value))) for value in values] if found is None else found


def _refuse_of_stage(values: Any, what: str, remedy: str) -> None:
    if any(isinstance(value, Gradient) and value._slot.presence.engine.options.sections is not None for value in values):
        raise StateError(f"the {what} of the gradients of one stage would leave out those of the other stages; {remedy}")


def _foreach_norm(values: Any, ord: Any = 2, dtype: Any = None) -> Any:
    """The norms, in one tensor where they are those of gradients in the engine. Others are taken one by one, since copies of all
    gradients may not fit."""
    _refuse_of_stage(values, "norms", "call clip_grad_norm_() of the Pipeline")
    kinds = {(dtype or value.dtype, value.device) for value in values}
    alone = _norms_of(values) if ord == 2 and len(kinds) == 1 else None
    if alone is None:
        return [torch.linalg.vector_norm(value, ord, dtype=dtype) for value in values]
    kind, device = kinds.pop()
    return list(torch.tensor(alone, dtype=kind, device=device).unbind())


def _foreach(func: Any, values: Any, other: Any) -> Any:
    """Multiplies, divides or clamps many gradients: all at once where they are multiplied by one number, else one after another, since
    copies of all may not fit."""
    if not any(isinstance(value, Gradient) for value in values):
        return NotImplemented  # gradients are read alone
    name, number = name_of(func).removeprefix("_foreach_"), _scalar(other)
    if number and name in ("mul_", "div_") and all(type(value) is Gradient for value in values):
        return _multiply_all(values, number if name == "mul_" else 1.0 / number)
    if number is None:
        raise StateError(
            f"{name_of(func)}() writes gradients of wrapped models, for which it takes one number, and is given several, or a tensor of "
            f"several elements; call p.grad.{name}() of each parameter"
        )
    of_one = getattr(_aten, name)
    of_number = of_one.Scalar if "Scalar" in of_one.overloads() else of_one.default
    for value in values:
        _run(of_number, (value, number), {})
    return None


def _unscale(values: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    _refuse_of_stage(values, "scale", "a Pipeline goes without a GradScaler: use bfloat16")
    factor = float(inv_scale)
    for value in values:
        if not isinstance(value, Gradient):
            _aten._amp_foreach_non_finite_check_and_unscale_([value], found_inf, inv_scale)
        elif _is_finite(value):
            _multiply(value, factor)
        else:
            found_inf.fill_(1.0)


def _is_finite(value: Gradient) -> bool:
    """Whether each element is finite; in float16 the norm of finite ones may be infinite."""
    norms = _norms_of([value])
    return norms is None or math.isfinite(norms[0])


_FOREACH = frozenset(f"_foreach_{name}_" for name in ("mul", "div", "clamp_min", "clamp_max"))
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: _add,
    _aten.mul_.Tensor: _multiply,
    _aten.mul_.Scalar: _multiply,
    _aten.div_.Tensor: _divide,
    _aten.div_.Scalar: _divide,
    _aten.zero_.default: _zero,
    _aten.detach.default: lambda value: value,  # it stays in the engine until the last tensor of it is gone
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}

# clip_grad_norm_() then asks for all norms at once, and multiplies all by one number. Otherwise each norm would go to a GPU by itself,
# and each factor come back.
torch.utils._foreach_utils._foreach_supported_types.append(Gradient)  # type: ignore[arg-type]
