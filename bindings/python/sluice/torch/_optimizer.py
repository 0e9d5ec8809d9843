"""The optimizer of a wrapped model, as torch.optim has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from ..errors import InvalidArgumentError
from ..optimizers import Optimizer as Settings
from ._session import Session


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state is the engine's. lr and weight_decay of its groups may change at any time (so
    every LR scheduler works); the other settings stay as they are."""

    def __init__(self, session: Session, settings: Sequence[Settings]) -> None:
        self._session = session
        self._sealed = False
        first = settings[0]
        defaults = dataclasses.asdict(first)
        groups = [
            {
                "params": [h.parameter for h in session.homes if h.trainable and h.group == g],
                "lr": each.of_step[0],
                "weight_decay": each.of_step[1],
            }
            for g, each in enumerate(settings)
        ]
        super().__init__(groups, defaults)
        self._first = first
        self._sealed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: the engine's parameters are those that were wrapped."""
        if self._sealed:
            raise InvalidArgumentError(
                "a wrapped model's optimizer takes no further parameters; close it, and wrap the model again with "
                "param_groups"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """Updates what has a gradient. The updates go on behind the call, and are complete when a parameter is used."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings = []
        for group in self.param_groups:
            for name, fixed in self._first.fixed.items():
                given = tuple(group[name]) if isinstance(fixed, tuple) else group[name]
                if given != fixed:
                    raise InvalidArgumentError(
                        f"{name} is {given}, and the model was wrapped with {fixed}; it cannot change"
                    )
            changed: Any = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
            settings.append(dataclasses.replace(self._first, **changed))
        self._session.step(settings)
        return loss
