"""Tensors in files: safetensors, of which a model's tensors are read a run of elements at a time, and written without fitting in memory; and
files without a name, in which tensors beside the engine lie."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import torch

from .._handle import text_of
from .._make import path_of
from ..engine import Engine
from ..errors import BudgetError, CorruptError, InvalidArgumentError, SystemIOError
from ..model import folders_of
from ._homes import memory_of

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in TYPES.items()}
_COMPARED = 1 << 20  # elements that are compared at a time
_RUN = 8 << 20  # bytes that are written at a time
_UNWRITTEN = 64 << 20  # the most bytes that the system may keep before they are on the disk

# ---- reading ----


class Run(NamedTuple):
    """Elements that follow each other in a file: where they begin, and how many they are."""

    file: Path
    begin: int  # byte
    elements: int


class InFiles(NamedTuple):
    """A tensor in files: the runs that make it up, one after another."""

    runs: tuple[Run, ...]
    dtype: torch.dtype | None  # None: a type of the files that is not read
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        return self.runs[0].file

    def read(self, first: int, into: torch.Tensor) -> None:
        """Reads the elements from `first` on into all of `into`, in its type. REQUIRES: the stored type is read."""
        assert self.dtype is not None, "it was checked"
        for run in self.runs:
            count = max(0, min(run.elements - first, into.numel()))
            if count:
                _read_run(run, first, self.dtype, into[:count])
                into = into[count:]
            first = max(0, first - run.elements)

    def same(self, other: InFiles, dtype: torch.dtype) -> bool:
        """Whether the other tensor has the same values, in a type in which they are used. (A NaN is equal to itself here.)"""
        if self.shape != other.shape or self.dtype is None or other.dtype is None:
            return False
        elements = math.prod(self.shape)
        for first in range(0, elements, _COMPARED):
            one, two = (torch.empty(min(_COMPARED, elements - first), dtype=dtype, device="cpu") for _ in range(2))
            self.read(first, one)
            other.read(first, two)
            if not torch.allclose(one, two, rtol=0, atol=0, equal_nan=True):
                return False
        return True


def _read_run(run: Run, first: int, dtype: torch.dtype, into: torch.Tensor) -> None:
    raw = bytearray(into.numel() * dtype.itemsize)
    with open(run.file, "rb", buffering=0) as file:
        file.seek(run.begin + first * dtype.itemsize)
        done = 0
        while done < len(raw):
            count = file.readinto(memoryview(raw)[done:])
            if not count:
                raise CorruptError(f"'{run.file}' ends at {file.tell()}, in the middle of a tensor")
            done += count
    into.copy_(torch.frombuffer(raw, dtype=dtype))


def tensors_of(path: os.PathLike[str] | str) -> dict[str, InFiles]:
    """The tensors of a file, or of a model's files in a folder (those that count for `sluice train` and transformers), by their names."""
    is_folder = os.path.isdir(path)
    return {
        t["name"]: InFiles(
            (Run(Path(path, t["file"]) if is_folder else Path(path), t["begin"], math.prod(t["shape"])),), _BY_NAME.get(t["dtype"]), tuple(t["shape"])
        )
        for t in json.loads(text_of("sluice_safetensors_tensors", path_of(path)))
    }


# ---- writing ----


def save_file(
    tensors: Mapping[str, torch.Tensor], path: Union[str, os.PathLike[str]], metadata: Optional[Mapping[str, str]] = None
) -> None:
    """Writes tensors, such as a wrapped model's state_dict(), to a file as docs/formats/safetensors.md says, whole or not at
    all. Parameters come in one after another. Of tied tensors the first is written, and the metadata maps the other names
    to it, as safetensors' save_model() does.

    Raises InvalidArgumentError that names what the format cannot hold, and OSError that names the file.
    """
    written, same = _without_same(tensors)
    whole = os.path.abspath(os.fspath(path))
    part = f"{whole}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as file:
            file.write(_header_of(written, {**same, **(metadata or {})}))
            _write(file, written.values())
        os.replace(part, whole)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"the file cannot be written, and what was there before stands: {error.strerror}", whole) from error
        raise


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """The bytes of a file with these tensors, in pieces that follow each other: memory of the tensors, where they are contiguous
    and on the CPU."""
    ordered = _widest_first(tensors)
    pieces = [memoryview(_header_of(ordered, {}))]
    for copy in [t.detach().to("cpu").contiguous() for t in ordered.values() if t.numel()]:
        piece = memory_of(copy)
        piece.obj.keeps = copy  # type: ignore[attr-defined]
        pieces.append(piece)
    return pieces


