"""Tensors in files without a name: as large as the disk has room, and in memory only where they are read."""

from __future__ import annotations

import math
import mmap
import os
import weakref

import torch

_files: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address


def make(folder: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in a file of the folder, which goes with the last tensor over it. OSError where there is no room."""
    memory = _file_without_name(folder, math.prod(shape) * dtype.itemsize)
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    _files[tensor.data_ptr()] = memory
    return tensor


def flush(tensor: torch.Tensor) -> None:
    """Writes a tensor to its file, and gives its memory back to the system."""
    if (memory := _file_of(tensor)) is not None:
        memory.flush()
        memory.madvise(mmap.MADV_DONTNEED)


def give_up(tensor: torch.Tensor) -> None:
    """Gives memory that a tensor takes back to the system, until it is read again, where the tensor is in a file."""
    if (memory := _file_of(tensor)) is not None:
        memory.madvise(mmap.MADV_DONTNEED)


def give_up_all() -> None:
    """Gives up what was read of every such tensor."""
    for memory in list(_files.values()):
        memory.madvise(mmap.MADV_DONTNEED)


def _file_of(tensor: torch.Tensor) -> mmap.mmap | None:
    return _files.get(tensor.untyped_storage().data_ptr())


def _file_without_name(folder: str, size: int) -> mmap.mmap:
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # a full disk says so here, and not when the memory is touched
        return mmap.mmap(file, size)
    finally:
        os.close(file)
