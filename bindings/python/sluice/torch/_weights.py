"""Finds the values of a model's parameters and buffers in a folder of safetensors."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError, NotFoundError
from ..model import Path
from ._safetensors import InFiles, tensors_of

_Form = Callable[[str], "str | None"]  # what a parameter's name may be in the files


def stored_of(model: torch.nn.Module, folder: Path, partly: bool = True) -> dict[str, InFiles]:
    """Where the values of each parameter and of each buffer on the meta device lie; those of a tied one under any name. A warning
    names what is left over in the files. partly: some may be missing.

    Raises InvalidArgumentError where the files have other values for a tied parameter under another of its names."""
    if partly and not all(p.is_meta for p in model.parameters()):
        raise InvalidArgumentError("weights are given for a model that has values; build it on the meta device")
    names_of: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(p), []).append(name)
    buffers = {name: b for name, b in model.named_buffers() if b.is_meta}
    tensors = _as_parameters(model, tensors_of(folder))
    tied = {names[0]: names for names in names_of.values()}
    found, forms = _find(tied | {name: [name] for name in buffers}, tensors)
    stored = {name: tensors[key] for name, key in found.items()}
    parameters = {name: p for name, p in model.named_parameters() if p.numel()}
    for name, t in (parameters | buffers).items():
        if name in stored:
            _check(name, t, stored[name])
            for other in _in_forms(tied.get(name, ()), forms):
                if other in tensors and other != found[name] and not stored[name].same(tensors[other], t.dtype):
                    raise InvalidArgumentError(
                        f"'{name}' and '{other}' are one parameter of the model, and have different values in '{os.fspath(folder)}'. "
                        "Where config.json ties them, set tie_word_embeddings to false there; else give both modules a parameter of "
                        "their own"
                    )
    missing = [name for name in parameters if name not in stored]
    taken = {*found.values(), *_in_forms((name for names in tied.values() for name in names), forms)}
    others = _unexpected(model, [name for name in tensors if name not in taken])
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
            f"'{os.fspath(folder)}' has more than the model: {lacking}{_of_others(others)}", UserWarning, stacklevel=8
        )
    return stored


def _check(name: str, t: torch.Tensor, there: InFiles) -> None:
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


def _unexpected(model: torch.nn.Module, others: Sequence[str]) -> list[str]:
    """The tensors that no parameter takes, but for buffers, also those that old files have in other modules
    (`layers.0.rotary_emb.inv_freq`), and what the model's class expects in old files."""
    buffers = {_end_of(name) for name, _ in model.named_buffers()}
    ignored = [p for m in model.modules() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [name for name in others if _end_of(name) not in buffers and not any(re.search(p, name) for p in ignored)]


def _end_of(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _lacking(missing: Sequence[str], folder: Path) -> str:
    return f"'{missing[0]}'{_and_more(missing)} is in no file of '{os.fspath(folder)}'"


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _of_others(others: Sequence[str]) -> str:
    return f"; '{_printable(others[0])}'{_and_more(others)} is there, which is none of the model's" if others else ""


def _printable(name: str) -> str:
    """A name out of a file, for messages: what would control a terminal is shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


# ---- names ----


def _find(names_of: Mapping[str, Sequence[str]], tensors: Collection[str]) -> tuple[dict[str, str], list[_Form]]:
    """The tensor of each parameter that the files have, by the parameters' first names; and the forms in which names were looked for.
    names_of: all names of each, of which a tied parameter has several.

    A name counts as it is, or without an adapter's `base_layer`. Wrappers also put words in front of all names, and
    files may have more of them (`transformer.wte.weight`, `base_model.model...`): the same words are added or dropped
    for all names where that finds more parameters. No tensor is taken for two parameters."""
    plain = dict.fromkeys(plain_name(name) for names in names_of.values() for name in names)
    fronts = Counter(("", front) for key in tensors for front, rest in _cuts(key) if rest in plain)
    fronts.update((front, "") for name in plain for front, rest in _cuts(name) if rest in tensors)
    forms: list[_Form] = [str, plain_name]  # as it is, and without an adapter's words
    for (front, instead), count in fronts.most_common(1):
        if count > sum(name in tensors for name in plain):
            forms.append(functools.partial(_with_other_front, front, instead))
    found: dict[str, str] = {}
    for form in forms:
        taken = set(found.values())
        for first, names in names_of.items():
            key = next((key for key in _in_forms(names, [form]) if key in tensors and key not in taken), None)
            if first not in found and key is not None:
                found[first] = key
                taken.add(key)
    return found, forms


def _in_forms(names: Iterable[str], forms: Sequence[_Form]) -> Iterator[str]:
    return (key for name in names for form in forms if (key := form(name)) is not None)


def plain_name(name: str) -> str:
    """A name without the words that adapters add."""
    return name.replace(".base_layer.", ".")


def _with_other_front(front: str, instead: str, name: str) -> str | None:
    plain = plain_name(name)
    return instead + plain[len(front) :] if plain.startswith(front) else None


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """The words in front (with their last point) and the rest, for each point of a name."""
    return ((name[: point.end()], name[point.end() :]) for point in re.finditer(r"\.", name))


# ---- tensors that files of transformers have under other names than models, or in parts, such as experts one by one ----


def _as_parameters(model: torch.nn.Module, tensors: Mapping[str, InFiles]) -> Mapping[str, InFiles]:
    """Renames and joins tensors as from_pretrained() of the transformers model in `model` does. Tensors that are not of
    that model, or all where there is none, stay as they are.

    Raises InvalidArgumentError for tensors that would have to be computed, since nothing is read here."""
    if "transformers" not in sys.modules:
        return tensors
    import transformers

    inner = next((m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)), None)
    if inner is None:
        return tensors
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before transformers 5, files have the names of models
        return tensors
    transforms = conversion_mapping.get_model_conversion_mapping(inner)
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    names = dict.fromkeys((plain_name(name) for name in inner.state_dict()), True)
    found: dict[str, InFiles] = {}
    parts: dict[str, dict[str, list[InFiles]]] = {}  # the tensors in order, by parameter and the converter's pattern
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


def _joined(name: str, converter: Any, gathered: Mapping[str, Sequence[InFiles]]) -> InFiles:
    """Joins several tensors to one, in which their elements follow each other."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    lists = [gathered[pattern] for pattern in converter.source_patterns if pattern in gathered]
    every = [part for parts in lists for part in parts]
    if len(converter.target_patterns) == 1 and len({part.dtype for part in every}) == 1:
        if steps == [("MergeModulelist", 0)] and len(lists) == 1:
            return _in_a_row(name, every, stacked=True)
        if steps == [("Concatenate", 0)]:
            return _in_a_row(name, every)
        if steps == [("MergeModulelist", 0), ("Concatenate", 1)] and len({len(parts) for parts in lists}) == 1:
            return _in_a_row(name, [_in_a_row(name, of_one) for of_one in zip(*lists)], stacked=True)
    raise InvalidArgumentError(
        f"'{name}' is not in the files as the model has it: transformers makes it of {len(every)} tensors "
        f"({', '.join(step for step, _ in steps)}), which cannot be done while it is streamed. Where there is room for the "
        "model, load it with transformers and write it as it is: model.save_pretrained(FOLDER, save_original_format=False)"
    )


def _in_a_row(name: str, parts: Sequence[InFiles], stacked: bool = False) -> InFiles:
    """The tensors along their first dimension, or, `stacked`, along a new one."""
    inner = {part.shape if stacked else part.shape[1:] for part in parts}
    if len(inner) > 1:
        raise InvalidArgumentError(
            f"'{name}' is put together of {len(parts)} tensors of '{parts[0].file.parent}', whose shapes do not fit: "
            + ", ".join(sorted({str(list(part.shape)) for part in parts}))
        )
    first = len(parts) if stacked else sum(part.shape[0] for part in parts)
    return InFiles(tuple(run for part in parts for run in part.runs), parts[0].dtype, (first, *inner.pop()))
