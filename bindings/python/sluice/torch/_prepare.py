"""What wrap() and plan() are given, made into what an engine is planned for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ..engine import plan
from ..errors import BudgetError, InvalidArgumentError, StateError
from ..model import Options, Size, Unit, size_of, whole
from ..optimizers import AdamW, Muon
from ..optimizers import Optimizer as Settings
from ._checks import check_model, check_trainable
from ._estimate import FIXED, estimate
from ._libraries import sgemm, team
from ._roles import roles_of
from ._units import Group, Roles, find_units, held_at_least, named_units, units_of

_RESERVES = (512 << 20, FIXED)  # until the first call tells; the first that fits


class Prepared(NamedTuple):
    """A model that can be wrapped, and how."""

    groups: list[Group]
    settings: list[Settings]  # of each parameter group
    roles: Roles
    options: Options
    train: bool  # whether there is an optimizer
    estimated: Optional[int]  # bytes that PyTorch has at most at once, where that was found out
    stated: bool  # what is reserved for PyTorch is the user's word
    clip_value: Optional[float]

    def units(self) -> list[Unit]:
        """As the engine takes them."""
        return units_of(self.groups, self.roles, self.train)


def prepare(
    model: torch.nn.Module,
    optimizer: Optional[Settings],
    *,
    memory: Size,
    reserve: Optional[Size] = None,
    sample_batch: Any = None,
    param_groups: Optional[Sequence[Mapping[str, Any]]] = None,
    units: Optional[Mapping[str, Sequence[str]]] = None,
    threads: int = 0,
    held_units: int = 3,
    prefetch: int = 0,
    clip_value: Optional[float] = None,
    **others: Any,
) -> Prepared:
    """All names are those of wrap(); others: those that Options has too. Takes no memory, and leaves the model as it is.
    Raises InvalidArgumentError for what cannot be wrapped so, StateError for what is wrapped."""
    check_model(model)
    _refuse_wrapped(model)
    _check_optimizer(optimizer, others.get("update_in_backward", False), param_groups)
    if optimizer is not None:
        check_trainable(model)
    if clip_value is not None and not 0 < clip_value < math.inf:
        raise InvalidArgumentError(
            f"clip_value is {clip_value}; a finite bound above 0 is needed, or None for no clipping"
        )
    groups = named_units(model, units) if units is not None else find_units(model)
    if not groups:
        raise InvalidArgumentError(f"the model ({type(model).__name__}) has no parameters with elements")
    _check_ahead(held_units, prefetch, len(groups))
    settings, roles = roles_of(model, AdamW() if optimizer is None else optimizer, param_groups or [])
    reserves, estimated = _reserves(model, reserve, sample_batch, optimizer is not None)
    options = Options(
        memory=memory,
        reserved=reserves[0],
        optimizer=settings,
        threads=threads or torch.get_num_threads(),
        held_units=max(held_units, held_at_least(model, groups)),
        prefetch=prefetch,
        given_back=_bytes_in_memory(groups),
        serve_touches=True,
        sgemm=sgemm() if isinstance(optimizer, Muon) else None,
        team=team(),
        **others,
    )
    made = Prepared(
        groups, settings, roles, options, optimizer is not None, estimated, reserve is not None, clip_value
    )
    return made if len(reserves) == 1 else _fitting(made, reserves)


def _refuse_wrapped(model: torch.nn.Module) -> None:
    owners = {name: owner for name, p in model.named_parameters() if (owner := getattr(p, "_sluice", None)) is not None}
    if any(owner.model() is model and not owner.engine.closed for owner in owners.values()):
        raise StateError(
            "the model is wrapped already, and sluice.torch.engine_of(model).plan() is its plan; "
            "sluice.torch.close(model) ends that"
        )
    for name, owner in owners.items():
        if owner.engine.closed:
            raise StateError(
                f"the values of '{name}' are gone with the engine of its model, which was closed by itself; "
                "sluice.torch.close(model) keeps them. Make the model anew"
            )
        raise StateError(f"'{name}' belongs to another wrapped model; close that, or wrap the whole once")


def _check_optimizer(
    optimizer: Any, update_in_backward: bool, param_groups: Optional[Sequence[Mapping[str, Any]]]
) -> None:
    if optimizer is not None and not isinstance(optimizer, Settings):
        raise InvalidArgumentError(
            f"the optimizer is {optimizer!r:.80}; settings such as sluice.AdamW(lr=1e-4) are needed, or None for a model "
            "that is not trained (a batch is given as sample_batch=)"
        )
    for name, given in (("update_in_backward is", update_in_backward), ("param_groups are", param_groups is not None)):
        if optimizer is None and given:
            raise InvalidArgumentError(f"{name} given without an optimizer; give one, such as sluice.AdamW()")


def _check_ahead(held_units: int, prefetch: int, units: int) -> None:
    if whole(held_units, "held_units") == 0:
        raise InvalidArgumentError("held_units is 0; the unit that computes is held, so 1 is the least")
    if whole(prefetch, "prefetch") > 2 * units:
        raise InvalidArgumentError(
            f"prefetch is {prefetch}, and a step uses the model's {units} units about {2 * units} times, forward and "
            "backward; give no more than that, or 0 for what the plan finds best"
        )


def _reserves(
    model: torch.nn.Module, reserve: Optional[Size], sample_batch: Any, train: bool
) -> tuple[Sequence[int], Optional[int]]:
    """What may be planned for PyTorch, the best first, and what was estimated that it has at most at once, where it was."""
    if reserve is not None:
        return [size_of(reserve, "reserve")], None
    if sample_batch is None:
        return _RESERVES, None
    found = estimate(model, sample_batch, train)
    return [found.reserve], found.peak


def _fitting(prepared: Prepared, reserves: Sequence[int]) -> Prepared:
    """With the first of these for which there is a plan, else with the last."""
    for reserved in reserves:
        prepared = prepared._replace(options=dataclasses.replace(prepared.options, reserved=reserved))
        with contextlib.suppress(BudgetError):
            plan(prepared.units(), prepared.options)
            break
    return prepared


def _bytes_in_memory(groups: Sequence[Group]) -> int:
    """What the parameters take now, and will not any more when they are the engine's."""
    return sum(
        p.numel() * p.element_size()
        for group in groups
        if group.ends_parameters
        for _, p in group.parameters
        if not p.is_meta
    )
