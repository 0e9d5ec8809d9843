"""Finds the values of a model's parameters and buffers in a folder of safetensors."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Optional

import torch

from ..errors import InvalidArgumentError, NotFoundError
from ..model import Path
from ._conversions import as_parameters
from ._moving import Source
from ._safetensors import SafetensorsFolder, Stored, printable


def stored_of(model: torch.nn.Module, folder: Path, partly: bool = True) -> dict[str, Stored]:
    """Where the values of each parameter and of each buffer on the meta device lie; those of a tied one under any name. A warning
    names what is left over in the files. partly: some may be missing.

    Raises InvalidArgumentError where the files have other values for a tied parameter under another of its names."""
    if partly and not all(p.is_meta for p in model.parameters()):
        raise InvalidArgumentError("weights are given for a model that has values; build it on the meta device")
    names_of: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(p), []).append(name)
    buffers = {name: b for name, b in model.named_buffers() if b.is_meta}
    files = SafetensorsFolder(folder, lambda tensors: as_parameters(model, tensors))
    tied = {names[0]: names for names in names_of.values()}
    stored = files.find(tied | {name: [name] for name in buffers})
    others = files.others(stored)
    parameters = {name: p for name, p in model.named_parameters() if p.numel()}
    for name, t in (parameters | buffers).items():
        if name in stored:
            _check(name, t, stored[name])
            _check_other_names(files, stored[name], t.dtype, tied.get(name, [name]))
    missing = [name for name in parameters if name not in stored]
    others = _unexpected(model, others, files.under(name for names in names_of.values() for name in names))
    if missing and not partly:
        raise NotFoundError(
            f"{_lacking(missing, folder)}{_of_others(others)}. Where the model is meant to have more than the files, build it on "
            "the meta device and give the folder to wrap() as weights: the rest gets its first values by the model's own rules"
        )
    if not stored:
        raise NotFoundError(
            f"'{os.fspath(folder)}' has none of the model's parameters, such as '{next(iter(parameters), '')}'"
            + _of_others(others)
        )
    if others:
        lacking = f"{_lacking(missing, folder)} and gets its first values by the model's own rules" if missing else "all is found"
        warnings.warn(
            f"'{os.fspath(folder)}' has more than the model: {lacking}{_of_others(others)}", UserWarning, stacklevel=7
        )
    return stored


def _check(name: str, t: torch.Tensor, there: Stored) -> None:
    if there.shape != tuple(t.shape):
        raise InvalidArgumentError(
            f"'{name}' has the shape {list(there.shape)} in '{there.file}', and {list(t.shape)} in the model"
        )
    if there.dtype is None:
        raise InvalidArgumentError(
            f"'{name}' has a type in '{there.file}' that is not read; store it there in f32, bf16 or f16"
        )
    if there.dtype.is_floating_point != t.is_floating_point():
        raise InvalidArgumentError(f"'{name}' is of {there.dtype} in '{there.file}', and of {t.dtype} in the model")


def _check_other_names(files: SafetensorsFolder, there: Stored, dtype: torch.dtype, names: Sequence[str]) -> None:
    for name, other in files.under(names).items():
        if not files.same(there, other, dtype):
            raise InvalidArgumentError(
                f"'{names[0]}' and '{name}' are one parameter of the model, and have different values in '{files.folder}'. Where "
                "config.json ties them, set tie_word_embeddings to false there; else give both modules a parameter of their own"
            )


def _unexpected(model: torch.nn.Module, others: Sequence[str], names: Container[str]) -> list[str]:
    """The tensors that no parameter takes, but for tied names, buffers, also those that old files have in other modules
    (`layers.0.rotary_emb.inv_freq`), and what the model's class expects in old files."""
    buffers = {_end_of(name) for name, _ in model.named_buffers()}
    ignored = [p for m in model.modules() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [
        name
        for name in others
        if name not in names and _end_of(name) not in buffers and not any(re.search(p, name) for p in ignored)
    ]


def _end_of(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _lacking(missing: Sequence[str], folder: Path) -> str:
    return f"'{missing[0]}'{_and_more(missing)} is in no file of '{os.fspath(folder)}'"


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _of_others(others: Sequence[str]) -> str:
    return f"; '{printable(others[0])}'{_and_more(others)} is there, which is none of the model's" if others else ""


def source_of(stored: Optional[Mapping[str, Stored]]) -> Optional[Source]:
    """The function that fills in an engine's first values: those in files, or NaN where there are none."""
    if stored is None:
        return None

    def fill(name: str, first: int, part: memoryview) -> None:
        values = torch.frombuffer(part, dtype=torch.float32)
        if name in stored:
            SafetensorsFolder.read(stored[name], first, values)
        else:
            values.fill_(math.nan)  # no value, until a rule of the model gives one

    return fill
