"""Buffers, and the settings of parameter groups, which a checkpoint of a wrapped model has beside what the engine saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol

import torch

from ..errors import CorruptError, InvalidArgumentError
from ._safetensors import TYPES, pieces_of, tensors_of

BUFFERS, GROUPS = "buffers.safetensors", "groups.json"
_VERSION = 1


class Groups(Protocol):
    """An optimizer with parameter groups."""

    def told(self) -> list[dict[str, Any]]:
        """The groups' settings and other keys, with "params" as names."""

    def taken(self, groups: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """A function that sets them. Raises InvalidArgumentError where they do not fit."""


def files_of(model: torch.nn.Module, groups: Optional[Groups]) -> tuple[dict[str, list[memoryview]], list[str]]:
    """The files, in pieces, and what cannot be saved, in words."""
    lacking = [
        f"the extra state of '{name}' ({type(module).__name__}.get_extra_state())"
        for name, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    buffers = saved_buffers(model)
    lacking += [f"the buffer '{name}' ({b.dtype}, {b.layout})" for name, b in buffers.items() if not _can_be_saved(b)]
    buffers = {name: buffer for name, buffer in buffers.items() if _can_be_saved(buffer)}
    told: Optional[list[dict[str, Any]]] = None
    if groups is not None:
        told = groups.told()
        for number, group in enumerate(told):
            for key in [key for key, value in group.items() if not _is_plain(value)]:
                del group[key]
                lacking.append(f"'{key}' of parameter group {number}")
    text = json.dumps({"version": _VERSION, "groups": told}, indent=1).encode()
    return {BUFFERS: pieces_of(buffers), GROUPS: [memoryview(text)]}, lacking


def saved_buffers(model: torch.nn.Module, recurse: bool = True) -> dict[str, torch.Tensor]:
    """The buffers that a model's, or with recurse=False a module's own, state_dict() has."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in (model.named_modules() if recurse else [("", model)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }


def _can_be_saved(buffer: torch.Tensor) -> bool:
    if buffer.dtype not in TYPES or buffer.layout != torch.strided:
        return False
    # Elements that share memory, as expand() makes them, cannot be written.
    return all(size < 2 or stride for size, stride in zip(buffer.shape, buffer.stride()))


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the value back, but for tuples, which become lists."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def reader_of(model: torch.nn.Module, groups: Optional[Groups], files: Mapping[str, str]) -> Callable[[], None]:
    """A function that sets buffers and groups to what a checkpoint's files have. files: their paths, by their names. Raises
    InvalidArgumentError or CorruptError where they do not fit."""
    found = tensors_of(Path(files[BUFFERS]))
    buffers = {name: buffer for name, buffer in saved_buffers(model).items() if _can_be_saved(buffer)}
    for name in found.keys() ^ buffers.keys():
        which = "this model" if name in found else "the checkpoint"
        raise InvalidArgumentError(f"'{files[BUFFERS]}' is of another model: {which} has no buffer '{name}'")
    for name, buffer in buffers.items():
        if (found[name].dtype, found[name].shape) != (buffer.dtype, tuple(buffer.shape)):
            raise InvalidArgumentError(
                f"the buffer '{name}' is {found[name].dtype} {list(found[name].shape)} in '{files[BUFFERS]}', and {buffer.dtype} "
                f"{list(buffer.shape)} in the model"
            )
    values = {name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu") for name, buffer in buffers.items()}
    for name, value in values.items():
        found[name].read(0, value.view(-1))
    told = _told_in(files[GROUPS])
    take_groups = None if groups is None or told is None else groups.taken(told)

    def take() -> None:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(values[name])
        if take_groups is not None:
            take_groups()

    return take


def _told_in(path: str) -> Optional[list[dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        told = json.loads(text)
        version = told["version"]
        groups: Optional[list[dict[str, Any]]] = told["groups"]
        if groups is not None:
            groups = [{**group, "params": [str(name) for name in group["params"]]} for group in groups]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"'{path}' is not what a wrapped model saves: {error!r}") from error
    if version != _VERSION:
        raise InvalidArgumentError(f"'{path}' is of version {version!r}, and {_VERSION} can be read; use the Sluice that wrote it")
    return groups
