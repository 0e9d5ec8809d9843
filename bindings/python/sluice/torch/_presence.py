"""Which units of a wrapped model are present, and the step that its engine is in."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _abi
from ..errors import StateError
from ..optimizers import Optimizer as Settings
from . import _homes
from ._backward import Users, in_pass
from ._engine import ModelEngine
from ._homes import Home, storage_of
from ._measures import FirstStep, Keeper, resident_bytes

_OLD_GRAPH = (
    "backward goes through a graph that was made before the model was closed (sluice.torch.close()); run forward again"
)
_LOST = (
    "the engine of this model was closed, and the values of its parameters are gone with it; sluice.torch.close(model) is "
    "what keeps them. Make the model anew, and load its values"
)


class Updates:
    """Applies all gradients at optimizer.step(). Calls come with the presence's lock held."""

    in_backward = False

    @property
    def begun(self) -> bool:
        """Whether a gradient of this step was applied already."""
        return False

    def before_use(self, presence: Presence) -> None:
        """Comes before parameters are used."""

    def begin(self, presence: Presence) -> None:
        """Begins the engine's step."""
        presence.engine.own.begin_step()

    def apply(self, presence: Presence, home: Home, values: torch.Tensor) -> None:
        """Applies a gradient in backward."""
        raise NotImplementedError

    def release(self, unit: int) -> None:
        """Comes when the unit is released."""

    def end(self, presence: Presence, got: Sequence[Home], settings: Sequence[Settings], factor: float) -> bool:
        """Ends the engine's step, with these parameters' gradients times the factor. Returns whether there was any here; other
        ranks, and other stages of a pipeline, may have some."""
        options = presence.engine.options
        if not got and options.ranks is None and options.sections is None:
            return False
        presence.release_all()
        presence.begin_step()
        for home in got:
            home.changed()
        presence.engine.own.step(settings, clip_value=presence.clip_value, gradient_factor=factor, keep_gradients=True)
        presence.first_step.end()
        return True


class UpdatesInBackward(Updates):
    """Applies gradients in backward. A step begins with the forward pass, takes the settings in force at its first
    gradient, and ends with optimizer.step(). A parameter's second gradient, after zero_grad(), begins another step, since
    the first was applied, whether or not step() was called. With several ranks each applies the mean of what all have, and
    a backward pass that fails on one of them fails the engines of all, once anything of it was summed."""

    in_backward = True

    def __init__(self, homes: Sequence[Home], settings: weakref.WeakMethod[Callable[[], Sequence[Settings]]]) -> None:
        """settings: the optimizer's method that returns the settings that are in force now."""
        self._method = settings
        self._given: Sequence[Settings] = ()
        self._homes: dict[int, list[Home]] = {}  # by unit
        for home in homes:
            if home.trainable:
                for unit in home.units:
                    self._homes.setdefault(unit, []).append(home)
        self._had: set[int] = set()  # parameters that had their gradient in this step
        self._open: dict[int, list[Home]] = {}  # by unit: the homes whose gradients are not applied yet

    @property
    def begun(self) -> bool:
        return bool(self._had)

    def _settings(self) -> Sequence[Settings]:
        method = self._method()
        if method is None:
            raise StateError("a gradient is to be applied in backward, and the optimizer that sluice.torch.wrap() gave is gone; keep it")
        return method()

    def before_use(self, presence: Presence) -> None:
        if presence.users.failed and not in_pass():
            self._end(presence)  # before graphs are made of the parameters that the gradients of that pass change

    def begin(self, presence: Presence) -> None:
        self._given = self._settings()
        self._had.clear()
        self._open.clear()
        presence.engine.own.begin_step(self._given, clip_value=presence.clip_value)

    def apply(self, presence: Presence, home: Home, values: torch.Tensor) -> None:
        """Takes the parameter's only gradient of this step."""
        if home.index in self._had:
            self._end(presence)
        if not self._had and list(self._settings()) != list(self._given):
            presence.release_all()
            presence.abandon_step()  # it has no gradient yet, and begins again with these settings
        presence.begin_step()
        self._had.add(home.index)
        for unit in home.units:
            self._open.setdefault(unit, []).append(home)
        presence.gradients.add(home, values)
        for unit in home.units:
            if all(other.index in self._had for other in self._homes[unit]):
                for earlier in [each for each in self._open if each not in home.units and each not in presence.pinned]:
                    presence.release(earlier)  # one that lacks a gradient, as of an expert, would keep ranks from its sum
                presence.release(unit)

    def release(self, unit: int) -> None:
        for home in self._open.pop(unit, ()):
            home.changed()

    def end(self, presence: Presence, got: Sequence[Home], settings: Sequence[Settings], factor: float) -> bool:
        return self._end(presence) and bool(got)

    def _end(self, presence: Presence) -> bool:
        several, failed = presence.engine.options.ranks is not None, presence.users.failed
        presence.users.failed = False
        if several and failed and not in_pass():  # other ranks may have gradients of that pass that this one has not
            presence.abandon_step()
            self._had.clear()
            return False
        presence.release_all()
        if several:
            presence.begin_step()  # other ranks may have gradients
        elif not self._had or not presence.engine.in_step:
            return False
        presence.engine.own.step()
        if several:
            presence.changed()
        self._had.clear()
        presence.first_step.end()
        return True


