"""Turns Python's description of a model and its options into the C ABI's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence

from . import _abi
from ._handle import call
from ._library import library
from .errors import InvalidArgumentError
from .model import AdamW, Folder, Options, Path, Unit, size_of, whole

_PLACED = ("parameters", "gradients", "state")


def text(value: str, what: str) -> bytes:
    """For C, where a text ends at its first NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgumentError(f"{what} is {value!r}; a text without NUL is needed")
    return value.encode()


def path_of(path: Path) -> bytes:
    """A path for C, of whatever bytes it consists."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InvalidArgumentError(f"the path {path!r} contains NUL")
    return encoded


def groups_of(optimizer: AdamW | Sequence[AdamW]) -> list[AdamW]:
    """The settings of each group; all have the betas and eps of the first."""
    groups = [optimizer] if isinstance(optimizer, AdamW) else list(optimizer)
    if not groups or not all(isinstance(group, AdamW) for group in groups):
        raise InvalidArgumentError(f"the optimizer is {optimizer!r}; an AdamW is needed, or one for each group")
    for group in groups:
        if (group.betas, group.eps) != (groups[0].betas, groups[0].eps):
            raise InvalidArgumentError(f"groups differ in betas or eps ({groups[0]}, {group}); they must be the same")
    return groups


@contextlib.contextmanager
def model_of(units: Sequence[Unit]) -> Iterator[ctypes.c_void_p]:
    """A sluice_model, destroyed after the `with`."""
    model = ctypes.c_void_p()
    call("sluice_model_create", ctypes.byref(model))
    try:
        for unit in units:
            call("sluice_model_add_unit", model, text(unit.name, "a unit's name"), None)
            for given in unit.parameters:
                shape = (ctypes.c_uint64 * len(given.shape))(*given.shape)
                parameter = _abi.Parameter(
                    ctypes.sizeof(_abi.Parameter),
                    text(given.name, "a parameter's name"),
                    shape,
                    len(shape),
                    given.group,
                    1 if given.frozen else 0,
                )
                call("sluice_model_add_parameter", model, ctypes.byref(parameter), None)
        yield model
    finally:
        library().sluice_model_destroy(model)


def _folders(disk: Path | Folder | Sequence[Path | Folder] | None) -> list[_abi.Folder]:
    if disk is None:
        return []
    made = []
    for folder in [disk] if isinstance(disk, (str, os.PathLike, Folder)) else disk:
        path, limit = (folder.path, folder.limit) if isinstance(folder, Folder) else (folder, None)
        made.append(_abi.Folder(path_of(path), size_of(limit or 0, f"the limit of '{os.fspath(path)}'")))
    return made


def _places(place: str | Mapping[str, str] | None) -> dict[str, bytes]:
    if place is None:
        return {}
    wanted = dict.fromkeys(_PLACED, place) if isinstance(place, str) else dict(place)
    for name in wanted:
        if name not in _PLACED:
            raise InvalidArgumentError(f"place has '{name}'; it may have {', '.join(_PLACED)}")
    return {f"place_{name}": text(value, f"the place of {name}") for name, value in wanted.items()}


def options_of(given: Options) -> _abi.EngineOptions:
    """The C struct, which keeps alive what it points to."""
    if given.dtype not in _abi.DTYPES:
        raise InvalidArgumentError(f"dtype is {given.dtype!r}; it may be {', '.join(_abi.DTYPES)}")
    groups = groups_of(given.optimizer)
    folders = _folders(given.disk)
    return _abi.EngineOptions(
        size=ctypes.sizeof(_abi.EngineOptions),
        memory=size_of(given.memory, "memory"),
        reserved=size_of(given.reserved, "reserved"),
        disk=(_abi.Folder * len(folders))(*folders),
        disk_folders=len(folders),
        threads=whole(given.threads, "threads"),
        dtype=_abi.DTYPES[given.dtype],
        held_units=whole(given.held_units, "held_units"),
        groups=len(groups),
        beta1=groups[0].betas[0],
        beta2=groups[0].betas[1],
        epsilon=groups[0].eps,
        trace_events=whole(given.trace_events, "trace_events", 2**63),
        prefetch=whole(given.prefetch, "prefetch"),
        given_back=size_of(given.given_back, "given_back"),
        serve_touches=1 if given.serve_touches else 0,
        **_places(given.place),
    )


def settings_of(
    groups: Sequence[AdamW], clip: float | None, gradient_factor: float, keep_gradients: bool
) -> _abi.StepSettings:
    """For sluice_engine_step(), where 0 means no clipping and a factor of 1."""
    if clip is not None and not clip > 0:
        raise InvalidArgumentError(f"clip is {clip}; a bound above 0 is needed, or None for no clipping")
    if not gradient_factor:
        raise InvalidArgumentError("gradient_factor is 0, which would leave nothing of the gradients")
    made = [_abi.GroupSettings(group.lr, group.weight_decay) for group in groups]
    return _abi.StepSettings(
        ctypes.sizeof(_abi.StepSettings),
        (_abi.GroupSettings * len(made))(*made),
        len(made),
        clip or 0.0,
        gradient_factor,
        1 if keep_gradients else 0,
    )
