"""Values out of a folder of safetensors, a run of elements at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import CorruptError, InvalidArgumentError, NotFoundError

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LARGEST_HEADER = 100 << 20


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsFolder:
    """The tensors of all files of a folder; files stay closed between reads."""

    def __init__(self, folder: os.PathLike[str] | str) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise NotFoundError(f"'{folder}' has no file *.safetensors; save the model there with save_pretrained()")
        self._tensors: dict[str, Stored] = {}
        for file in files:
            self._tensors.update(_tensors_of(file))

    def find(self, names: Iterable[str], shape: Sequence[int]) -> Stored:
        """The tensor under the first of these names that is there, in one of its forms."""
        wanted = list(names)
        for name in wanted:
            stored = next((self._tensors[form] for form in self._forms(name) if form in self._tensors), None)
            if stored is None:
                continue
            if stored.shape != tuple(shape):
                raise InvalidArgumentError(
                    f"'{name}' has the shape {list(stored.shape)} in '{stored.file}', and {list(shape)} in the model"
                )
            return stored
        raise NotFoundError(f"'{wanted[0]}' is in no file of '{self.folder}'")

    def _forms(self, name: str) -> Iterator[str]:
        """Wrappers put words in front (`transformer.wte.weight`, `base_model.model...`), adapters one in between."""
        plain = name.replace(".base_layer.", ".")
        words = plain.split(".")
        for first in range(max(1, len(words) - 1)):
            yield ".".join(words[first:])
        longer = [key for key in self._tensors if key.endswith("." + plain)]
        if len(longer) == 1:
            yield longer[0]

    @staticmethod
    def read(stored: Stored, first: int, into: torch.Tensor) -> None:
        """Elements first ... in f32, as many as `into` has."""
        item = torch.empty((), dtype=stored.dtype).element_size()
        raw = bytearray(into.numel() * item)
        with open(stored.file, "rb", buffering=0) as file:
            file.seek(stored.begin + first * item)
            done = 0
            while done < len(raw):
                count = file.readinto(memoryview(raw)[done:])
                if not count:
                    raise CorruptError(f"'{stored.file}' ends at {file.tell()}, in the middle of a tensor")
                done += count
        into.copy_(torch.frombuffer(raw, dtype=stored.dtype))


def _tensors_of(file: Path) -> dict[str, Stored]:
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(_LARGEST_HEADER, file.stat().st_size - 8):
            raise CorruptError(f"'{file}' is no safetensors file: its header would have {length} bytes")
        try:
            header = json.loads(opened.read(length))
            return {
                name: Stored(file, 8 + length + entry["data_offsets"][0], _TYPES[entry["dtype"]], tuple(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__" and entry["dtype"] in _TYPES
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CorruptError(f"'{file}' has a header that is no safetensors header: {error!r}") from error