class Presence:
    """Holds the units of one wrapped model that are in use, and begins its engine's steps. The engine is asked what is held,
    and whether there is a step. All modules here share one presence of a model. Calls may come from any thread: the one that
    uses the model, and those in which PyTorch runs its backward passes."""

    def __init__(
        self,
        model: weakref.ref[torch.nn.Module],
        engine: ModelEngine,
        homes: Sequence[Home],
        keeper: Keeper,
        first_step: FirstStep,
        trainable: bool,
        clip_value: float | None,
    ) -> None:
        self.model, self.engine, self.homes = model, engine, homes
        self.keeper, self.first_step = keeper, first_step
        self.trainable, self.clip_value = trainable, clip_value
        self.limit = engine.options.held_units
        self.by_id = {id(home.parameter): home for home in homes}
        self.by_storage = {storage_of(home.memory): home for home in homes}
        self.users = Users()
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.gradients: Any = None  # the Gradients of _gradients.py, which the session makes
        self.updates = Updates()
        self.pinned: Collection[int] = ()  # units that nothing else takes the room of, on a GPU
        self.keeps_casts = False  # whether autograd may keep casts of parameters, in place of references from which they are made again
        self.in_call = False  # whether a call of the model on a GPU, or its backward, goes on
        self.full: set[int] = set()  # the parameters, by index, that are on the host now: see full_parameters()
        self._uses = itertools.count()
        self._last_use = [0] * len(engine.units)
        # By unit: the accesses for which it is held, 1 << READ and so on, as far as is known without asking the engine.
        self._held_for = [0] * len(engine.units)
        self._on_gpu: list[list[Home]] = [[] for _ in engine.units]  # by unit; empty where the CPU computes
        self._shown: set[int] = set()  # units whose parameters show their memory
        self._by_use: int | None = None  # for which access an operation on an absent parameter brings its unit in, if it does
        self.belongs_to: list[str] = []  # by unit, the module in whose calls it is there: see _calls.py
        for home in homes if engine.gpu is not None else ():
            for unit in home.units:
                self._on_gpu[unit].append(home)

    # ---- units come and go ----

    def use(self, unit: int, access: int = _abi.READ) -> None:
        """Makes the unit's parameters present (or, with GRADIENT_ONLY, lets its gradients be added) until other units need
        its room among those that may be held."""
        # A held unit stays on a GPU, where touches bring nothing in, unless a gradient is to be applied before.
        if self._held_for[unit] >> access & 1 and self.engine.gpu is not None and not self.updates.in_backward:
            self._last_use[unit] = next(self._uses)
            self.engine.follow_stream(moves=False)
            return
        with self.lock:
            self.check_open()
            self.updates.before_use(self)
            self._last_use[unit] = next(self._uses)
            held = self._held_for[unit] or self.engine._accesses(unit)
            if held & 1 << access:
                self.engine.follow_stream(moves=False)
                return
            if access == _abi.GRADIENT_ONLY or (access == _abi.READ and torch.is_grad_enabled()):
                self.begin_step()
            self.look()
            self.gradients.drop_ended()
            if not held:
                self._make_room(unit)
            self.engine.follow_stream()
            before = self.first_step.mark()
            self.engine._handle.call("sluice_engine_acquire", unit, access)
            self.first_step.waited(before)
            self._held_for[unit] = held | 1 << access

    def use_together(self, units: Mapping[int, int], what: str) -> None:
        """Makes units present, each for its access, all of them at once. what: needs them, for messages."""
        if len(units) > self.limit:
            raise self._too_many(units, what)
        for unit, access in units.items():
            self.use(unit, access)

    def _too_many(self, units: Iterable[int], what: str) -> StateError:
        names = [repr(self.engine.units[unit].name) for unit in units]
        return StateError(
            f"{what} needs {len(names)} units at once ({', '.join(names)}), and {self.limit} may be held; wrap the model with "
            f"held_units={len(names)}, or use fewer at once"
        )

    def _make_room(self, wanted: int) -> None:
        """Releases the units that were used longest ago, until one more can be held."""
        held = sorted(self.engine._held_units(), key=self._last_use.__getitem__)
        may_go = [unit for unit in held if unit not in self.pinned]
        for unit in may_go[: max(0, len(held) + 1 - self.limit)]:
            self.release(unit)
        if wanted not in self.pinned and len(self.pinned) >= self.limit:
            raise self._too_many([*self.pinned, wanted], "what is computed now")

    def release(self, unit: int) -> None:
        """Releases the unit, however often it is held."""
        self.updates.release(unit)
        self._held_for[unit] = 0
        self._conceal(unit)
        self.engine.follow_stream()
        for _ in range(self.engine._times_held(unit)):
            self.engine._handle.call("sluice_engine_release", unit)

    def release_all(self) -> None:
        """Releases all units."""
        with self.lock:
            if not (self.engine.closed or self.engine._handle.inherited):
                for unit in self.engine._held_units():
                    self.release(unit)

    def forget_held(self) -> None:
        """Comes before the engine is closed: what uses a unit from then on asks it."""
        self._held_for = [0] * len(self._held_for)

    def end_call(self) -> None:
        """Comes when no thread is in a call of the model any more. The units stay present, but what is touched before backward may take
        their room."""
        self.release_all()
        if not self.trainable:
            self.first_step.end()

    # ---- what parameters on a GPU show ----

    def show(self, units: Mapping[int, int]) -> None:
        """Makes these units present, all of them at once, lets their parameters show their memory, and those of all others none."""
        self.pinned = units
        self.use_together(units, "what is computed now")
        for unit in self._shown - units.keys():
            self._conceal(unit)
        for unit in units.keys() - self._shown:
            self._show(unit)

    def _show(self, unit: int) -> None:
        self._shown.add(unit)
        for home in self._on_gpu[unit]:
            if home.index not in self.full:
                home.check_memory()
                _homes.show(home.parameter, home.memory)

    def _conceal(self, unit: int) -> None:
        if unit in self._shown:
            self._shown.discard(unit)
            for home in self._on_gpu[unit]:
                self.conceal(home)

    def conceal(self, home: Home) -> None:
        """Makes a parameter on a GPU absent, unless it was given other memory, which is an error later."""
        if not home.replaced:
            _homes.conceal(home.parameter, self._missed)

    @contextlib.contextmanager
    def by_use(self, access: int) -> Iterator[None]:
        """Inside of the `with` an operation on an absent parameter brings its unit in, for as long as no other one needs the room. So it
        is for what keeps no views of parameters: load_state_dict(), and rules for first values."""
        with self.users:
            self.check_between_calls("values are set")
            self.release_all()
            self._by_use = access
            try:
                yield
            finally:
                self._by_use = None
                self.release_all()
                if access == _abi.EDIT:
                    self.changed()

    def check_between_calls(self, what: str) -> None:
        """Raises StateError in a call of the model on a GPU, or in its backward."""
        if self.in_call:
            raise StateError(f"{what} within a call of the model or its backward; do it before or after that")

    def _missed(self, parameter: torch.nn.Parameter, what: str) -> None:
        home = self.by_id[id(parameter)]
        unit = home.units[0]
        if self._by_use is not None:
            with torch.no_grad():  # it begins no step
                self.use(unit, self._by_use)
            return self._show(unit)
        raise StateError(
            f"'{home.name}' is used by {what} where its unit '{self.engine.units[unit].name}' is not on the GPU: it is there in "
            f"calls of {self.belongs_to[unit]} and in their backward, and elsewhere within `with sluice.torch.full_parameters(model):`"
            + ("; for a module that uses another one's parameters in its call, name both in one unit (wrap(units=...))" if self.in_call else "")
        )

    def check_unwritten(self, homes: Iterable[Home]) -> None:
        """Raises StateError where one of these, on a GPU, was written outside of full_parameters()."""
        if self.engine.gpu is not None:
            for home in homes:
                if home.index not in self.full:
                    home.check_unwritten()

    def changed(self) -> None:
        """Comes after all parameters' values changed."""
        for home in self.homes:
            home.changed()

    def check_open(self, closed: str = _OLD_GRAPH) -> None:
        """Raises StateError where the engine is closed, with the text `closed` where sluice.torch.close() closed it."""
        self.engine._handle.check()
        if self.engine.closed:
            raise StateError(closed if self.engine.left else _LOST)

    # ---- steps ----

    def begin_step(self) -> None:
        """Begins a step, unless there is one."""
        if self.trainable and not self.engine.in_step:
            self.updates.begin(self)

    def apply_gradient(self, home: Home, values: torch.Tensor) -> None:
        """Applies a gradient in backward, without keeping it."""
        with self.lock:
            self.updates.apply(self, home, values)

    def end_begun_step(self, verb: str) -> None:
        """Comes before a checkpoint is saved or loaded (the verb): releases all units, and abandons a step without gradients.
        Raises StateError where the step has some."""
        with self.lock:
            self._drop_unused()
            self.release_all()
            if not self.engine.in_step:
                return
            if self.updates.begun:
                raise StateError(
                    f"a checkpoint is {verb} between backward and optimizer.step(), which ends a step; do it after that"
                )
            if self.gradients.slots:
                names = ", ".join(repr(self.homes[index].name) for index in list(self.gradients.slots)[:3])
                raise StateError(
                    f"a checkpoint is {verb} while {len(self.gradients.slots)} parameters ({names}, ...) have gradients, which "
                    "it does not hold; do it after optimizer.step() and before the next forward pass, or after "
                    "optimizer.zero_grad(set_to_none=True)"
                )
            self.abandon_step()

    def abandon_step(self) -> None:
        """Ends the engine's step, if there is one, without an update. Units that are held are released, and make nothing final."""
        if self.engine.in_step:
            self.forget_held()
            self.engine.own.abandon_step()

    def _drop_unused(self) -> None:
        """Drops the engine's gradients that are no longer any parameter's."""
        self.gradients.drop_ended()
        slots = self.gradients.slots.values()
        self.gradients.end(slot for slot in slots if getattr(self.homes[slot.index].parameter.grad, "_slot", None) is not slot)

    # ---- the plan ----

    def look(self) -> None:
        """Comes often in a step: before calls and units, and with gradients. Notes what the process has, and gives memory back where that
        is due. The C library's memory may grow between any two operations, also where all units stay present."""
        if self.engine.gpu is None or self.first_step.measured is None:
            with self.lock:
                if (resident := self.keeper.look()) is not None:
                    self.first_step.note(resident)

    def grown(self) -> int:
        """The bytes that the process has grown by since the model was wrapped, but not for the model."""
        return max(0, self.keeper.give_back() - self.first_step.held)

    def replan(self, reserve: int, estimated: int) -> None:
        """Plans anew with this reserve for PyTorch, of which `estimated` bytes are alive at once. Raises BudgetError where
        there is no such plan, and StateError where there are gradients, with nothing changed."""
        with self.lock:
            self._drop_unused()
            if self.gradients.slots or (self.engine.in_step and self.updates.begun):
                raise StateError("there are gradients, of a step that optimizer.step() and zero_grad() have not ended")
            self.release_all()
            self.abandon_step()
            before = self.keeper.give_back()
            self.engine._handle.call("sluice_engine_replan", reserve)
            self.first_step.replanned(reserve, estimated, resident_bytes() - before)
            self.first_step.planned(self.engine.plan())