def _without_same(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to write, and which other names are the same as which."""
    first: dict[Any, str] = {}
    written, same = {}, {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and first.setdefault(memory, name) != name:
            same[name] = first[memory]
        else:
            written[name] = tensor
    return _widest_first(written), same


def _widest_first(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In the order that readers need."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        what = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidArgumentError(f"'{name}' is {what}; a file of safetensors holds dense tensors, of the CPU or a GPU")
    if tensor.dtype not in TYPES:
        raise InvalidArgumentError(f"'{name}' is of {tensor.dtype}; {', '.join(map(str, TYPES))} can be saved")


def _header_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, tensors: Iterable[torch.Tensor]) -> None:
    """Writes tensors to the disk, so that the system keeps none of them in memory."""
    since = 0
    for run in (run for tensor in tensors for run in _runs(tensor)):
        file.write(run)
        since += run.nbytes
        if since >= _UNWRITTEN:
            _to_disk(file)
            since = 0
    _to_disk(file)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _runs(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in runs, which are copies, since the system cannot write from an absent home."""
    flat = tensor.detach().contiguous().view(-1)
    count = _RUN // flat.element_size()
    for first in range(0, flat.numel(), count):
        copy = flat[first : first + count].to("cpu", copy=True)
        yield memory_of(copy)  # which lives as long as the copy


# ---- files without a name, which may be as large as the disk, and take memory only while they are used ----


_without_name: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address


def room(engine: Engine, needed: int, what: str) -> str | None:
    """The disk folder that takes so many bytes; None where memory does. Raises BudgetError where neither has room. what: has the
    bytes, for messages."""
    plan, folders = engine.plan(), folders_of(engine.options.disk)
    if not folders:
        total = next(line for line in engine.ledger() if (line.tier, line.purpose) == ("host", "total"))
        budget = plan["budget"]["memory"]
        if total.current + needed > budget:
            raise BudgetError(
                f"{what} takes {needed >> 20} MiB more, and {(budget - total.current) >> 20} MiB of the "
                f"{budget >> 20} MiB are free; save the state with sluice.torch.engine_of(model).save(folder), or wrap with "
                "more memory, or with a disk folder, where the state_dict then lies"
            )
        return None
    folder = os.fspath(folders[0].path)
    free = plan["budget"]["disk"] - plan["disk"]
    if needed > free:
        raise BudgetError(
            f"{what} takes {needed >> 20} MiB in '{folder}', and {free >> 20} MiB of the disk's budget "
            "are free; give the folder a larger limit, or save the state with "
            "sluice.torch.engine_of(model).save(folder)"
        )
    return folder


def make(folder: str | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU: in memory where `folder` is None, else of zeros in a file there, which ends with the last tensor over
    it. Raises SystemIOError without room."""
    if folder is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = _file_without_name(folder, math.prod(shape) * dtype.itemsize)
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    _without_name[tensor.data_ptr()] = memory
    return tensor


def flush(tensor: torch.Tensor) -> None:
    """Writes a tensor to its file, if it is in one, and gives its memory back to the system until it is used again."""
    if (memory := _without_name.get(tensor.untyped_storage().data_ptr())) is not None:
        memory.flush()
        memory.madvise(mmap.MADV_DONTNEED)


def give_up_all() -> None:
    """Gives the memory of all tensors in files back to the system."""
    for memory in list(_without_name.values()):
        memory.madvise(mmap.MADV_DONTNEED)


def _file_without_name(folder: str, size: int) -> mmap.mmap:
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # a full disk is an error here, and not when the memory is touched
            return mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError as error:
        raise SystemIOError(
            f"a tensor of a state_dict needs {size} bytes in the disk folder '{folder}': {error.strerror}. Make room there, or save "
            "into another folder with sluice.torch.engine_of(model).save(folder)"
        ) from error
