"""Casts of parameters by autocast: autograd keeps references to them, and they are made again in backward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._homes import Home, View, storage_of


class Cast(NamedTuple):
    """A cast of a parameter, or of a view of it, to another type."""

    home: Home
    source: View  # the view of the parameter's memory
    made: View  # the cast's view of memory of its own

    def make(self) -> torch.Tensor:
        """Makes the cast again, in other memory with the same layout."""
        made = torch.empty_strided(self.made.size, self.made.stride, dtype=self.made.dtype, device=self.home.memory.device)
        return made.copy_(self.source.over(self.home.memory))


class Casts(TorchDispatchMode):
    """Notes, while it is active, which tensors are casts of parameters or of views of them. Autocast's own cache, which
    would hold a copy of every parameter until its end, is off meanwhile."""

    def __init__(self, by_storage: Mapping[int, Home]) -> None:
        super().__init__()
        self._homes = by_storage
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], int, Cast]] = {}  # each with the version that it had
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
        if func is torch.ops.aten._to_copy.default and result.layout == torch.strided:
            home = self._homes.get(storage_of(args[0]))
            if home is not None and result.storage_offset() == 0:
                cast = Cast(home, View.of(args[0]), View.of(result))
                self._casts[storage_of(result)] = (weakref.ref(result), result._version, cast)
        return result

    def find(self, tensor: torch.Tensor) -> Cast | None:
        """The cast that the tensor is, or is a view of. A tensor that was written to since is no cast."""
        found = self._casts.get(storage_of(tensor))
        if found is None:
            return None
        reference, version, cast = found
        made = reference()
        is_it = made is not None and made._version == version and storage_of(made) == storage_of(tensor)
        return cast if is_it else None
