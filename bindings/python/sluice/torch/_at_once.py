"""Updates in backward: a gradient is applied when its unit's backward is done, and never stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from ..errors import StateError
from ..optimizers import Optimizer as Settings
from ._homes import Home
from ._presence import Presence, Updates


class UpdatesInBackward(Updates):
    """Applies gradients in backward. A step begins with the forward pass, takes the settings in force at its first
    gradient, and ends with optimizer.step(). A parameter's second gradient, after zero_grad(), begins another step, since
    the first was applied, whether or not step() was called. With several ranks each applies the mean of what all have, and
    a backward pass that fails on one of them fails the engines of all, once anything of it was summed."""

    in_backward = True

    def __init__(self, homes: Sequence[Home], settings: Callable[[], Sequence[Settings]]) -> None:
        """settings: returns the settings that are in force now."""
        self._settings = settings
        self._given: Sequence[Settings] = ()
        self._homes: dict[int, list[Home]] = {}  # by unit
        for home in homes:
            if home.trainable:
                for unit in home.units:
                    self._homes.setdefault(unit, []).append(home)
        self._had: set[int] = set()  # parameters that had their gradient in this step
        self._open: dict[int, list[Home]] = {}  # by unit: the homes whose gradients are not applied yet
        self._passes: dict[int, int] = {}  # the threads of backward passes that gave gradients and have not ended, by id

    @property
    def begun(self) -> bool:
        """Whether a gradient of this step was applied already."""
        return bool(self._had)

    def before_use(self, presence: Presence) -> None:
        """Comes before a use of parameters. Outside of backward passes, one of this thread that has not ended has failed:
        its gradients are applied now, before graphs are made of the parameters that they change."""
        if self._has_failed(presence.engine.gpu is not None):
            self._end(presence)

    def _has_failed(self, on_gpu: bool) -> bool:
        """Whether a backward pass of this thread has not ended, and none runs. For a GPU PyTorch runs it in a thread of its own."""
        mine = bool(self._passes) if on_gpu else threading.get_ident() in self._passes.values()
        return mine and _current_pass() is None

    def _note_pass(self) -> None:
        now = _current_pass()
        if now is not None and now not in self._passes:
            passes = self._passes

            def forget() -> None:
                passes.pop(now, None)

            torch.autograd.Variable._execution_engine.queue_callback(forget)
            passes[now] = threading.get_ident()

    def begin(self, presence: Presence) -> None:
        """Begins the engine's step."""
        self._given = self._settings()
        self._had.clear()
        self._open.clear()
        presence.engine.own.begin_step(self._given, clip_value=presence.clip_value)

    def apply(self, presence: Presence, home: Home, values: torch.Tensor) -> None:
        """Takes the parameter's only gradient of this step."""
        if home.index in self._had:
            self._end(presence)
        if not self._had and list(self._settings()) != list(self._given):
            presence.begin_anew()
        presence.begin_step()
        self._note_pass()
        self._had.add(home.index)  # comes first, since a KeyboardInterrupt may follow
        for unit in home.units:
            self._open.setdefault(unit, []).append(home)
        presence.stored.add(home, values)
        for unit in home.units:
            if all(other.index in self._had for other in self._homes[unit]):
                presence.release(unit)

    def release(self, unit: int) -> None:
        """Comes when a unit is released, which makes its gradients final."""
        for home in self._open.pop(unit, ()):
            home.changed()

    def end(self, presence: Presence, got: Sequence[Home], settings: Sequence[Settings], factor: float) -> bool:
        """Ends the engine's step, whose updates were made, but for gradients that the user put there since."""
        return self._end(presence) and bool(got)

    def _end(self, presence: Presence) -> bool:
        several = presence.engine.options.ranks is not None
        if several and self._has_failed(presence.engine.gpu is not None):
            return self._abandon(presence)
        self._passes.clear()
        presence.release_all()
        if several:
            presence.begin_step()  # other ranks may have gradients
        elif not self._had or not presence.engine.in_step:
            return False
        presence.engine.own.step()
        if several:
            presence.changed()
        self._had.clear()  # comes last, since a KeyboardInterrupt may come before
        presence.first_step.end()
        return True

    def _abandon(self, presence: Presence) -> bool:
        """Ends a step whose backward pass failed on this rank: others may have gradients of it that this one does not."""
        self._passes.clear()
        presence.abandon_step()
        self._had.clear()
        return False


def _current_pass() -> int | None:
    """The number of the backward pass that runs in this thread, if any does."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def refuse_use(name: str) -> StateError:
    """The error for a use of a gradient that was applied."""
    return StateError(
        f"the gradient of '{name}' is gone: it was applied in backward (update_in_backward=True). Clipping by the norm, "
        "gradient accumulation, loss scaling (GradScaler) and anything else that looks at p.grad need it: wrap the model "
        "without update_in_backward, or call zero_grad() before the next backward"
    )
