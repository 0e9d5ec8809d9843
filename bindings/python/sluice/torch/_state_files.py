"""Tensors in files without a name, which may be as large as the disk, and take memory only while they are used."""

from __future__ import annotations

import math
import mmap
import os
import weakref

import torch

from ..errors import SystemIOError

_files: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address


def make(folder: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in a file of the folder, which ends with the last tensor over it. Raises SystemIOError without room."""
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
    """Gives a tensor's memory back to the system until it is read again, if the tensor is in a file."""
    if (memory := _file_of(tensor)) is not None:
        memory.madvise(mmap.MADV_DONTNEED)


def give_up_all() -> None:
    """Gives the memory of all tensors in files back to the system."""
    for memory in list(_files.values()):
        memory.madvise(mmap.MADV_DONTNEED)


def _file_of(tensor: torch.Tensor) -> mmap.mmap | None:
    return _files.get(tensor.untyped_storage().data_ptr())


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
