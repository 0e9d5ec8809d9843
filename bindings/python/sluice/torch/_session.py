"""A wrapped model: its parameters in the engine, and what autograd needs of them, when it needs it."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import _abi
from ..engine import Engine
from ..errors import InvalidArgumentError, StateError
from ..model import Options, Parameter, Unit
from ..optimizers import Optimizer as Settings
from . import _homes
from ._gradients import Gradient, Slot, new_gradient
from ._homes import Home
from ._units import Group


class _Saved(NamedTuple):
    """What autograd keeps of a parameter instead of a tensor over it."""

    home: Home
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    changes: tuple[int, int]


class _Plain(NamedTuple):
    """Any other tensor that autograd keeps, with the version that it must still have."""

    tensor: torch.Tensor
    version: int


class Session:
    """Holds the engine of one wrapped model. Calls may come from any thread, one at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Sequence[Group],
        settings_of: Mapping[int, int],
        settings: Sequence[Settings],
        options: Options,
    ) -> None:
        """settings_of: id of a parameter -> its index in `settings`."""
        self.model = weakref.ref(model)
        self.trainable = any(p.requires_grad for p in model.parameters())
        self.dtype = _dtype_of(groups)
        self.limit = options.held_units
        self._lock = threading.RLock()
        self._held: OrderedDict[int, list[int]] = OrderedDict()  # unit -> accesses, the one used last at the end
        self._in_step = False
        self._slots: dict[int, Slot] = {}  # by the parameter's index
        self._hooks: list[Any] = []
        self._saving: list[Any] = []
        units = [
            Unit(g.name, [Parameter(n, tuple(p.shape), settings_of.get(id(p), 0)) for n, p in g.parameters])
            for g in groups
        ]
        self.engine = Engine(units, options)
        try:
            self.homes = self._move_in(groups, settings_of)
        except BaseException:
            self.engine.close()
            raise
        self.by_id = {id(home.parameter): home for home in self.homes}
        self._by_storage = {_homes.storage_of(home.memory): home for home in self.homes}
        self._install(model)

    # ---- moving in and out ----

    def _move_in(self, groups: Sequence[Group], settings_of: Mapping[int, int]) -> list[Home]:
        """Gives each unit its values, and then its parameters the engine's memory, so that their own is free."""
        homes = []
        for u, group in enumerate(groups):
            floats = {name: _homes.floats_of(p) for name, p in group.parameters}
            self.engine.set_values(group.name, {name: _homes.memory_of(t) for name, t in floats.items()})
            del floats
            for name, p in group.parameters:
                memory = _homes.tensor_at(self._address(len(homes)), tuple(p.shape), self.dtype)
                p.data = memory
                homes.append(
                    Home(name, len(homes), u, settings_of.get(id(p), 0), p, memory, p.requires_grad)
                )
        gc.collect()
        return homes

    def _address(self, index: int) -> int:
        address = ctypes.c_void_p()
        self.engine._handle.call("sluice_engine_parameter", index, ctypes.byref(address))
        return address.value or 0

    def close(self) -> None:
        """The parameters are plain tensors again, with their values; the engine is gone."""
        if self.engine.closed:
            return
        with self._lock:
            self.release_all()
            plain = {}
            for unit in self.engine.units:
                values = self.engine.get_values(unit.name)
                for name, view in values.items():
                    plain[name] = torch.frombuffer(view.cast("B"), dtype=torch.float32).view(view.shape).to(self.dtype)
            for home in self.homes:
                if isinstance(home.parameter.grad, Gradient):
                    home.parameter.grad = home.parameter.grad._slot.values()
                home.parameter.data = plain[home.name]
            for hook in self._hooks:
                hook.remove()
            self.engine.close()

    # ---- hooks ----

    def _install(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            units = sorted({self.by_id[id(p)].unit for p in module.parameters(recurse=False)})
            if units:
                self._hooks.append(module.register_forward_pre_hook(_Acquire(self, units)))
        self._hooks.append(model.register_forward_pre_hook(self._enter))
        self._hooks.append(model.register_forward_hook(self._leave, always_call=True))
        for home in self.homes:
            if home.trainable:
                hook = home.parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks.append(hook)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        saved.__enter__()
        self._saving.append(saved)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._saving:
            self._saving.pop().__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> Any:
        home = self._by_storage.get(_homes.storage_of(tensor)) if tensor.layout == torch.strided else None
        if home is None:
            return _Plain(tensor, tensor._version)
        return _Saved(home, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), home.changes)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Plain):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, and was "
                    f"saved at version {saved.version}"
                )
            return saved.tensor
        home: Home = saved.home
        if home.changes != saved.changes:
            raise RuntimeError(
                f"backward goes through a graph that was made before '{home.name}' was changed (by optimizer.step() or "
                "an edit), so its gradients would be wrong; run forward again"
            )
        self.use(home.unit)
        return home.memory.as_strided(saved.size, saved.stride, saved.offset)

    # ---- units come and go ----

    def use(self, unit: int, access: int = _abi.READ) -> None:
        """The unit's parameters are present (or, with GRADIENT_ONLY, its gradients may be added) until the limit of
        units that are held sends it away."""
        with self._lock:
            held = self._held.get(unit)
            if held is not None and access in held:
                self._held.move_to_end(unit)
                return
            if access == _abi.GRADIENT_ONLY or torch.is_grad_enabled():
                self._begin_step()
            while held is None and len(self._held) >= self.limit:
                self._release(next(iter(self._held)))
            self.engine._handle.call("sluice_engine_acquire", unit, access)
            self._held.setdefault(unit, []).append(access)
            self._held.move_to_end(unit)

    def _begin_step(self) -> None:
        if self.trainable and not self._in_step:
            self.engine.begin_step()
            self._in_step = True

    def _release(self, unit: int) -> None:
        for _ in self._held.pop(unit):
            self.engine._handle.call("sluice_engine_release", unit)

    def release_all(self) -> None:
        """Nothing is held."""
        with self._lock:
            while self._held:
                self._release(next(iter(self._held)))

    # ---- gradients ----

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Autograd has added to p.grad, or made it."""
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, Gradient):
            return
        parameter.grad = new_gradient(self, self.by_id[id(parameter)], gradient)

    def begin_gradient(self, slot: Slot, values: torch.Tensor) -> None:
        """A first gradient; one that the engine still has of this parameter ends."""
        with self._lock:
            before = self._slots.get(slot.home.index)
            if before is not None:
                before.alive = False
            self._slots[slot.home.index] = slot
            self.set_gradient(slot.home, values)

    def end_gradient(self, slot: Slot) -> None:
        """Nobody refers to it any more."""
        if not slot.alive or self.engine.closed:
            return
        with self._lock:
            slot.alive = False
            if self._slots.get(slot.home.index) is slot:
                del self._slots[slot.home.index]
                self.engine._handle.call("sluice_engine_drop_gradient", slot.home.index)

    def set_gradient(self, home: Home, values: torch.Tensor) -> None:
        """The gradient is `values`, and nothing else."""
        with self._lock:
            self.engine._handle.call("sluice_engine_drop_gradient", home.index)
            self.add_gradient(home, values)

    def add_gradient(self, home: Home, values: torch.Tensor) -> None:
        """Adds to the gradient."""
        dense = (values.to_dense() if values.layout != torch.strided else values).detach()
        if dense.dtype not in _homes.DTYPES:
            dense = dense.float()
        dense = dense.contiguous()
        with self._lock:
            self.use(home.unit, _abi.GRADIENT_ONLY)
            kind = _abi.DTYPES[_homes.DTYPES[dense.dtype]]
            self.engine._handle.call("sluice_engine_add_gradient", home.index, dense.data_ptr(), kind)

    def multiply_gradient(self, home: Home, factor: float) -> None:
        """Multiplies the gradient."""
        self.engine._handle.call("sluice_engine_multiply_gradient", home.index, factor)

    def gradient_norm(self, home: Home) -> float:
        """Its norm; infinite where an element is not finite."""
        norm = ctypes.c_double()
        self.engine._handle.call("sluice_engine_gradient_norm", home.index, ctypes.byref(norm))
        return norm.value

    def read_gradient(self, home: Home) -> torch.Tensor:
        """A copy of the gradient."""
        copy = torch.empty(tuple(home.parameter.shape), dtype=self.dtype)
        kind = _abi.DTYPES[_homes.DTYPES[self.dtype]]
        self.engine._handle.call("sluice_engine_get_gradient", home.index, copy.data_ptr(), kind)
        return copy

    # ---- the step ----

    def step(self, settings: Sequence[Settings]) -> None:
        """Updates every parameter that has a gradient; the updates go on behind."""
        with self._lock:
            got = [home for home in self.homes if home.trainable and self._collect(home)]
            if not got:
                raise StateError(
                    "optimizer.step() is called, and no parameter of the wrapped model has a gradient; call "
                    "backward() before"
                )
            self.release_all()
            self._begin_step()
            self._in_step = False
            self.engine.step(settings, keep_gradients=True)
            for home in got:
                home.updates += 1

    def _collect(self, home: Home) -> bool:
        """Whether the parameter has a gradient; one that the user put there is the engine's now."""
        gradient = home.parameter.grad
        if gradient is None:
            return False
        if not (isinstance(gradient, Gradient) and gradient._slot.home is home):
            plain = gradient._slot.values() if isinstance(gradient, Gradient) else gradient
            home.parameter.grad = new_gradient(self, home, plain)
        else:
            gradient._slot.check()
        if home.replaced:
            raise StateError(
                f"'{home.name}' was given other memory (by .data = ..., or set_()), which the engine does not see; "
                "copy_() into it instead"
            )
        return True


class _Acquire:
    """A forward-pre-hook that brings in what the module's own parameters lie in."""

    def __init__(self, session: Session, units: Sequence[int]) -> None:
        self.session, self.units = session, units

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        for unit in self.units:
            self.session.use(unit)


def _dtype_of(groups: Sequence[Group]) -> torch.dtype:
    first = groups[0].parameters[0]
    for group in groups:
        for name, p in group.parameters:
            if p.dtype not in _homes.DTYPES:
                raise InvalidArgumentError(f"'{name}' is of {p.dtype}; parameters in float32 or bfloat16 can be wrapped")
            if p.dtype != first[1].dtype:
                raise InvalidArgumentError(
                    f"'{name}' is of {p.dtype}, and '{first[0]}' of {first[1].dtype}; give the model one type with "
                    "model.to(dtype) before it is wrapped"
                )
    return first[1].dtype
