"""The optimizer's state_dict: turns the engine's state into torch.optim's form and back, a unit at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import _abi
from ..errors import BudgetError, InvalidArgumentError
from ..model import folders_of
from ..optimizers import Optimizer as Settings
from . import _state_files
from ._homes import Home, Span, outside
from ._presence import Presence
from ._units import DTYPES

_STEP = "step"
_MASTER = "master"
_MOST_STEPS = 1 << 53  # as often a parameter may have been updated
_NO_ARRAYS = {_STEP, "RMS"}  # what states have besides arrays; transformers' Adafactor finds RMS anew in each step

_State = dict[int, dict[str, torch.Tensor]]  # arrays by names, by the parameter's index


def read(presence: Presence) -> _State:
    """Reads the state of each trainable parameter that was updated, by its index. The tensors lie in files without a name
    in the disk folder, where there is one, so that they may be larger than memory; else in memory. All ranks call it; where
    state is partitioned over them, rank 0 alone gets it."""
    engine = presence.engine
    ranks = engine.options.ranks
    if ranks is None:
        return _read(presence)
    if ranks.rank == 0 or engine.plan()["stage"] == 0:
        return _read(presence, lambda make: ranks.agreed("the optimizer's state_dict", make))
    ranks.agreed("the optimizer's state_dict", lambda: None)
    for unit in sorted(_by_unit([home for home in presence.homes if home.trainable and engine.updates(home.spans[0].key) > 0])):
        _move(presence, "sluice_engine_get_state", "sluice_write_state_to_arrays", unit, lambda key, name: None)
    return {}


def _read(presence: Presence, agreed: Callable[[Callable[[], _State]], _State] = lambda make: make()) -> _State:
    engine = presence.engine
    arrays = engine.state_arrays()
    updated = [home for home in presence.homes if home.trainable and engine.updates(home.spans[0].key) > 0]
    type_of = {name: _type_of(presence, name) for name in arrays}
    shapes = {home.index: _shapes(presence, home, arrays) for home in updated}
    needed = sum(math.prod(s) * type_of[name].itemsize for own in shapes.values() for name, s in own.items())

    def make_all() -> _State:
        folder = room(presence, needed, "the optimizer's state_dict")
        return {
            home.index: {_STEP: torch.tensor(float(engine.updates(home.spans[0].key)), dtype=torch.float32)}
            | {name: make(folder, shape, type_of[name]) for name, shape in shapes[home.index].items()}
            for home in updated
        }

    state = agreed(make_all)
    places = {span.key: (home.index, span) for home in updated for span in home.spans}
    homes_of = _by_unit(updated)

    def place(key: str, name: str) -> torch.Tensor | None:
        index, span = places.get(key, (None, None))
        array = state[index].get(name) if index is not None else None
        return None if span is None or array is None else _part(presence, name, span, array.view(-1))

    for unit, own in sorted(homes_of.items()):
        _move(presence, "sluice_engine_get_state", "sluice_write_state_to_arrays", unit, place)
        for home, _ in own:
            for tensor in state[home.index].values():
                _state_files.flush(tensor)
    return state


def write(presence: Presence, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Sets the state of a state_dict, by the index of a parameter in the engine; a parameter without state was never
    updated. Raises InvalidArgumentError for what does not fit, before anything is changed."""
    arrays = presence.engine.state_arrays()
    ranks = presence.engine.options.ranks

    def check() -> None:
        for home in presence.homes:
            if home.index in state:
                _check(home, state[home.index], _shapes(presence, home, arrays))

    if ranks is None:
        check()
    else:
        ranks.agreed("the optimizer's state_dict", check)
    presence.release_all()
    for unit, own in _by_unit([home for home in presence.homes if home.trainable]).items():
        given = {span.key: _parts(presence, state.get(home.index, {}), span) for home, span in own}
        if any(_has_master(home, arrays) for home, _ in own):
            presence.use(unit)
            for home, span in own:
                given[span.key].setdefault(_MASTER, span.of(home.memory.view(-1)).float().cpu())
            presence.release(unit)

        def source(key: str, name: str, given: Any = given) -> torch.Tensor | None:
            values: torch.Tensor | None = given[key].get(name)
            return values

        _move(presence, "sluice_engine_set_state", "sluice_read_state_from_arrays", unit, source)
        for home, span in own:
            presence.engine.set_updates(span.key, _steps(state.get(home.index, {})))
            home.changed()
            for value in state.get(home.index, {}).values():
                if isinstance(value, torch.Tensor):
                    _state_files.give_up(value)


