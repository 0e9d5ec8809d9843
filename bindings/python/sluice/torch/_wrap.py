"""Wrapping a model, and what is done with a wrapped one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, TypeVar, Union

import torch

from ..engine import Engine
from ..engine import plan as _plan
from ..errors import StateError
from ..model import Folder, Path, Size
from ..optimizers import Optimizer as Settings
from . import _first_values
from ._optimizer import Optimizer
from ._prepare import Prepared, prepare
from ._safetensors import Stored
from ._session import Session
from ._weights import source_of, stored_of

Model = TypeVar("Model", bound=torch.nn.Module)

_sessions: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()


def wrap(
    model: Model,
    optimizer: Optional[Settings] = None,
    *,
    memory: Size,
    disk: Union[Path, Folder, Sequence[Union[Path, Folder]], None] = None,
    reserve: Optional[Size] = None,
    sample_batch: Any = None,
    param_groups: Optional[Sequence[Mapping[str, Any]]] = None,
    units: Optional[Mapping[str, Sequence[str]]] = None,
    threads: int = 0,
    held_units: int = 3,
    prefetch: int = 0,
    trace_events: int = 0,
    place: Union[str, Mapping[str, str], None] = None,
    weights: Optional[Path] = None,
    state: str = "f32",
    master: str = "f32",
    seed: int = 0,
    update_in_backward: bool = False,
    clip_value: Optional[float] = None,
) -> tuple[Model, Optional[Optimizer]]:
    """Moves a model's parameters into an engine; gives the same model, and a torch.optim.Optimizer of its trainable
    parameters (None without `optimizer`: for evaluation and generation).

    memory: the budget of the whole process, what PyTorch takes itself (`reserve`) included.
    disk: a folder, or several that are striped, for what does not fit in memory.
    reserve: what PyTorch will take beyond what the process holds now: activations, temporary tensors. It is taken as it
        is; where the first step takes more, a warning says how much. None: found at each call that is larger than those
        before, from its arguments and without memory, before it computes: the plan is changed for it, or the call is a
        BudgetError, with nothing changed (InvalidArgumentError where its operations depend on values). Until the first
        call 512MiB are assumed, or 160MiB. engine_of(model).plan()["pytorch"] has what was estimated and measured.
    sample_batch: what the model is called with: a dict of keyword arguments, a tuple of arguments, or one argument. The
        first plan is made for that.
    param_groups: as torch.optim has them: dicts of "params" (parameters or their names), and of what may be other for
        each group ("lr", "weight_decay", "betas", ...); what is in none has the settings of `optimizer`. With Muon also
        "use_muon": whether matrices among them are Muon's; without it all are but embeddings and the output head (what
        get_output_embeddings() gives, where the model has that).
    units: what is fetched together: name -> names of modules or parameters; the rest is found by itself.
    threads: of updates; 0: as many as PyTorch uses.
    held_units: the most units that are kept at hand at once.
    place: "memory" or "disk" for everything, or a mapping; for tests and measurements.
    weights: a folder of safetensors, for a model on the meta device: what is there by its name is streamed from it, and
        the rest gets its first values by the model's own rules (adapters).
    state: type of the optimizer's state, "f32", "bf16" or "8bit".
    update_in_backward: a gradient is applied in backward, as soon as its unit's are all there, and never stored: with the
        settings in force then, and before the others are known. So there is no clipping by norm, no accumulation and no
        loss scaling, and p.grad cannot be looked at: an error each. optimizer.step() ends the step.
    clip_value: bound of each element of a gradient, applied by the update itself, also with update_in_backward; after
        clipping by norm, where the loop does that. None: none.
    master: "none" keeps no f32 masters of bfloat16 parameters, and rounds updates stochastically, by `seed`.

    Raises BudgetError where it does not fit, InvalidArgumentError for a model that cannot be wrapped; the model is then
    as it was.
    """
    prepared = prepare(
        model,
        optimizer,
        memory=memory,
        disk=disk,
        reserve=reserve,
        sample_batch=sample_batch,
        param_groups=param_groups,
        units=units,
        threads=threads,
        held_units=held_units,
        prefetch=prefetch,
        trace_events=trace_events,
        place=place,
        state=state,
        master=master,
        seed=seed,
        update_in_backward=update_in_backward,
        clip_value=clip_value,
    )
    return move_in(model, prepared, None if weights is None else stored_of(model, weights))


def move_in(
    model: Model, prepared: Prepared, stored: Optional[Mapping[str, Stored]]
) -> tuple[Model, Optional[Optimizer]]:
    """Does what wrap() does, with what that was given made ready. stored: where values lie in files, by names; None:
    nowhere."""
    on_meta = {name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}
    if on_meta:
        _first_values.check(model, stored or {})
    session = Session(model, prepared, source_of(stored))
    with session.undone_on_failure():
        if on_meta:
            homes = session.presence.homes
            unset = [home for home in homes if home.name in on_meta and home.name not in (stored or {})]
            _first_values.give(model, unset, {name: where for name, where in (stored or {}).items() if name in on_meta})
            session.presence.release_all()
        made = Optimizer(session, prepared.settings) if prepared.train else None
    session.moved_in()
    _sessions[model] = session
    return model, made


def plan(
    model: torch.nn.Module,
    optimizer: Optional[Settings] = None,
    *,
    memory: Size,
    weights: Optional[Path] = None,
    **options: Any,
) -> dict[str, Any]:
    """Where every byte of a model would live if wrap() were given the same, as a dict; the model may be on the meta
    device, and stays as it is. "pytorch" says what PyTorch itself would take: for `sample_batch` as it is estimated
    (see estimate()), else what is reserved for it until the first call. Raises what wrap() would: BudgetError where it
    does not fit.

    options: those of wrap().
    """
    prepared = prepare(model, optimizer, memory=memory, **options)
    if weights is not None:
        stored_of(model, weights)
    made = _plan(prepared.units, prepared.options)
    made["pytorch"] = {"peak": prepared.estimated, "reserve": prepared.options.reserved, "measured": None}
    return made


def _session(model: torch.nn.Module) -> Session:
    session = _sessions.get(model)
    if session is None:
        raise StateError(f"the model ({type(model).__name__}) is not wrapped; see sluice.torch.wrap()")
    return session


def engine_of(model: torch.nn.Module) -> Engine:
    """The engine of a wrapped model: its ledger, plan, counters and trace, its checkpoints and values. Its steps are the
    optimizer's, and units come and go by themselves: calls for that are a StateError."""
    return _session(model).engine


def close(model: torch.nn.Module, *, values: bool = True) -> None:
    """The model's parameters are plain tensors again, with their values, where they were: views stay views. Engine and
    disk space are given back. Raises BudgetError, with nothing changed, where the values do not fit in the memory that
    was stated, or that the machine has.

    values=False: nothing is brought together. The parameters are others, on the meta device; those who still refer to
    the old ones may not touch them.
    """
    _session(model).close(values)
    del _sessions[model]


@contextlib.contextmanager
def edit(model: torch.nn.Module) -> Iterator[None]:
    """Parameters may be written inside of the `with`, by any means; they are the model's values afterwards, and the
    optimizer's master copies."""
    presence = _session(model).presence
    presence.release_all()
    try:
        yield
    finally:
        presence.release_all()
        presence.changed()
