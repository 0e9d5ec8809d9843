"""Parameters that autocast turns into another type: autograd keeps them by reference, and makes them again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._homes import Home, storage_of


class Cast(NamedTuple):
    """A whole parameter in another type."""

    home: Home
    dtype: torch.dtype


class Casts(TorchDispatchMode):
    """While it is active, notes which tensors are casts of whole parameters. Autocast's own cache, which would hold a copy
    of every parameter until its end, is off meanwhile."""

    def __init__(self, by_storage: Mapping[int, Home]) -> None:
        super().__init__()
        self._homes = by_storage
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], Cast]] = {}
        self._cached = False

    def __enter__(self) -> Any:
        self._cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_autocast_cache_enabled(self._cached)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_contiguous():
            home = self._homes.get(storage_of(args[0]))
            if home is not None and args[0].numel() == result.numel() and args[0].is_contiguous():
                self._casts[storage_of(result)] = (weakref.ref(result), Cast(home, result.dtype))
        return result

    def find(self, tensor: torch.Tensor) -> Cast | None:
        """What the tensor, or a view of it, is a cast of."""
        found = self._casts.get(storage_of(tensor))
        if found is None:
            return None
        made = found[0]()
        return found[1] if made is not None and storage_of(made) == storage_of(tensor) else None
