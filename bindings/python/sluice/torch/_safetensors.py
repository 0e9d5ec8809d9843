"""Reads values from a folder of safetensors, a run of elements at a time."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .._handle import text_of
from ..errors import CorruptError, InvalidArgumentError, NotFoundError

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_COMPARED = 1 << 20  # elements that are compared at a time


_Form = Callable[[str], "str | None"]  # what a parameter's name may be in the files


class Run(NamedTuple):
    """Elements that follow each other in a file: where they begin, and how many they are."""

    file: Path
    begin: int  # byte
    elements: int


class Stored(NamedTuple):
    """Where a tensor lies: in runs that make it up, one after another."""

    runs: tuple[Run, ...]
    dtype: torch.dtype | None  # None: a type of the files that is not read
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        return self.runs[0].file


class SafetensorsFolder:
    """The tensors of a model's files in a folder, which stay closed between reads: those of model.safetensors; where there is none, those
    that model.safetensors.index.json names, as for `sluice train` and transformers; where there is neither, those of all files.
    Raises InvalidArgumentError where two of these have a tensor of one name."""

    def __init__(
        self,
        folder: os.PathLike[str] | str,
        named: Callable[[dict[str, Stored]], dict[str, Stored]] = lambda tensors: tensors,
        file: str | None = None,
    ) -> None:
        """named: renames tensors, or joins some. file: the name of the only file that counts, instead of a model's."""
        self.folder = Path(folder)
        self._tensors = named(_tensors_of_model(self.folder) if file is None else _tensors_of(self.folder / file))
        self._forms: list[_Form] = []

    def find(self, names_of: Mapping[str, Sequence[str]]) -> dict[str, Stored]:
        """Finds each parameter that the files have. Returns where they lie, by their first names. names_of: all names of
        each, of which a tied parameter has several.

        A name counts as it is, or without an adapter's `base_layer`. Wrappers also put words in front of all names, and
        files may have more of them (`transformer.wte.weight`, `base_model.model...`): the same words are added or dropped
        for all names where that finds more parameters. No tensor is taken for two parameters."""
        exact = self._matched(names_of, _as_it_is)
        plain = {**self._matched(names_of, plain_name), **exact}
        found = dict(exact)
        _add(found, plain)
        fronts = list(self._fronts(names_of))
        fronted = [self._matched(names_of, front) for front in fronts]
        most = max(range(len(fronts)), key=lambda i: len(fronted[i]), default=None)
        self._forms = [_as_it_is, plain_name]
        if most is not None and len(fronted[most]) > len(plain):
            _add(found, fronted[most])
            self._forms.append(fronts[most])
        return {first: self._tensors[key] for first, key in found.items()}

    def _matched(self, names_of: Mapping[str, Sequence[str]], form: _Form) -> dict[str, str]:
        """The tensor's name for each parameter of which a name, in this form, is in the files."""
        matched = {}
        for first, names in names_of.items():
            key = next((key for name in names if (key := form(name)) in self._tensors), None)
            if key is not None:
                matched[first] = key
        return matched

    def _fronts(self, names_of: Mapping[str, Sequence[str]]) -> Iterator[_Form]:
        """Functions that drop words in front of names, or add some: those that names and files suggest."""
        names = {plain_name(name) for several in names_of.values() for name in several}
        fewer = {front for name in names for front, rest in _cuts(name) if rest in self._tensors}
        more = {front for key in self._tensors for front, rest in _cuts(key) if rest in names}
        for front in sorted(fewer):
            yield functools.partial(_without, front)
        for front in sorted(more):
            yield functools.partial(_with, front)

    def others(self, found: Mapping[str, Stored]) -> list[str]:
        """The names of tensors that no parameter has."""
        taken = {stored.runs for stored in found.values()}
        return [name for name, stored in self._tensors.items() if stored.runs not in taken]

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """All tensors, by their names."""
        return self._tensors

    @property
    def first_dtype(self) -> torch.dtype:
        """The type of the first tensor of numbers with a point; f32 where there is none."""
        types = (stored.dtype for stored in self._tensors.values())
        return next((dtype for dtype in types if dtype is not None and dtype.is_floating_point), torch.float32)

    def under(self, names: Iterable[str]) -> dict[str, Stored]:
        """The tensors under these names, in the forms in which find() looked for them."""
        keys = (form(name) for name in names for form in self._forms)
        return {key: self._tensors[key] for key in keys if key in self._tensors}

    def same(self, one: Stored, other: Stored, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values, in a type in which they are used."""
        if one.runs == other.runs:
            return True
        if one.shape != other.shape or one.dtype is None or other.dtype is None:
            return False
        elements = math.prod(one.shape)
        for first in range(0, elements, _COMPARED):
            parts = [torch.empty(min(_COMPARED, elements - first), dtype=dtype, device="cpu") for _ in range(2)]
            for stored, part in zip((one, other), parts, strict=True):
                self.read(stored, first, part)
            # A NaN is equal to itself here.
            if not torch.equal(*parts) and not torch.equal(*(part.view(torch.uint8) for part in parts)):
                return False
        return True

    @staticmethod
    def read(stored: Stored, first: int, into: torch.Tensor) -> None:
        """Reads the elements from `first` on into all of `into`, in its type. REQUIRES: the stored type is read."""
        assert stored.dtype is not None, "it was checked"
        for run in stored.runs:
            count = max(0, min(run.elements - first, into.numel()))
            if count:
                _read_run(run, first, stored.dtype, into[:count])
                into = into[count:]
            first = max(0, first - run.elements)


def _read_run(run: Run, first: int, dtype: torch.dtype, into: torch.Tensor) -> None:
    item = torch.empty((), dtype=dtype).element_size()
    raw = bytearray(into.numel() * item)
    with open(run.file, "rb", buffering=0) as file:
        file.seek(run.begin + first * item)
        done = 0
        while done < len(raw):
            count = file.readinto(memoryview(raw)[done:])
            if not count:
                raise CorruptError(f"'{run.file}' ends at {file.tell()}, in the middle of a tensor")
            done += count
    into.copy_(torch.frombuffer(raw, dtype=dtype))


def printable(name: str) -> str:
    """A name out of a file, for messages: what would control a terminal is shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _as_it_is(name: str) -> str:
    return name


def plain_name(name: str) -> str:
    """A name without the words that adapters add."""
    return name.replace(".base_layer.", ".")


def _without(front: str, name: str) -> str | None:
    return plain_name(name)[len(front) :] if plain_name(name).startswith(front) else None


def _with(front: str, name: str) -> str | None:
    return front + plain_name(name)


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """The words in front (with their last point) and the rest, for each point of a name."""
    end = name.find(".")
    while end >= 0:
        yield name[: end + 1], name[end + 1 :]
        end = name.find(".", end + 1)


def _add(found: dict[str, str], others: Mapping[str, str]) -> None:
    """Adds tensors that are not taken for parameters that have none."""
    taken = set(found.values())
    for first, key in others.items():
        if first not in found and key not in taken:
            found[first] = key
            taken.add(key)


def _tensors_of(file: Path) -> dict[str, Stored]:
    tensors = json.loads(text_of("sluice_safetensors_tensors", os.fsencode(file)))
    return {
        t["name"]: Stored((Run(file, t["begin"], math.prod(t["shape"])),), _TYPES.get(t["dtype"]), tuple(t["shape"]))
        for t in tensors
    }


def _tensors_of_model(folder: Path) -> dict[str, Stored]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return _tensors_of(single)
    return _tensors_of_index(index) if index.exists() else _tensors_of_all(folder)


def _tensors_of_index(index: Path) -> dict[str, Stored]:
    if not index.is_file():
        raise InvalidArgumentError(f"'{index}' is not a file; name a regular file")
    try:
        files = dict(json.loads(index.read_bytes())["weight_map"])
        if not all(isinstance(file, str) and os.path.basename(file) == file != "" for file in files.values()):
            raise ValueError("a tensor is in what is no plain file name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"'{index}' is no index of safetensors: {error!r}") from error
    tensors: dict[str, Stored] = {}
    for file in sorted(set(files.values())):
        if not (index.parent / file).exists():
            raise NotFoundError(f"'{index.parent / file}' is missing, which '{index}' names")
        there = _tensors_of(index.parent / file)
        for name in (name for name, of in files.items() if of == file):
            if name not in there:
                raise CorruptError(f"'{index}' puts '{printable(name)}' in '{file}', which does not have it")
            tensors[name] = there[name]
    return tensors


def _tensors_of_all(folder: Path) -> dict[str, Stored]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotFoundError(f"'{folder}' has no file *.safetensors; save the model there with save_pretrained()")
    tensors: dict[str, Stored] = {}
    for file in files:
        there = _tensors_of(file)
        twice = next((name for name in there if name in tensors), None)
        if twice is not None:
            raise InvalidArgumentError(
                f"'{printable(twice)}' is in '{tensors[twice].file}' and in '{file}'; leave one of the files there, or give the folder a "
                "model.safetensors.index.json, which says which counts"
            )
        tensors.update(there)
    return tensors
