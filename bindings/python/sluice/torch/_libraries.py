"""PyTorch's own matrix products and threads, for the engine."""

from __future__ import annotations

import ctypes
import pathlib
from typing import Optional

import torch

from ..errors import NotFoundError


_LIBRARY = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def sgemm() -> int:
    """The address of sgemm_ in PyTorch's library, for Options.sgemm: its products run on PyTorch's threads. Raises
    NotFoundError where PyTorch was built without it."""
    try:
        return _address("sgemm_")
    except (OSError, AttributeError) as error:
        raise NotFoundError(
            f"Muon's products are made by PyTorch's sgemm_, and this one ({torch.__version__}) has none in '{_LIBRARY}' "
            f"({error}); use a PyTorch with MKL or OpenBLAS, or another optimizer"
        ) from error


def team() -> Optional[int]:
    """The address of GOMP_parallel in PyTorch's OpenMP, for Options.team: the engine's loops run on PyTorch's threads.
    None where PyTorch has no such OpenMP."""
    try:
        return _address("GOMP_parallel")
    except (OSError, AttributeError):
        return None


def _address(name: str) -> int:
    """The address of a function in PyTorch's library, or in one that it uses."""
    found = ctypes.cast(getattr(ctypes.CDLL(str(_LIBRARY)), name), ctypes.c_void_p).value
    assert found is not None
    return found
