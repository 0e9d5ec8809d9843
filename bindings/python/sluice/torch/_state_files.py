"""Tensors beside the engine: in memory, or in files without a name, which may be as large as the disk, and take memory only while they are
used."""

from __future__ import annotations

import math
import mmap
import os
import weakref

import torch

from ..engine import Engine
from ..errors import BudgetError, SystemIOError
from ..model import folders_of

_files: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address


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
    _files[tensor.data_ptr()] = memory
    return tensor


def flush(tensor: torch.Tensor) -> None:
    """Writes a tensor to its file, if it is in one, and gives its memory back to the system until it is used again."""
    if (memory := _files.get(tensor.untyped_storage().data_ptr())) is not None:
        memory.flush()
        memory.madvise(mmap.MADV_DONTNEED)


def give_up_all() -> None:
    """Gives the memory of all tensors in files back to the system."""
    for memory in list(_files.values()):
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
