"""What is present of a wrapped model, and the step that its engine is in."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch

from .. import _abi
from ..errors import StateError
from ..optimizers import Optimizer as Settings
from . import _homes
from ._homes import Home, ModelEngine
from ._memory import FirstStep, Keeper, resident_bytes
from ._stored import Stored

_OLD_GRAPH = (
    "backward goes through a graph that was made before the model was closed (sluice.torch.close()); run forward again"
)
_LOST = (
    "the engine of this model was closed, and the values of its parameters are gone with it; sluice.torch.close(model) is "
    "what keeps them. Make the model anew, and load its values"
)


class Updates:
    """When gradients are applied: all of them at optimizer.step(). Calls come with the lock of the presence held."""

    in_backward = False

    @property
    def begun(self) -> bool:
        """Whether a gradient of this step was applied already."""
        return False

    def before_use(self, presence: Presence) -> None:
        """Somebody is about to use parameters."""

    def begin(self, presence: Presence) -> None:
        """The engine's step begins."""
        presence.engine.own.begin_step()

    def apply(self, presence: Presence, home: Home, values: torch.Tensor) -> None:
        """Applies a gradient in backward."""
        raise NotImplementedError

    def release(self, unit: int) -> None:
        """The unit is released."""

    def end(self, presence: Presence, got: Sequence[Home], settings: Sequence[Settings], factor: float) -> bool:
        """The engine's step ends, for these parameters' gradients times the factor. Gives whether there was any."""
        if not got:
            return False
        presence.release_all()
        presence.begin_step()
        for home in got:  # before: a KeyboardInterrupt may come right after the step
            home.changed()
        presence.engine.own.step(settings, clip_value=presence.clip_value, gradient_factor=factor, keep_gradients=True)
        presence.first_step.end()
        return True


class Presence:
    """Holds the units of one wrapped model that are in use, and begins its engine's steps. What is held, and whether there is
    a step, is what the engine says, so that a KeyboardInterrupt may come between any two lines. All parts of a wrapped model
    have this one. Calls may come from any thread."""

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
        self.by_storage = {_homes.storage_of(home.memory): home for home in homes}
        self.lock = threading.RLock()
        self.stored = Stored(engine, homes, self.lock, self.use, self.by_storage)
        self.updates = Updates()
        self._uses = itertools.count()
        self._last_use = [0] * len(engine.units)

    # ---- units come and go ----

    def use(self, unit: int, access: int = _abi.READ) -> None:
        """The unit's parameters are present (or, with GRADIENT_ONLY, its gradients may be added) until the limit of
        units that are held sends it away."""
        self.check_open()
        with self.lock:
            self.updates.before_use(self)
            self._last_use[unit] = next(self._uses)
            held = self.engine._accesses(unit)
            if held & 1 << access:
                return
            if access == _abi.GRADIENT_ONLY or torch.is_grad_enabled():
                self.begin_step()
            self.first_step.note(self.keeper.look())
            self.stored.drop_ended()
            if not held:
                self._make_room()
            self.engine._handle.call("sluice_engine_acquire", unit, access)

    def _make_room(self) -> None:
        """Those that were used longest ago go, until one more unit can be held."""
        held = sorted(self.engine._held_units(), key=self._last_use.__getitem__)
        for unit in held[: max(0, len(held) + 1 - self.limit)]:
            self.release(unit)

    def release(self, unit: int) -> None:
        """The unit is not held any more."""
        self.updates.release(unit)
        for _ in range(self.engine._times_held(unit)):
            self.engine._handle.call("sluice_engine_release", unit)

    def release_all(self) -> None:
        """No unit is held any more."""
        with self.lock:
            if not (self.engine.closed or self.engine._handle.inherited):
                for unit in self.engine._held_units():
                    self.release(unit)

    def touches(self) -> int:
        """How often a parameter was touched that was not present."""
        return self.engine.counters().touches

    def changed(self) -> None:
        """The values of all parameters are others now."""
        for home in self.homes:
            home.changed()

    def check_open(self, closed: str = _OLD_GRAPH) -> None:
        """Raises StateError where the engine is closed; with this text where sluice.torch.close() did that."""
        self.engine._handle.check()
        if self.engine.closed:
            raise StateError(closed if self.engine.left else _LOST)

    # ---- steps ----

    def begin_step(self) -> None:
        """There is a step, from now on if there was none."""
        if self.trainable and not self.engine.in_step:
            self.updates.begin(self)

    def begin_anew(self) -> None:
        """The step that was begun, and has no gradient yet, begins again."""
        self._abandon_step()
        self.begin_step()

    def apply_gradient(self, home: Home, values: torch.Tensor) -> None:
        """The gradient is applied in backward, and nothing of it is kept."""
        with self.lock:
            self.updates.apply(self, home, values)

    def end_begun_step(self, verb: str) -> None:
        """A checkpoint is to be saved or loaded (the verb): nothing is held, and a step that has no gradient yet is not
        begun. StateError where it has some."""
        with self.lock:
            self._drop_unused()
            self.release_all()
            if not self.engine.in_step:
                return
            if self.updates.begun:
                raise StateError(
                    f"a checkpoint is {verb} between backward and optimizer.step(), which ends a step; do it after that"
                )
            if self.stored.entries:
                names = ", ".join(repr(self.homes[index].name) for index in list(self.stored.entries)[:3])
                raise StateError(
                    f"a checkpoint is {verb} while {len(self.stored.entries)} parameters ({names}, ...) have gradients, which "
                    "it does not hold; do it after optimizer.step() and before the next forward pass, or after "
                    "optimizer.zero_grad(set_to_none=True)"
                )
            self._abandon_step()

    def _abandon_step(self) -> None:
        self.release_all()
        if self.engine.in_step:
            self.engine.own.abandon_step()

    def _drop_unused(self) -> None:
        """What the engine has of gradients that are no parameter's any more ends."""
        self.stored.drop_ended()
        for entry in list(self.stored.entries.values()):
            if getattr(self.homes[entry.index].parameter.grad, "_slot", None) is not entry:
                self.stored.end(entry)

    # ---- the plan ----

    def grown(self) -> int:
        """By how much the process is larger than when the model was wrapped, for what is not the model's."""
        return max(0, self.keeper.give_back() - self.first_step.held)

    def replan(self, reserve: int, estimated: int) -> None:
        """The engine plans with so much for PyTorch, of which so much is alive at once. Raises BudgetError where that does
        not fit, and StateError where gradients are in the way, with nothing changed."""
        with self.lock:
            self._drop_unused()
            if self.stored.entries or (self.engine.in_step and self.updates.begun):
                raise StateError("there are gradients, of a step that optimizer.step() and zero_grad() have not ended")
            self._abandon_step()
            before = self.keeper.give_back()
            self.engine._handle.call("sluice_engine_replan", reserve)
            self.first_step.replanned(reserve, estimated, resident_bytes() - before)
            self.first_step.planned(self.engine.plan()["predicted_peak"])
