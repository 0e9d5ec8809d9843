"""The optimizer of a wrapped model, as a torch.optim.Optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import InvalidArgumentError, StateError
from ..optimizers import Optimizer as Settings
from . import _state
from ._at_once import UpdatesInBackward
from ._roles import changed
from ._session import Session
from ._stances import outside_of_graphs


_NOT_HAD = ("amsgrad", "maximize", "momentum", "dampening", "nesterov", "centered")  # refused unless a setting has that name


def _settings_of_group(group: Mapping[str, Any], made_with: Settings) -> Settings:
    """A group's settings that are in force. Raises where one is not valid, or cannot change."""
    had = vars(made_with)
    for name in _NOT_HAD:
        if name not in had and group.get(name):
            raise InvalidArgumentError(
                f"{name} is {group[name]}, which the wrapped model's optimizer does not have; leave it out"
            )
    return changed(made_with, {name: value for name, value in group.items() if name in had})


class _Group(dict[str, Any]):
    """A parameter group that raises when a setting that cannot change is set, and not at the next step."""

    def __init__(self, group: Mapping[str, Any], made_with: Settings) -> None:
        super().__init__(group)
        self._made_with = made_with

    def __setitem__(self, name: str, value: Any) -> None:
        _settings_of_group({name: value}, self._made_with)
        super().__setitem__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies plain dicts."""
        return dict, (dict(self),)


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state the engine has. In its groups lr, betas, momentum (which torch.optim's LR
    schedulers change), weight_decay and eps may change at any time; the other settings are fixed."""

    def __init__(self, session: Session, settings: Sequence[Settings]) -> None:
        self._session = session
        self._sealed = False
        first = settings[0]
        defaults = dict(vars(first))
        presence = session.presence
        homes = sorted((home for home in presence.homes if home.trainable), key=lambda home: home.position)
        groups = [
            {
                "params": [home.parameter for home in homes if home.group == g],
                **{name: getattr(each, name) for name in each.of_step},
            }
            for g, each in enumerate(settings)
        ]
        super().__init__(groups, defaults)
        self._first = first
        self._members = [[id(p) for p in group["params"]] for group in self.param_groups]
        self._guard_groups()
        self._sealed = True
        if presence.engine.options.update_in_backward:
            presence.updates = UpdatesInBackward(presence.homes, _settings_of(weakref.ref(self)))

    def _guard_groups(self) -> None:
        self.param_groups = [_Group(group, self._first) for group in self.param_groups]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "a wrapped model's optimizer is to be copied or pickled, and its state is the engine's; save its state_dict(), "
            "and load that into another's"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises once the optimizer is made, since the engine's parameters are those that were wrapped."""
        if self._sealed:
            raise InvalidArgumentError(
                "a wrapped model's optimizer takes no further parameters; close it, and wrap the model again with "
                "param_groups"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The settings of the groups and the engine's state, as torch.optim has them, after pending updates. It may be larger
        than memory: where the model was wrapped with a disk folder, the tensors lie in files there, which end with them.
        All ranks call it; where state is partitioned over them, that of rank 0 alone has the state. Raises BudgetError where
        they have no room."""
        self._check_open()
        made = super().state_dict()
        with self._session.presence.turns:
            state = _state.read(self._session.presence)
        made["state"] = {i: state[index] for i, index in enumerate(self._indices()) if index in state}
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of the same optimizer for the same model, of Sluice or torch.optim. Raises
        InvalidArgumentError, with nothing changed, where it does not fit."""
        self._check_open()
        indices = self._indices()
        unknown = [i for i in state_dict.get("state", {}) if i not in range(len(indices))]
        if unknown:
            raise InvalidArgumentError(
                f"the state_dict has state of parameter {unknown[0]!r}, and the optimizer {len(indices)} parameters; load "
                "the state_dict of the same model"
            )
        before = super().state_dict()
        super().load_state_dict({**state_dict, "state": {}})  # checks the groups first
        try:
            self._settings()
            with self._session.presence.turns:
                _state.write(self._session.presence, {indices[i]: given for i, given in state_dict.get("state", {}).items()})
        except InvalidArgumentError:
            super().load_state_dict(before)
            raise
        finally:
            self._guard_groups()

    def _check_open(self) -> None:
        self._session.presence.check_open(
            "the model was closed, and its optimizer's state with it; take the state_dict() before sluice.torch.close(), "
            "and wrap the model again to load one"
        )

    def _indices(self) -> list[int]:
        """The engine's index of each parameter, in the order of a state_dict."""
        by_id = self._session.presence.by_id
        return [by_id[id(p)].index for group in self.param_groups for p in group["params"]]

    def _settings(self) -> list[Settings]:
        """The groups' settings that are in force now. Raises where one changed that cannot."""
        if [[id(p) for p in group["params"]] for group in self.param_groups] != self._members:
            raise InvalidArgumentError(
                "parameters were put into the optimizer's groups, or taken out; they are those that were wrapped. To leave "
                "one as it is set requires_grad_(False), or its grad to None; for other groups wrap the model again with "
                "param_groups"
            )
        return [_settings_of_group(group, self._first) for group in self.param_groups]

    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. Updates may go on after the call; a use of a parameter waits for
        its update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if float(getattr(self, "found_inf", 0.0)) == 0:
            self._session.step(self._settings(), 1.0 / float(getattr(self, "grad_scale", None) or 1.0))
        return loss

    @outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of each torch.optim.Optimizer."""
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells GradScaler that step() unscales by `grad_scale`, and does nothing where `found_inf` is set: GradScaler
        itself refuses to unscale gradients in float16."""
        return any(home.trainable and home.memory.dtype == torch.float16 for home in self._session.presence.homes)


def _settings_of(optimizer: weakref.ref[Optimizer]) -> Callable[[], Sequence[Settings]]:
    """A function that returns an optimizer's settings without keeping it alive."""

    def settings() -> Sequence[Settings]:
        alive = optimizer()
        if alive is None:
            raise StateError(
                "a gradient is to be applied in backward, and the optimizer that sluice.torch.wrap() gave is gone; keep it"
            )
        return alive._settings()

    return settings


def _refuse_others(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses other optimizers before their step: their state would be in no plan, and their updates would be edits."""
    if isinstance(getattr(optimizer, "optimizer", optimizer), Optimizer):  # Accelerate wraps it
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        session = getattr(p, "_sluice", None)
        if session is not None:
            raise StateError(
                f"'{session.presence.by_id[id(p)].name}' is of a wrapped model, and {type(optimizer).__name__}, which is not "
                "its optimizer, is to update it; use the one that sluice.torch.wrap() gave (with transformers.Trainer: "
                "optimizers=(optimizer, None)), or sluice.torch.close() the model before"
            )


register_optimizer_step_pre_hook(_refuse_others)
