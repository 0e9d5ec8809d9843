"""What wrap() and plan() are given, made into what an engine is planned for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ..engine import plan
from ..errors import BudgetError
from ..model import Options, Size, Unit, size_of
from ..optimizers import AdamW, Muon
from ..optimizers import Optimizer as Settings
from ._checks import check_ahead, check_model, check_optimizer
from ._estimate import FIXED, estimate
from ._libraries import sgemm, team
from ._roles import roles_of
from ._units import Group, Roles, bytes_in_memory, find_units, held_at_least, units_of

_RESERVES = (512 << 20, FIXED)  # of which the first that fits is taken until the first call tells


class Prepared(NamedTuple):
    """A model that can be wrapped, and how."""

    groups: list[Group]
    units: list[Unit]  # the same as the engine takes them
    settings: list[Settings]  # of each parameter group
    roles: Roles
    options: Options
    train: bool  # whether there is an optimizer
    estimated: Optional[int]  # bytes that PyTorch has at most at once, where that was found out
    stated: bool  # what is reserved for PyTorch is the user's word
    clip_value: Optional[float]


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
    check_model(model, optimizer is not None)
    check_optimizer(optimizer, others.get("update_in_backward", False), param_groups, clip_value)
    groups = find_units(model, units)
    check_ahead(held_units, prefetch, len(groups))
    settings, roles = roles_of(model, AdamW() if optimizer is None else optimizer, param_groups or [])
    reserves, estimated = _reserves(model, reserve, sample_batch, optimizer is not None)
    options = Options(
        memory=memory,
        reserved=reserves[0],
        optimizer=settings,
        threads=threads or torch.get_num_threads(),
        held_units=max(held_units, held_at_least(model, groups)),
        prefetch=prefetch,
        given_back=bytes_in_memory(groups),
        serve_touches=True,
        sgemm=sgemm() if isinstance(optimizer, Muon) else None,
        team=team(),
        **others,
    )
    declared = units_of(groups, roles, optimizer is not None)
    if len(reserves) > 1:
        options = _fitting(declared, options, reserves)
    return Prepared(
        groups, declared, settings, roles, options, optimizer is not None, estimated, reserve is not None, clip_value
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


def _fitting(units: Sequence[Unit], options: Options, reserves: Sequence[int]) -> Options:
    """With the first of these reserves for which there is a plan, else with the last."""
    for reserved in reserves:
        options = dataclasses.replace(options, reserved=reserved)
        with contextlib.suppress(BudgetError):
            plan(units, options)
            break
    return options
