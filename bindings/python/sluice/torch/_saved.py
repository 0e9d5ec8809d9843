"""What autograd keeps of a wrapped model: parameters by reference, and anything else as it would be kept otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ._acquire import check_memory
from ._casts import Cast, Casts
from ._homes import Home, View, storage_of


class _Saved(NamedTuple):
    """What autograd keeps of a parameter, a view of it, or a cast, instead of a tensor."""

    home: Home
    version: int
    cast: Cast | None
    view: View  # of the parameter's memory, or of the cast's


class _Plain(NamedTuple):
    """Any other tensor that autograd keeps, with the version that it must still have."""

    tensor: torch.Tensor
    version: int


class SavedTensors:
    """The hooks of saved tensors of one wrapped model. They hold what makes a unit present, and so the model's session."""

    def __init__(self, by_storage: Mapping[int, Home], use: Callable[[int], None]) -> None:
        """by_storage: whose memory begins where; use: makes a unit present."""
        self.by_storage, self._use = by_storage, use

    def pack(self, tensor: torch.Tensor, casts: Casts | None) -> Any:
        """What autograd is to keep instead of the tensor."""
        if tensor.layout == torch.strided:
            home, cast = self.by_storage.get(storage_of(tensor)), None
            if home is None and casts is not None and (cast := casts.find(tensor)) is not None:
                home = cast.home
            if home is not None:
                return _Saved(home, home.version, cast, View.of(tensor))
        # An operation's own result would keep the operation, and that this: a graph that no backward frees would stay.
        return _Plain(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again."""
        return _same_version(saved) if isinstance(saved, _Plain) else self._bring_in(saved)

    def _bring_in(self, saved: _Saved) -> torch.Tensor:
        home = saved.home
        if home.version != saved.version:
            raise RuntimeError(
                f"backward goes through a graph that was made before '{home.name}' was changed (by optimizer.step() or "
                "an edit), so its gradients would be wrong; run forward again"
            )
        if home.moved:
            check_memory(home)
        for unit in home.units:
            self._use(unit)
        return saved.view.over(home.memory if saved.cast is None else saved.cast.make())


def _same_version(saved: _Plain) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, and was "
            f"saved at version {saved.version}"
        )
    return saved.tensor
