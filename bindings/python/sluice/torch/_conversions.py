"""Tensors that files of transformers have under other names than models, or in parts, such as experts one by one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ._safetensors import Stored, plain_name


def as_parameters(model: torch.nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Renames and joins tensors as from_pretrained() of the transformers model in `model` does. Tensors that are not of
    that model, or all where there is none, stay as they are.

    Raises InvalidArgumentError for tensors that would have to be computed, since nothing is read here."""
    if "transformers" not in sys.modules:
        return dict(tensors)
    import transformers

    inner = next((m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)), None)
    if inner is None:
        return dict(tensors)
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before transformers 5, files have the names of models
        return dict(tensors)
    transforms = conversion_mapping.get_model_conversion_mapping(inner)
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    names = dict.fromkeys((plain_name(name) for name in inner.state_dict()), True)
    found: dict[str, Stored] = {}
    parts: dict[str, dict[str, list[Stored]]] = {}  # the tensors in order, by parameter and the converter's pattern
    for key in sorted(tensors, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(key, renamings, converters, inner.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        if name not in names or pattern is None:
            found[name if name in names else key] = tensors[key]
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(tensors[key])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, gathered in parts.items():
        found[name] = _joined(name, by_pattern[next(iter(gathered))], gathered)
    return found


def _joined(name: str, converter: Any, gathered: Mapping[str, Sequence[Stored]]) -> Stored:
    """Joins several tensors to one, in which their elements follow each other."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    lists = [gathered[pattern] for pattern in converter.source_patterns if pattern in gathered]
    every = [part for parts in lists for part in parts]
    if len(converter.target_patterns) == 1 and len({part.dtype for part in every}) == 1:
        if steps == [("MergeModulelist", 0)] and len(lists) == 1:
            return _stacked(name, lists[0])
        if steps == [("Concatenate", 0)]:
            return _in_a_row(name, every)
        if steps == [("MergeModulelist", 0), ("Concatenate", 1)] and len({len(parts) for parts in lists}) == 1:
            return _stacked(name, [_in_a_row(name, of_one) for of_one in zip(*lists)])
    raise InvalidArgumentError(
        f"'{name}' is not in the files as the model has it: transformers makes it of {len(every)} tensors "
        f"({', '.join(step for step, _ in steps)}), which cannot be done while it is streamed. Where there is room for the "
        "model, load it with transformers and write it as it is: model.save_pretrained(FOLDER, save_original_format=False)"
    )


def _stacked(name: str, parts: Sequence[Stored]) -> Stored:
    if len({part.shape for part in parts}) > 1:
        raise _unequal(name, parts)
    return _one_after_another(parts, (len(parts), *parts[0].shape))


def _in_a_row(name: str, parts: Sequence[Stored]) -> Stored:
    if len({part.shape[1:] for part in parts}) > 1:
        raise _unequal(name, parts)
    return _one_after_another(parts, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


def _one_after_another(parts: Sequence[Stored], shape: tuple[int, ...]) -> Stored:
    return Stored(tuple(itertools.chain.from_iterable(part.runs for part in parts)), parts[0].dtype, shape)


def _unequal(name: str, parts: Sequence[Stored]) -> InvalidArgumentError:
    shapes = sorted({str(list(part.shape)) for part in parts})
    return InvalidArgumentError(
        f"'{name}' is put together of {len(parts)} tensors of '{parts[0].file.parent}', whose shapes do not fit: "
        + ", ".join(shapes)
    )
