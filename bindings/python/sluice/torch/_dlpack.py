"""Tensors over memory that is not PyTorch's, by DLPack, which asks nothing of the pointer."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2  # DLDeviceType
_FLOAT, _BFLOAT = 2, 4  # DLDataTypeCode
_NAME = b"dltensor"  # by which PyTorch knows the capsule; the capsule refers to these bytes


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),  # NULL: the last dimension is fastest
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class Lent:
    """Memory that is lent to PyTorch, until the last tensor over it is gone. `keeps` is what must live as long."""

    def __init__(self, keeps: Any) -> None:
        self.keeps = keeps
        self._managed = _Managed()

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor over the memory. It is called once."""
        managed = self._managed
        self._lengths = lengths = (ctypes.c_int64 * len(shape))(*shape)
        kind = _CPU if device.type == "cpu" else _CUDA
        code = _BFLOAT if dtype == torch.bfloat16 else _FLOAT
        managed.tensor = _Tensor(address, kind, device.index or 0, len(shape), code, 8 * dtype.itemsize, 1, lengths, None, 0)
        managed.deleter = _deleter
        _lent[ctypes.addressof(managed)] = self
        capsule = ctypes.pythonapi.PyCapsule_New(ctypes.addressof(managed), _NAME, None)
        try:
            made: torch.Tensor = from_dlpack(capsule)
            return made
        except BaseException:
            del _lent[ctypes.addressof(managed)]
            raise


_lent: dict[int, Lent] = {}  # what PyTorch has, by the address of its description
_deleter = _Deleter(lambda address: _lent.pop(address, None) and None)
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
