"""Writes files of safetensors from a wrapped model, a few MiB at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Optional

import torch

from ..errors import InvalidArgumentError, StateError
from ..model import Path
from ._homes import memory_of

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_RUN = 8 << 20  # bytes that are copied at a time
_UNWRITTEN = 64 << 20  # the most bytes that the system may keep before they are on the disk

_substituting = threading.RLock()


def save_file(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Optional[Mapping[str, str]] = None) -> None:
    """Writes tensors, such as a wrapped model's state_dict(), to a file as docs/formats/safetensors.md says, whole or not at
    all. Parameters come in one after another. Of tied tensors the first is written, and the metadata maps the other names
    to it, as safetensors' save_model() does.

    Raises InvalidArgumentError that names what the format cannot hold.
    """
    written, same = _without_same(tensors)
    header = _header_of(written, {**same, **(metadata or {})})
    whole = os.path.abspath(os.fspath(path))
    part = f"{whole}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as file:
            _write(file, header, written.values())
        os.replace(part, whole)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


def _without_same(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to write, the widest type first, as readers need it; and which other names are the same as which."""
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
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """The bytes of a file with these tensors, in pieces that follow each other: memory of the tensors, where they are contiguous
    and on the CPU."""
    ordered = _widest_first(tensors)
    copies = [t.detach().to("cpu").contiguous() for t in ordered.values() if t.numel()]
    pieces = [memoryview(_header_of(ordered, {}))]
    for copy in copies:
        piece = memory_of(copy)
        piece.obj.keeps = copy  # type: ignore[attr-defined]
        pieces.append(piece)
    return pieces


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
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, header: bytes, tensors: Iterable[torch.Tensor]) -> None:
    file.write(header)
    since = 0
    for tensor in tensors:
        for run in _runs(tensor):
            file.write(run)
            since += run.nbytes
            if since >= _UNWRITTEN:
                _to_disk(file)
                since = 0
    _to_disk(file)


def _to_disk(file: BinaryIO) -> None:
    """Writes the file to the disk, so that the system keeps none of it in memory."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _runs(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in runs, which are copies, since the system cannot write from an absent home."""
    flat = tensor.detach().contiguous().view(-1)
    count = _RUN // flat.element_size()
    for first in range(0, flat.numel(), count):
        copy = flat[first : first + count].to("cpu", copy=True)
        yield memory_of(copy)


# ---- save_pretrained() ----


Reading = Callable[[], contextlib.AbstractContextManager[None]]


def install(model: torch.nn.Module, reading: Reading) -> None:
    """Makes save_pretrained() of a model and its modules write by save_file(). reading: a `with` in which parameters can be
    read."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__.setdefault("save_pretrained", functools.partial(_save_pretrained, module, reading))


def uninstall(model: torch.nn.Module) -> None:
    """Undoes install()."""
    for module in model.modules():
        saving = module.__dict__.get("save_pretrained")
        if isinstance(saving, functools.partial) and saving.func is _save_pretrained:
            del module.__dict__["save_pretrained"]


def _save_pretrained(module: torch.nn.Module, reading: Reading, *args: Any, **kwargs: Any) -> Any:
    """Runs the library's own save_pretrained(), which decides what to save in which files, and meanwhile replaces the name
    by which it calls safetensors' save_file(), which leaves reading to the system."""
    function = type(module).save_pretrained  # type: ignore[attr-defined]
    names = inspect.unwrap(function).__globals__
    with reading(), _substituted(names):
        try:
            return function(module, *args, **kwargs)
        except Exception as error:
            if "os error 14" not in str(error):
                raise
            raise StateError(
                f"{type(module).__name__}.save_pretrained() lets the system read parameters that are on disk ({error}); "
                "save with sluice.torch.save_file(model.state_dict(), path)"
            ) from error


@contextlib.contextmanager
def _substituted(names: dict[str, Any]) -> Iterator[None]:
    if "safe_save_file" not in names:
        yield
        return
    with _substituting:
        original, names["safe_save_file"] = names["safe_save_file"], save_file
        try:
            yield
        finally:
            names["safe_save_file"] = original
