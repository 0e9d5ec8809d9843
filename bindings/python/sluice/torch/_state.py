"""The optimizer's state_dict: turns the engine's state into torch.optim's form and back, a unit at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import _abi
from ..errors import InvalidArgumentError
from ..optimizers import Optimizer as Settings
from . import _safetensors
from ._homes import Home, Span, outside
from ._presence import Presence
from ._units import DTYPES

_WHAT = "the optimizer's state_dict"
_STEP = "step"
_MASTER = "master"
_MOST_STEPS = 1 << 53  # as often a parameter may have been updated
_NO_ARRAYS = {_STEP, "RMS"}  # what states have besides arrays; transformers' Adafactor finds RMS anew in each step

_State = dict[int, dict[str, torch.Tensor]]  # arrays by names, by the parameter's index


def read(presence: Presence) -> _State:
    """Reads the state of each trainable parameter that was updated, by its index. The tensors lie in files without a name
    in the disk folder, where there is one, so that they may be larger than memory; else in memory. All ranks call it; where
    state is partitioned over them, rank 0 alone gets it."""
    engine, ranks = presence.engine, presence.engine.options.ranks
    arrays = engine.state_arrays()
    updated = [home for home in presence.homes if home.trainable and engine.updates(home.spans[0].key) > 0]

    def make_all() -> _State:
        if ranks is not None and ranks.rank != 0 and engine.plan()["stage"] > 0:
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

    state = engine.agreed(_WHAT, make_all)
    for unit, own in sorted(_by_unit(updated).items()):
        parts = {
            (span.key, name): _part(presence, name, span, array.view(-1))
            for home, span in own
            for name, array in state.get(home.index, {}).items()
            if name != _STEP
        }
        _move(presence, "sluice_engine_get_state", "sluice_write_state_to_arrays", unit, parts)
        for home, _ in own:
            for tensor in state.get(home.index, {}).values():
                _safetensors.flush(tensor)
    return state


def write(presence: Presence, state: Mapping[int, Mapping[str, Any]]) -> None:
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