def _by_unit(homes: Iterable[Home]) -> dict[int, list[tuple[Home, Span]]]:
    found: dict[int, list[tuple[Home, Span]]] = {}
    for home in homes:
        for span in home.spans:
            found.setdefault(span.unit, []).append((home, span))
    return found


def _move(
    presence: Presence, function: str, ready_made: str, unit: int, array: Callable[[str, str], torch.Tensor | None]
) -> None:
    """Moves a unit's state between the engine and the tensors that `array(parameter, name)` returns: contiguous ones, of a
    type that the engine knows, or None."""
    names = presence.engine.state_arrays()
    tensors = [[array(p.key, name) for name in names] for p in presence.engine.units[unit].parameters]
    rows = [
        [_abi.Array() if t is None else _abi.Array(t.data_ptr(), _abi.DTYPES[DTYPES[t.dtype]]) for t in row]
        for row in tensors
    ]
    presence.engine.whole_arrays(function, ready_made, unit, rows)


def _has_master(home: Home, arrays: tuple[str, ...]) -> bool:
    return _MASTER in arrays and home.memory.dtype != torch.float32


def _parts(presence: Presence, arrays: Mapping[str, Any], span: Span) -> dict[str, torch.Tensor]:
    def part(name: str, values: torch.Tensor) -> torch.Tensor:
        known = values if values.dtype in DTYPES else values.float()
        return outside(_part(presence, name, span, known.cpu().reshape(-1)), presence.by_storage)

    return {name: part(name, values) for name, values in arrays.items() if name not in _NO_ARRAYS and values is not None}


def _part(presence: Presence, name: str, span: Span, flat: torch.Tensor) -> torch.Tensor:
    """The part of an array that the engine has with a span's unit: the span's elements, or, with the first span alone, all
    of an array that belongs to the parameter as a whole."""
    return flat if name in _settings(presence).whole_arrays else span.of(flat)


def _shapes(presence: Presence, home: Home, arrays: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays that the optimizer keeps for the parameter."""
    optimizer = _settings(presence)
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


def _settings(presence: Presence) -> Settings:
    given = presence.engine.options.optimizer
    return given if isinstance(given, Settings) else given[0]


def _type_of(presence: Presence, array: str) -> torch.dtype:
    narrow = presence.engine.options.state == "bf16" and array not in (_MASTER, *_settings(presence).whole_arrays)
    return torch.bfloat16 if narrow else torch.float32


def room(presence: Presence, needed: int, what: str) -> str | None:
    """The disk folder that takes so many bytes; None where memory does. Raises BudgetError where neither has room. what: has the
    bytes, for messages."""
    if folders_of(presence.engine.options.disk):
        return _folder_with_room(presence, needed, what)
    _require_memory(presence, needed, what)
    return None


def make(folder: str | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU, in a file of the folder or, where that is None, in memory."""
    return torch.empty(shape, dtype=dtype, device="cpu") if folder is None else _state_files.make(folder, shape, dtype)


def _require_memory(presence: Presence, needed: int, what: str) -> None:
    total = next(line for line in presence.engine.ledger() if (line.tier, line.purpose) == ("host", "total"))
    budget = presence.engine.plan()["budget"]["memory"]
    if total.current + needed > budget:
        raise BudgetError(
            f"{what} takes {needed >> 20} MiB more, and {(budget - total.current) >> 20} MiB of the "
            f"{budget >> 20} MiB are free; save the state with sluice.torch.engine_of(model).save(folder), or wrap with "
            "more memory, or with a disk folder, where the state_dict then lies"
        )


def _folder_with_room(presence: Presence, needed: int, what: str) -> str:
    folder = os.fspath(folders_of(presence.engine.options.disk)[0].path)
    plan = presence.engine.plan()
    free = plan["budget"]["disk"] - plan["disk"]
    if needed > free:
        raise BudgetError(
            f"{what} takes {needed >> 20} MiB in '{folder}', and {free >> 20} MiB of the disk's budget "
            "are free; give the folder a larger limit, or save the state with "
            "sluice.torch.engine_of(model).save(folder)"
        )
    return folder
