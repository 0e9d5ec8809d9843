"""PyTorch's own matrix products, for the engine."""

from __future__ import annotations

import ctypes
import pathlib

import torch

from ..errors import NotFoundError


def sgemm() -> int:
    """The address of sgemm_ in PyTorch's library, for Options.sgemm: its products share PyTorch's threads. NotFoundError
    where that was built without one."""
    path = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.cast(ctypes.CDLL(str(path)).sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise NotFoundError(
            f"Muon's products are made by PyTorch's sgemm_, and this one ({torch.__version__}) has none in '{path}' "
            f"({error}); use a PyTorch with MKL or OpenBLAS, or another optimizer"
        ) from error
    assert found is not None
    return found
