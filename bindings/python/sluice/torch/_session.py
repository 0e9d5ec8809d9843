"""A wrapped model: its parameters in the engine, and what autograd needs of them, when it needs it."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from .. import _abi
from ..errors import StateError
from ..model import size_of
from ..optimizers import Optimizer as Settings
from . import _acquire, _closing, _homes, _mending
from ._at_once import UpdatesInBackward
from ._demand import Demand
from ._gradients import Gradient, Gradients
from ._guards import guard, refuse_copy, unguard
from ._homes import Home
from ._memory import FirstStep, Keeper, resident_bytes
from ._moving import Moving, Source
from ._prepare import Prepared
from ._saved import SavedTensors
from ._stored import Stored


class Session:
    """Holds the engine of one wrapped model. Calls may come from any thread; forward and backward passes of several may
    run at the same time."""

    def __init__(
        self,
        model: torch.nn.Module,
        prepared: Prepared,
        source: Source | None = None,
    ) -> None:
        """source: where values come from, if not from the model's parameters."""
        groups, roles, options, train = prepared.groups, prepared.roles, prepared.options, prepared.train
        self.model = weakref.ref(model)
        self.options = options
        self.trainable = train and any(p.requires_grad for p in model.parameters())
        self.limit = options.held_units
        self._lock = threading.RLock()
        self._held: OrderedDict[int, list[int]] = OrderedDict()  # unit -> accesses, the one used last at the end
        self._in_step = False
        self._ended = False  # by close()
        self._torn = False  # whether the two above, or versions, may not be what the engine has
        self.steps = 0
        largest = max((p.numel() * p.element_size() for p in model.parameters() if p.requires_grad), default=0)
        self._keeper = Keeper(size_of(options.memory, "memory"), largest)
        self._hooks: list[Any] = []
        self.engine = _homes.ModelEngine(prepared.units(), options)
        self._moving: Moving | None = Moving(model, self.engine)
        self.updates_in_backward: UpdatesInBackward | None = None
        self.clip_value = prepared.clip_value
        with self.undone_on_failure():
            self.homes = self._moving.move_in(self, groups, roles, train, source)
            self.by_id = {id(home.parameter): home for home in self.homes}
            self.by_storage = {_homes.storage_of(home.memory): home for home in self.homes}
            self._demand = Demand(self, prepared.stated, prepared.estimated is not None)
            self._saved = SavedTensors(self.by_storage, self.use, self._demand)
            self.stored = Stored(self.engine, self._lock, self.use, self.by_storage)
            self._gradients = Gradients(self, self.homes)
            self._install(model)
            guard(model, {home.memory.dtype for home in self.homes})
            self._saved.guard(model)
        sizes = size_of(options.memory, "memory"), size_of(options.reserved, "reserve")
        self.first_step = self.engine.first_step = FirstStep(*sizes, prepared.estimated, prepared.stated)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("copied or pickled, in whole or in part")

    # ---- moving in and out ----

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """What fails inside of this `with`, before moved_in(), leaves the model as it was before it was wrapped."""
        assert self._moving is not None, "the model has moved in"
        try:
            yield
        except BaseException as error:
            for hook in self._hooks:
                hook.remove()
            if (model := self.model()) is not None:
                unguard(model)
            if lost := self._moving.undo():
                raise StateError(
                    f"wrapping the model failed ({error}), and the engine cannot give back the values of "
                    f"{', '.join(repr(name) for name in lost)}; they are on the meta device now: build or load the model "
                    "again"
                ) from error
            raise

    def moved_in(self) -> None:
        """The model is wrapped now; nothing is kept of what it was before."""
        self._moving = None
        self._keeper.give_back()
        self.first_step.begin()
        self.first_step.planned(self.engine.plan()["predicted_peak"])
        self.engine.session = weakref.ref(self)

    def close(self, values: bool) -> None:
        """The parameters are plain tensors again, with their values, or on the meta device; the engine is gone."""
        if self.engine.closed:
            return
        with self._lock:
            gradients = _closing.with_values(self) if values else _closing.without_values(self)
            self._ended = True  # at once: another thread may be about to use the model
            for home in self.homes:
                if isinstance(home.parameter.grad, Gradient):
                    home.parameter.grad = gradients.get(home.index)
                del home.parameter._sluice  # type: ignore[attr-defined]
                home.memory = torch.empty(0)  # the parameter has it, or nobody
            for hook in self._hooks:
                hook.remove()
            if (model := self.model()) is not None:
                unguard(model)

    # ---- hooks ----

    def _install(self, model: torch.nn.Module) -> None:
        self._hooks += _acquire.install(
            model, self.by_id, self.use, self._touches, self._saved, self._demand, self.limit
        )
        self._hooks.append(model.register_forward_pre_hook(_acquire.outside_of_graphs(self._enter)))
        self._hooks.append(model.register_forward_hook(_acquire.outside_of_graphs(self._leave), always_call=True))
        for home in self.homes:
            if home.trainable:
                # PyTorch shows the collector no such hook: with a reference the session would never end.
                before = _acquire.outside_of_graphs(functools.partial(_before_gradient, weakref.ref(home.arrivals)))
                hook = _acquire.outside_of_graphs(functools.partial(_on_gradient, weakref.ref(self)))
                self._hooks.append(home.parameter.register_hook(before))
                self._hooks.append(home.parameter.register_post_accumulate_grad_hook(hook))

    def _touches(self) -> int:
        return self.engine.counters().touches

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self._demand.estimating:
            self._saved.begin(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._demand.estimating:
            return
        self._saved.end()
        if self._saved.idle:
            self.release_all()  # there is room for what is touched until backward; it stays where it is
        if not self.trainable:
            self.first_step.end()

    # ---- the plan ----

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other thread uses the engine by this session."""
        with self._lock:
            yield

    def grown(self) -> int:
        """By how much the process is larger than when the model was wrapped, for what is not the model's."""
        return max(0, self._keeper.give_back() - self.first_step.held)

    def replan(self, reserve: int, estimated: int) -> None:
        """The engine plans with so much for PyTorch, of which so much is alive at once. Raises BudgetError where that does
        not fit, and StateError where gradients are in the way, with nothing changed."""
        with self._lock:
            self._mend()
            self._drop_unused()
            if self.stored.slots or (self.updates_in_backward is not None and self.updates_in_backward.begun):
                raise StateError("there are gradients, of a step that optimizer.step() and zero_grad() have not ended")
            self._abandon_step()
            before = self._keeper.give_back()
            with self.noting():
                self.engine._handle.call("sluice_engine_replan", reserve)
            self.first_step.replanned(reserve, estimated, resident_bytes() - before)
            self.first_step.planned(self.engine.plan()["predicted_peak"])

    # ---- units come and go ----

    def use(self, unit: int, access: int = _abi.READ) -> None:
        """The unit's parameters are present (or, with GRADIENT_ONLY, its gradients may be added) until the limit of
        units that are held sends it away."""
        self.check_open()
        with self._lock:
            self._mend()
            if self.updates_in_backward is not None:
                self.updates_in_backward.end_interrupted(self)
            held = self._held.get(unit)
            if held is not None and access in held:
                self._held.move_to_end(unit)
                return
            if access == _abi.GRADIENT_ONLY or torch.is_grad_enabled():
                self.begin_step()
            self.first_step.note(self._keeper.look())
            self.stored.drop_ended()
            while held is None and len(self._held) >= self.limit:
                self.release(next(iter(self._held)))
            with self.noting():
                self.engine._handle.call("sluice_engine_acquire", unit, access)
                self._held.setdefault(unit, []).append(access)
                self._held.move_to_end(unit)

    def check_open(self, closed: str = _closing.OLD_GRAPH) -> None:
        """Raises StateError where the engine is closed; with this text where sluice.torch.close() did that."""
        self.engine._handle.check()
        if self.engine.closed:
            raise StateError(closed if self._ended else _closing.LOST)

    def begin_step(self) -> None:
        """There is a step, from now on if there was none."""
        if self.trainable and not self._in_step:
            with self.noting():
                if self.updates_in_backward is not None:
                    self.updates_in_backward.begin(self)
                else:
                    self.engine.own.begin_step()
                self._in_step = True

    def begin_anew(self) -> None:
        """The step that was begun, and has no gradient yet, begins again."""
        self._abandon_step()
        self.begin_step()

    def _abandon_step(self) -> None:
        self.release_all()
        if self._in_step:
            self.engine.own.abandon_step()
            self._in_step = False

    def end_begun_step(self, verb: str) -> None:
        """A checkpoint is to be saved or loaded (the verb): nothing is held, and a step that has no gradient yet is not
        begun. StateError where it has some."""
        with self._lock:
            self._drop_unused()
            self.release_all()
            if self.updates_in_backward is not None and self.updates_in_backward.begun:
                raise StateError(
                    f"a checkpoint is {verb} between backward and optimizer.step(), which ends a step; do it after that"
                )
            if self._in_step and self.stored.slots:
                names = ", ".join(repr(slot.home.name) for slot in list(self.stored.slots.values())[:3])
                raise StateError(
                    f"a checkpoint is {verb} while {len(self.stored.slots)} parameters ({names}, ...) have gradients, which it "
                    "does not hold; do it after optimizer.step() and before the next forward pass, or after "
                    "optimizer.zero_grad(set_to_none=True)"
                )
            self._abandon_step()

    def _drop_unused(self) -> None:
        """What the engine has of gradients that are no parameter's any more ends."""
        self.stored.drop_ended()
        for slot in list(self.stored.slots.values()):
            gradient = slot.home.parameter.grad
            if not (isinstance(gradient, Gradient) and gradient._slot is slot):
                self.stored.end(slot)

    def changed(self) -> None:
        """All values are others now."""
        for home in self.homes:
            home.changed()

    def release(self, unit: int) -> None:
        """The unit is not held any more."""
        if self.updates_in_backward is not None:
            self.updates_in_backward.release(unit)
        with self.noting():
            for _ in self._held.pop(unit, ()):
                self.engine._handle.call("sluice_engine_release", unit)

    def release_all(self) -> None:
        """Nothing is held."""
        with self._lock:
            self._mend()
            while self._held:
                self.release(next(iter(self._held)))

    # ---- exceptions of the keyboard, which come between any two lines ----

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, the engine's state changes, and is noted."""
        self._torn = True
        try:
            yield
        except Exception:
            self._torn = False
            raise
        self._torn = False

    def _mend(self) -> None:
        """Where a change was not noted, nothing is held after this, and whether there is a step is what the engine says.
        Gradients stay. Graphs that were made before count as outdated, since a step may have been done."""
        if not self._torn:
            return
        self._held.clear()
        _mending.release_everything(self.engine)
        if self.updates_in_backward is not None:
            self.updates_in_backward.abandon(self)
            self._in_step = False
        elif self.trainable:
            _mending.begin_step(self.engine.own)
            self._in_step = True
        for home in self.homes:
            home.changed()
        self._torn = False

    # ---- gradients ----

    def take_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Autograd has added to p.grad, or made it. Where another thread is about to add to it, that one takes it."""
        self._demand.freed()
        home = self.by_id[id(parameter)]
        with home.arrivals.end() as alone:
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, Gradient) or not alone:
                return
            if self.first_step.measured is None:
                self.first_step.note(resident_bytes())
            if gradient.requires_grad:
                parameter.grad = None
                raise StateError(
                    f"the gradient of '{home.name}' has a graph of its own (create_graph=True), which would hold "
                    "parameters that come and go; use torch.autograd.grad() on a model that is not wrapped"
                )
            parameter.grad = self._gradients.put(home, gradient)

    def apply_gradient(self, home: Home, values: torch.Tensor) -> None:
        """The gradient is applied in backward, and nothing of it is kept."""
        assert self.updates_in_backward is not None
        with self._lock:
            self.updates_in_backward.apply(self, home, values)

    # ---- the step ----

    def step(self, settings: Sequence[Settings], gradient_factor: float = 1.0) -> None:
        """Updates every parameter that has a gradient, times the factor; the updates go on behind. With updates in backward
        they were made already, but for gradients that the user put there."""
        self.check_open("the model was closed, and its parameters are plain tensors; wrap it again")
        with self._lock:
            self._mend()
            self._exchange()
            got = [home for home in self.homes if self._collect(home)]
            if (model := self.model()) is not None:
                _acquire.check_places(model, got)
            if self.updates_in_backward is not None:
                got = got if self.updates_in_backward.end(self) else []
            if not got:
                raise StateError(
                    "optimizer.step() is called, and no parameter of the wrapped model has a gradient; call "
                    "backward() before"
                )
            if self.updates_in_backward is not None:
                return
            self.release_all()
            self.begin_step()
            with self.noting():
                self._in_step = False
                self.engine.own.step(
                    settings, clip_value=self.clip_value, gradient_factor=gradient_factor, keep_gradients=True
                )
                for home in got:
                    home.changed()
            self.ended_step()

    def ended_step(self) -> None:
        """The engine's step is over."""
        self._in_step = False
        self.steps += 1
        self._gradients.prepare()
        self.first_step.end()

    def _exchange(self) -> None:
        """Gradients of other parameters that the user put in places become plain ones, before any of them ends."""
        for home in self.homes if self.updates_in_backward is None else ():
            gradient = home.parameter.grad
            if isinstance(gradient, Gradient) and gradient._slot.home is not home:
                home.parameter.grad = gradient._slot.values()

    def _collect(self, home: Home) -> bool:
        """Whether the parameter has a gradient; one that the user put there is the engine's now."""
        home.arrivals.forget()
        gradient = home.parameter.grad
        if gradient is None:
            self.stored.give_up(home)  # somebody may still refer to it
            return False
        if not home.trainable:
            raise StateError(
                f"'{home.name}' was frozen when the model was wrapped, and has a gradient now; to train it, "
                "sluice.torch.close() the model, and wrap it again with requires_grad set"
            )
        if self.updates_in_backward is not None and isinstance(gradient, Gradient):
            return True
        if isinstance(gradient, Gradient):
            gradient._slot.check()
        else:
            home.parameter.grad = self._gradients.put(home, gradient)
        _acquire.check_memory(home)
        return True


def _before_gradient(arrivals: weakref.ref[_homes.Arrivals], gradient: torch.Tensor) -> None:
    if (alive := arrivals()) is not None:
        alive.begin()


def _on_gradient(session: weakref.ref[Session], parameter: torch.nn.Parameter) -> None:
    if (alive := session()) is not None:
        alive.take_gradient(parameter)
