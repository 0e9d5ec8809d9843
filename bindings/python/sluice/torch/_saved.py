"""Autograd's saved tensors of a wrapped model: references to parameters, to views and casts of them, and other tensors as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import StateError
from ._homes import Home, View, has_memory, storage_of, written_by
from ._modes import Mode, outside_of_graphs
from ._presence import Presence


class Cast(NamedTuple):
    """A cast of a parameter, or of a view of it, to another type."""

    home: Home
    source: View  # the view of the parameter's memory
    made: View  # the cast's view of memory of its own

    def make(self) -> torch.Tensor:
        """Makes the cast again, in other memory with the same layout."""
        made = torch.empty_strided(self.made.size, self.made.stride, dtype=self.made.dtype, device=self.home.memory.device)
        return made.copy_(self.source.over(self.home.memory))


class _Saved(NamedTuple):
    """The reference that autograd keeps to a parameter, a view of it, or a cast."""

    home: Home
    version: int
    cast: Cast | None
    view: View  # the view of the parameter's memory, or of the cast's


class _Plain(NamedTuple):
    """Another tensor that autograd keeps, with the version that it must still have in backward."""

    tensor: torch.Tensor
    version: int


class _Others(NamedTuple):
    """A value that outer hooks of saved tensors keep for a tensor, and the hook that unpacks it."""

    kept: Any
    unpack: Callable[[Any], torch.Tensor]


class SavedTensors:
    """Autograd's saved tensors of the calls of one wrapped model. This object keeps the presence alive."""

    def __init__(self, presence: Presence, bring_in: Callable[[Home], None], begin_pass: Callable[[], object]) -> None:
        """bring_in: brings in a parameter that a backward pass needs; begin_pass: comes before a pass uses what was kept."""
        self.presence = presence
        self._bring_in, self._begin_pass = bring_in, begin_pass

    def reference(self, tensor: torch.Tensor, casts: Casts) -> _Saved | None:
        """The reference that autograd keeps to a parameter, a view of it, or a cast; None for any other tensor."""
        if tensor.layout != torch.strided or not has_memory(tensor):
            return None
        home, cast = self.presence.by_storage.get(storage_of(tensor)), None
        if home is None and (cast := casts.find(tensor)) is not None:
            home = cast.home
        return None if home is None else _Saved(home, home.version, cast, View.of(tensor))

    @outside_of_graphs
    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor for what was kept of it."""
        self._begin_pass()
        self.presence.look()
        if isinstance(saved, _Others):
            return saved.unpack(saved.kept)
        return _same_version(saved) if isinstance(saved, _Plain) else self._over(saved)

    def _over(self, saved: _Saved) -> torch.Tensor:
        home = saved.home
        if home.version != saved.version:
            raise RuntimeError(
                f"backward goes through a graph that was made before '{home.name}' was changed (by optimizer.step() or "
                "within full_parameters()), so its gradients would be wrong; run forward again"
            )
        try:
            self._bring_in(home)
        except StateError as error:
            raise StateError(f"'{home.name}' is needed: {error}") from None
        return saved.view.over(home.memory if saved.cast is None else saved.cast.make())


def _same_version(saved: _Plain) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, and was "
            f"saved at version {saved.version}"
        )
    return saved.tensor


class Scope:
    """Inside of the `with`, which is one call of the model, autograd keeps references."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._others = torch._C._autograd._top_saved_tensors_default_hooks(True)  # PyTorch itself calls the innermost hooks alone
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self._pack, saved.unpack)
        self._casts, self._casting = Casts(saved.presence.by_storage), False

    def __enter__(self) -> None:
        """Where hooks are not allowed (in transforms of torch.func), autograd keeps the parameters themselves, which are brought in when
        backward touches them."""
        try:
            self._hooks.__enter__()  # type: ignore[union-attr]
        except RuntimeError as why:
            self._hooks = None
            if self._saved.presence.engine.gpu is not None:
                raise StateError(
                    f"a model that is wrapped on a GPU is called where autograd keeps parameters themselves ({why}), which backward would "
                    "not find there; use torch.autograd.grad() in the place of a transform of torch.func, or wrap the model on the CPU"
                ) from None

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)

    def begin_casts(self) -> bool:
        """Attends to casts until end_casts(), and returns whether it does, which is where autocast is on and it has not begun yet. Autocast
        may be turned on inside of the model's forward, so that each module's call asks."""
        presence = self._saved.presence
        if self._casting or not torch.is_autocast_enabled(presence.engine.device.type):
            return False
        self._casts.begin(presence.keeps_casts)
        self._casting = True
        return True

    def end_casts(self) -> None:
        """Ends that."""
        self._casting = False
        self._casts.end()

    @outside_of_graphs  # also where the function that calls backward() is compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        self._saved.presence.look()
        reference = self._saved.reference(tensor, self._casts)
        if reference is not None:
            return reference
        if self._others is not None:
            return _Others(self._others[0](tensor), self._others[1])
        # An operation that keeps its own result would refer to itself: a graph that no backward frees would stay.
        return _Plain(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


# ---- casts of parameters by autocast, which are made again in backward ----


_CAST = torch.ops.aten._to_copy.default


class _KeptParameters(threading.local):
    """Lets a graph of torch.compile() that is made meanwhile keep the parameter for backward, and not a cast that one of its kernels makes
    and no mode sees. PyTorch keeps each patch of its settings forever, so a thread has one."""

    def __init__(self) -> None:
        self._patch = torch._functorch.config.patch(ban_recompute_materialized_backward=False)
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._patch.__enter__()
        self._depth += 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._patch.__exit__(*error)


_kept_parameters = _KeptParameters()


class Casts(Mode):
    """Notes, from begin() to end(), which tensors are casts of parameters or of views of them. Autocast's own cache, which would hold a copy
    of every parameter until its end, and add gradients of several uses in the narrow type, is off meanwhile."""

    def __init__(self, by_storage: Mapping[int, Home]) -> None:
        super().__init__()
        self._homes = by_storage
        self._casts: dict[int, tuple[StorageWeakRef, int, Cast]] = {}  # each with the version that it had
        self._cached = self._notes = False

    def begin(self, are_kept: bool) -> None:
        """are_kept: there is room for autograd to keep casts, so that none is noted."""
        self._cached, self._notes = torch.is_autocast_cache_enabled(), not are_kept
        torch.set_autocast_cache_enabled(False)
        _kept_parameters.__enter__()
        if self._notes:
            self.__enter__()

    def end(self) -> None:
        """Ends what begin() began."""
        if self._notes:
            self.__exit__(None, None, None)
        _kept_parameters.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(self._cached)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _CAST and has_memory(args[0]) and result.layout == torch.strided:
            home = self._homes.get(storage_of(args[0]))
            if home is not None and result.storage_offset() == 0:
                cast = Cast(home, View.of(args[0]), View.of(result))
                self._casts[storage_of(result)] = (StorageWeakRef(result.untyped_storage()), result._version, cast)
        for tensor in written_by(func, args, kwargs or {}) if self._casts else ():
            if has_memory(tensor) and tensor.layout == torch.strided:
                self._casts.pop(storage_of(tensor), None)
        return result

    def find(self, tensor: torch.Tensor) -> Cast | None:
        """The cast that the tensor is, or is a view of. A tensor that was written to since is no cast."""
        if not self._casts:
            return None
        made, version, cast = self._casts.get(storage_of(tensor), (None, 0, None))
        return cast if made is not None and not made.expired() and tensor._version == version else None
