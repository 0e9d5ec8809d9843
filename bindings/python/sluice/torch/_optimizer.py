"""The optimizer of a wrapped model, as a torch.optim.Optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import InvalidArgumentError, StateError
from ..optimizers import Optimizer as Settings
from . import _state
from ._homes import Home
from ._prepare import settings_of_group
from ._presence import UpdatesInBackward
from ._session import Session
from ._modes import outside_of_graphs
from ._units import Roles


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state the engine has. In its groups lr, betas, momentum (which torch.optim's LR
    schedulers change), weight_decay and eps may change at any time; the other settings are fixed."""

    def __init__(self, session: Session, settings: Sequence[Settings], roles: Roles) -> None:
        self._session = session
        self._sealed = False
        first = settings[0]
        presence, model = session.presence, session.model()
        assert model is not None, "it is being wrapped"
        parameters = dict(model.named_parameters())
        of_members = [[parameters[name] for name in members if name in parameters] for members in roles.members]  # other stages have others
        groups = [
            {**keys, "params": members, **{name: getattr(each, name) for name in each.of_step}}
            for each, members, keys in zip(settings, of_members, roles.keys, strict=True)
        ]
        super().__init__(groups, {**vars(first), **first.implied})
        self._first = first
        self._names = roles.members
        self._members = [[id(p) for p in group["params"]] for group in self.param_groups]
        self._sealed = True
        session.engine.optimizer = weakref.ref(self)
        if presence.engine.options.update_in_backward:
            presence.updates = UpdatesInBackward(presence.homes, weakref.WeakMethod(self._settings))

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
        with self._session.presence.users:
            state = _state.read(self._session.presence)
        made["param_groups"] = [{**group, **self._first.implied} for group in made["param_groups"]]
        made["state"] = {i: state[home.index] for i, home in enumerate(self._homes()) if home and home.index in state}
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of the same optimizer for the same model, of Sluice or torch.optim. Raises
        InvalidArgumentError, with nothing changed, where it does not fit."""
        self._check_open()
        homes, given = self._homes(), state_dict.get("state", {})
        unknown = [i for i in given if i not in range(len(homes))]
        if unknown:
            raise InvalidArgumentError(
                f"the state_dict has state of parameter {unknown[0]!r}, and the optimizer {len(homes)} parameters; load "
                "the state_dict of the same model"
            )
        state = {home.index: given[i] for i in given if (home := homes[i]) is not None and home.trainable}
        frozen = [home.name for i in given if given[i] and (home := homes[i]) is not None and not home.trainable]
        if frozen:
            warnings.warn(
                f"the state_dict has state of '{frozen[0]}', which was frozen when the model was wrapped; such state is left out "
                f"({len(frozen)} parameters)",
                UserWarning,
                stacklevel=2,
            )
        before = super().state_dict()
        super().load_state_dict({**state_dict, "state": {}})  # checks the groups first
        try:
            self._settings()
            with self._session.presence.users:
                _state.write(self._session.presence, state)
        except Exception:
            super().load_state_dict(before)
            raise

    def _check_open(self) -> None:
        self._session.presence.check_open(
            "the model was closed, and its optimizer's state with it; take the state_dict() before sluice.torch.close(), "
            "and wrap the model again to load one"
        )

    def _homes(self) -> list[Optional[Home]]:
        """The home of each parameter, in the order of a state_dict; None: it has no elements."""
        by_id = self._session.presence.by_id
        return [by_id.get(id(p)) for group in self.param_groups for p in group["params"]]

    def _settings(self) -> list[Settings]:
        """The groups' settings that are in force now. Raises where one changed that cannot."""
        if [[id(p) for p in group["params"]] for group in self.param_groups] != self._members:
            raise InvalidArgumentError(
                "parameters were put into the optimizer's groups, or taken out; they are those that were wrapped. To leave "
                "one as it is set requires_grad_(False), or its grad to None; for other groups wrap the model again with "
                "param_groups"
            )
        return [settings_of_group(group, self._first) for group in self.param_groups]

    def told(self) -> list[dict[str, Any]]:
        """The groups' settings and other keys, with the parameters' names, for a checkpoint."""
        return [{**group, **_as_numbers(group), "params": names} for group, names in zip(self.param_groups, self._names, strict=True)]

    def taken(self, groups: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """A function that sets the groups to what told() said. Raises InvalidArgumentError where that does not fit."""
        names = [group["params"] for group in groups]
        if names != self._names:
            raise InvalidArgumentError(
                f"the checkpoint has parameter groups of {[len(each) for each in names]} parameters, and this optimizer of "
                f"{[len(each) for each in self._names]}, or of others; wrap the model with the param_groups with which it was saved"
            )
        given = [{key: _as_tuple(value) for key, value in group.items() if key != "params"} for group in groups]
        for group in given:
            settings_of_group(group, self._first)

        def take() -> None:
            for group, values in zip(self.param_groups, given, strict=True):
                group.update(values)

        return take

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


def _as_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() for key, value in group.items() if isinstance(value, torch.Tensor) and value.numel() == 1}


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
