"""The optimizer of a wrapped model, as a torch.optim.Optimizer, and its state_dict: the engine's state in torch.optim's form."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _abi
from ..errors import Error, InvalidArgumentError, StateError, SystemIOError
from ..optimizers import Optimizer as Settings
from . import _safetensors
from ._homes import Home, Span, outside
from ._modes import outside_of_graphs
from ._prepare import plain, settings_of_group
from ._presence import Presence, UpdatesInBackward
from ._session import Session
from ._units import DTYPES, Roles

_WHAT = "the optimizer's state_dict"
_STEP = "step"
_MASTER = "master"
# The advice for scripts for DDP, whose other ranks wait elsewhere.
_ALONE = ", which all ranks on GPUs call where state is partitioned (so that rank 0 saves alone: stage=0, or Trainer's save_only_model)"
# Trainer saves its last checkpoint while the scripts of other ranks go on to their ends.
_ENDS = " (if its script came to the end: end all ranks with sluice.torch.close(model), where they wait for rank 0)"
_MOST_STEPS = 1 << 53  # as often a parameter may have been updated
_NO_ARRAYS = {_STEP, "RMS"}  # what states have besides arrays; transformers' Adafactor finds RMS anew in each step

_State = dict[int, dict[str, torch.Tensor]]  # arrays by names, by the parameter's index


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
        Where state is partitioned over ranks, that of rank 0 alone has the state. The others need not call it, and where they do it
        returns when rank 0 has their parts; on GPUs all of them call it. Raises BudgetError where they have no room."""
        self._check_open()
        made = super().state_dict()
        made["param_groups"] = [{**group, **self._first.implied} for group in made["param_groups"]]
        made["state"] = self._read()
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of the same optimizer for the same model, of Sluice or torch.optim. Raises
        InvalidArgumentError, with nothing changed, where it does not fit."""
        self._check_open()
        given, count = state_dict.get("state", {}), sum(map(len, self._members))
        if unknown := [i for i in given if i not in range(count)]:
            raise InvalidArgumentError(
                f"the state_dict has state of parameter {unknown[0]!r}, and the optimizer {count} parameters; load "
                "the state_dict of the same model"
            )
        before = super().state_dict()
        super().load_state_dict({**state_dict, "state": {}})  # checks the groups first
        try:
            self._settings()
            self._write(given)
        except Exception:
            super().load_state_dict(before)
            raise

    def _read(self) -> dict[int, Any]:
        """The engine's state, by the numbers of parameters in a state_dict."""
        with self._session.presence.users:
            state = _read_state(self._session.presence)
        return {i: state[home.index] for i, home in enumerate(self._homes()) if home and home.index in state}

    def _write(self, given: Mapping[int, Any]) -> None:
        """Sets the engine's state."""
        homes = self._homes()
        state = {home.index: given[i] for i in given if (home := homes[i]) is not None and home.trainable}
        frozen = [home.name for i in given if given[i] and (home := homes[i]) is not None and not home.trainable]
        if frozen:
            warnings.warn(
                f"the state_dict has state of '{frozen[0]}', which was frozen when the model was wrapped; such state is left out "
                f"({len(frozen)} parameters)",
                UserWarning,
                stacklevel=3,
            )
        with self._session.presence.users:
            _write_state(self._session.presence, state)

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
        groups = zip(self.param_groups, self._names, strict=True)
        return [{key: names if key == "params" else plain(value) for key, value in group.items()} for group, names in groups]

    def taken(self, groups: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """A function that sets the groups to what told() said. Raises InvalidArgumentError where that does not fit."""
        names = [group["params"] for group in groups]
        if names != self._names:
            raise InvalidArgumentError(
                f"the checkpoint has parameter groups of {[len(each) for each in names]} parameters, and this optimizer of "
                f"{[len(each) for each in self._names]}, or of others; wrap the model with the param_groups with which it was saved"
            )
        given = [{key: plain(value) for key, value in group.items() if key != "params"} for group in groups]
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
            self._update(1.0 / float(getattr(self, "grad_scale", None) or 1.0))
        return loss

    def _update(self, factor: float) -> None:
        """Updates by the gradients times a factor."""
        self._session.step(self._settings(), factor)

    @outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of each torch.optim.Optimizer."""
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells GradScaler that step() unscales by `grad_scale`, and does nothing where `found_inf` is set: GradScaler
        itself refuses to unscale gradients in float16."""
        return any(home.trainable and home.memory.dtype == torch.float16 for home in self._session.presence.homes)


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


# ---- the state, a unit at a time ----


def _read_state(presence: Presence) -> _State:
    """Reads the state of each trainable parameter that was updated, by its index. The tensors lie in files without a name
    in the disk folder, where there is one, so that they may be larger than memory; else in memory. Where state is partitioned
    over ranks, rank 0 alone gets it, from the others' memory and disks; on GPUs all of them call it, and elsewhere they may."""
    engine, ranks = presence.engine, presence.engine.options.ranks
    if ranks is None or engine.plan()["stage"] == 0:
        return _state_of(presence, "sluice_engine_get_state")
    is_given = ranks.rank == 0
    if engine.gpu is not None:
        return _state_of(presence, "sluice_engine_get_state", is_given, agrees=True)
    if not is_given:
        engine.state_is_taken()
        return {}
    try:
        state = _state_of(presence, "sluice_engine_get_state_alone")
    except BaseException as error:
        with contextlib.suppress(Error):
            engine.state_is_taken(f"{_WHAT} was not taken there: {type(error).__name__}: {error}")
        raise
    engine.state_is_taken()
    return state


def _state_of(presence: Presence, function: str, is_given: bool = True, agrees: bool = False) -> _State:
    """function: takes a unit's state out of the engine. is_given: whether this rank gets it; the others' is empty. agrees: whether all
    ranks have to have room for what they get."""
    engine = presence.engine
    arrays = engine.state_arrays()
    updated = [home for home in presence.homes if home.trainable and engine.updates(home.spans[0].key) > 0]

    def make_all() -> _State:
        if not is_given:
            return {}
        type_of = {name: _type_of(presence, name) for name in arrays}
        shapes = {home.index: _shapes(presence, home, arrays) for home in updated}
        needed = sum(math.prod(s) * type_of[name].itemsize for own in shapes.values() for name, s in own.items())
        folder = _safetensors.room(engine, needed, _WHAT)
        return {
            home.index: {_STEP: torch.tensor(float(engine.updates(home.spans[0].key)), dtype=torch.float32)}
            | {name: _safetensors.make(folder, shape, type_of[name]) for name, shape in shapes[home.index].items()}
            for home in updated
        }

    state = engine.agreed(f"{_WHAT}{_ALONE}", make_all) if agrees else make_all()
    for unit, own in sorted(_by_unit(updated).items()):
        parts = {
            (span.key, name): _part(presence, name, span, array.view(-1))
            for home, span in own
            for name, array in state.get(home.index, {}).items()
            if name != _STEP
        }
        try:
            _move(presence, function, "sluice_write_state_to_arrays", unit, parts)
        except SystemIOError as error:
            raise SystemIOError(f"{error}{_ENDS if function.endswith('alone') else ''}") from None
        for home, _ in own:
            for tensor in state.get(home.index, {}).values():
                _safetensors.flush(tensor)
    return state


def _write_state(presence: Presence, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Sets the state of a state_dict, by the index of a parameter in the engine; a parameter without state was never
    updated. Raises InvalidArgumentError for what does not fit, before anything is changed."""
    arrays = presence.engine.state_arrays()

    def check() -> None:
        for home in presence.homes:
            if home.index in state:
                _check(home, state[home.index], _shapes(presence, home, arrays))

    presence.engine.agreed(_WHAT, check)
    presence.release_all()
    for unit, own in _by_unit([home for home in presence.homes if home.trainable]).items():
        parts = {
            (span.key, name): _given(presence, name, span, array)
            for home, span in own
            for name, array in state.get(home.index, {}).items()
            if name not in _NO_ARRAYS and array is not None
        }
        if any(_has_master(home, arrays) for home, _ in own):
            presence.use(unit)
            for home, span in own:
                parts.setdefault((span.key, _MASTER), span.of(home.memory.view(-1)).float().cpu())
            presence.release(unit)
        _move(presence, "sluice_engine_set_state", "sluice_read_state_from_arrays", unit, parts)
        for home, span in own:
            presence.engine.set_updates(span.key, _steps(state.get(home.index, {})))
            home.changed()
            for value in state.get(home.index, {}).values():
                if isinstance(value, torch.Tensor):
                    _safetensors.flush(value)


def _by_unit(homes: Iterable[Home]) -> dict[int, list[tuple[Home, Span]]]:
    found: dict[int, list[tuple[Home, Span]]] = {}
    for home in homes:
        for span in home.spans:
            found.setdefault(span.unit, []).append((home, span))
    return found


def _move(
    presence: Presence, function: str, ready_made: str, unit: int, parts: Mapping[tuple[str, str], torch.Tensor]
) -> None:
    """Moves a unit's state between the engine and the tensors that there are, by the parameter's key and the array's name: contiguous
    ones, of a type that the engine knows."""
    names = presence.engine.state_arrays()
    tensors = [[parts.get((p.key, name)) for name in names] for p in presence.engine.units[unit].parameters]
    rows = [
        [_abi.Array() if t is None else _abi.Array(t.data_ptr(), _abi.DTYPES[DTYPES[t.dtype]]) for t in row]
        for row in tensors
    ]
    presence.engine.whole_arrays(function, ready_made, unit, rows)


def _has_master(home: Home, arrays: tuple[str, ...]) -> bool:
    return _MASTER in arrays and home.memory.dtype != torch.float32


def _given(presence: Presence, name: str, span: Span, array: torch.Tensor) -> torch.Tensor:
    known = array if array.dtype in DTYPES else array.float()
    return outside(_part(presence, name, span, known.cpu().reshape(-1)), presence.by_storage)


def _part(presence: Presence, name: str, span: Span, flat: torch.Tensor) -> torch.Tensor:
    """The part of an array that the engine has with a span's unit: the span's elements, or, with the first span alone, all
    of an array that belongs to the parameter as a whole."""
    return flat if name in _made_with(presence).whole_arrays else span.of(flat)


def _shapes(presence: Presence, home: Home, arrays: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays that the optimizer keeps for the parameter."""
    optimizer = _made_with(presence)
    own = [name for name in arrays if name != _MASTER or _has_master(home, arrays)]
    shapes = {name: optimizer.shape_of_state(name, tuple(home.memory.shape), home.by_elements) for name in own}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _steps(given: Mapping[str, Any]) -> int:
    """How often a parameter with this state was updated. torch.optim.SGD counts no steps, so that one with state counts as updated once."""
    step = given.get(_STEP, 1 if given else 0)
    steps = float(step)
    if not (0 <= steps <= _MOST_STEPS and steps == int(steps)):
        raise ValueError(f"{step!r:.80} is no number of steps")
    return int(steps)


def _check(home: Home, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"the state of '{home.name}' is a {type(given).__name__}, where a dict of its arrays is needed")
    try:
        _steps(given)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"'{_STEP}' of '{home.name}' is {given[_STEP]!r:.80}, where a whole number from 0 to 2^53 is needed"
        ) from error
    needed = set(shapes) - {_MASTER}
    found = {name for name, value in given.items() if value is not None} - {*_NO_ARRAYS, _MASTER}
    if needed != found:
        raise InvalidArgumentError(
            f"the state of '{home.name}' has {', '.join(sorted(found)) or 'no arrays'}, and this optimizer keeps "
            f"{', '.join(sorted(needed)) or 'none'}; load the state_dict of the same optimizer"
        )
    for name, shape in shapes.items():
        if given.get(name) is None:
            continue
        array = given[name]
        if not isinstance(array, torch.Tensor) or array.layout != torch.strided or array.is_meta:
            what = f"{array.layout} on {array.device}" if isinstance(array, torch.Tensor) else type(array).__name__
            raise InvalidArgumentError(f"'{name}' of '{home.name}' is {what}, where a tensor with values is needed")
        if tuple(array.shape) != shape:
            raise InvalidArgumentError(
                f"'{name}' of '{home.name}' has the shape {tuple(array.shape)}, and {shape} is needed; load the "
                "state_dict of the same model"
            )


def _made_with(presence: Presence) -> Settings:
    given = presence.engine.options.optimizer
    return given if isinstance(given, Settings) else given[0]


def _type_of(presence: Presence, array: str) -> torch.dtype:
    narrow = presence.engine.options.state == "bf16" and array not in (_MASTER, *_made_with(presence).whole_arrays)
    return torch.bfloat16 if narrow else torch.float32
