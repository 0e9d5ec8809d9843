"""Wrapping a model, and what is done with a wrapped one."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, TypeVar, Union

import torch

from ..engine import Engine
from ..errors import InvalidArgumentError, StateError
from ..model import Folder, Options, Path, Size
from ..optimizers import AdamW
from ..optimizers import Optimizer as Settings
from ._optimizer import Optimizer
from ._session import Session
from ._units import Group, find_units, named_units

Model = TypeVar("Model", bound=torch.nn.Module)

_sessions: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()


def wrap(
    model: Model,
    optimizer: Optional[Settings] = None,
    *,
    memory: Size,
    disk: Union[Path, Folder, Sequence[Union[Path, Folder]], None] = None,
    reserve: Size = "512MiB",
    param_groups: Optional[Sequence[Mapping[str, Any]]] = None,
    units: Optional[Mapping[str, Sequence[str]]] = None,
    threads: int = 0,
    held_units: int = 3,
    prefetch: int = 0,
    trace_events: int = 0,
    place: Union[str, Mapping[str, str], None] = None,
) -> tuple[Model, Optional[Optimizer]]:
    """Moves a model's parameters into an engine; gives the same model, and a torch.optim.Optimizer of its trainable
    parameters (None without `optimizer`: for evaluation and generation).

    memory: the budget of the whole process, what PyTorch takes itself (`reserve`) included.
    disk: a folder, or several that are striped, for what does not fit in memory.
    reserve: what PyTorch will take beyond what the process holds now: activations, temporary tensors.
    param_groups: as torch.optim has them: dicts of "params" (parameters or their names), "lr", "weight_decay"; what is
        in none has the settings of `optimizer`.
    units: what is fetched together: name -> names of modules or parameters; the rest is found by itself.
    threads: of updates; 0: as many as PyTorch uses.
    held_units: the most units that are kept at hand at once.
    place: "memory" or "disk" for everything, or a mapping; for tests and measurements.

    Raises BudgetError where it does not fit, InvalidArgumentError for a model that cannot be wrapped; the model is then
    as it was.
    """
    if model in _sessions and not _sessions[model].engine.closed:
        raise StateError("the model is wrapped already; sluice.torch.close(model) ends that")
    groups = named_units(model, units) if units is not None else find_units(model)
    if not groups:
        raise InvalidArgumentError(f"the model ({type(model).__name__}) has no parameters")
    if optimizer is None and param_groups is not None:
        raise InvalidArgumentError("param_groups are given without an optimizer; give one, such as sluice.AdamW()")
    settings, settings_of = _settings(model, optimizer or AdamW(), param_groups or [])
    options = Options(
        memory=memory,
        disk=disk,
        reserved=reserve,
        optimizer=settings,
        dtype="bf16" if _first(groups).dtype == torch.bfloat16 else "f32",
        threads=threads or torch.get_num_threads(),
        held_units=held_units,
        trace_events=trace_events,
        prefetch=prefetch,
        place=place,
        given_back=sum(group.bytes for group in groups),
        serve_touches=True,
    )
    session = Session(model, groups, settings_of, settings, options)
    _sessions[model] = session
    return model, Optimizer(session, settings) if optimizer is not None else None


def _first(groups: Sequence[Group]) -> torch.nn.Parameter:
    return groups[0].parameters[0][1]


def _settings(
    model: torch.nn.Module, optimizer: Settings, param_groups: Sequence[Mapping[str, Any]]
) -> tuple[list[Settings], dict[int, int]]:
    """The settings of each group, the first being the rest's; and parameter id -> group."""
    names = dict(model.named_parameters())
    known = {id(p) for p in names.values()}
    settings, group_of = [optimizer], {}
    for given in param_groups:
        other = set(given) - {"params", "lr", "weight_decay"}
        if other:
            raise InvalidArgumentError(f"a parameter group has {sorted(other)}; it may have params, lr, weight_decay")
        own: Any = {name: given[name] for name in ("lr", "weight_decay") if name in given}
        settings.append(dataclasses.replace(optimizer, **own))
        for member in given["params"]:
            p = names.get(member) if isinstance(member, str) else member
            if p is None or id(p) not in known:
                raise InvalidArgumentError(f"a parameter group has {member!r:.80}, which is no parameter of the model")
            if id(p) in group_of:
                raise InvalidArgumentError("a parameter is in two parameter groups; leave it in one")
            group_of[id(p)] = len(settings) - 1
    return settings, group_of


def _session(model: torch.nn.Module) -> Session:
    session = _sessions.get(model)
    if session is None:
        raise StateError(f"the model ({type(model).__name__}) is not wrapped; see sluice.torch.wrap()")
    return session


def engine_of(model: torch.nn.Module) -> Engine:
    """The engine of a wrapped model: its ledger, plan, counters and trace."""
    return _session(model).engine


def close(model: torch.nn.Module) -> None:
    """The model's parameters are plain tensors again, with their values; engine and disk space are given back."""
    _session(model).close()
    del _sessions[model]


@contextlib.contextmanager
def edit(model: torch.nn.Module) -> Iterator[None]:
    """Parameters may be written inside of the `with`, by any means; they are the model's values afterwards, and the
    optimizer's master copies."""
    session = _session(model)
    session.release_all()
    yield
    session.release_all()
