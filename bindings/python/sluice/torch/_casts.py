"""Casts of parameters by autocast: autograd keeps references to them, and they are made again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from ._homes import Home, View, has_memory, storage_of, written_by
from ._modes import Mode


class Cast(NamedTuple):
    """A cast of a parameter, or of a view of it, to another type."""

    home: Home
    source: View  # the view of the parameter's memory
    made: View  # the cast's view of memory of its own

    def make(self) -> torch.Tensor:
        """Makes the cast again, in other memory with the same layout."""
        made = torch.empty_strided(self.made.size, self.made.stride, dtype=self.made.dtype, device=self.home.memory.device)
        return made.copy_(self.source.over(self.home.memory))


class MadeAgain(CustomGraphPass):
    """Lets graphs of torch.compile() that are made by its backend "inductor" keep parameters for backward, and make their casts
    again there. By itself it keeps the casts, which are tensors of the graph's own: nobody else sees what they are casts of."""

    def __init__(self, by_storage: Mapping[int, Home]) -> None:
        self._shapes = sorted({tuple(home.parameter.shape) for home in by_storage.values()})
        self._others: tuple[Any, ...] = ()  # the user's own passes, which come first

    def __call__(self, graph: torch.fx.Graph) -> None:
        for other in self._others:
            other(graph)
        written = {node.args[0] for node in graph.nodes if node.args and _writes(node.target)}
        parameters = set()  # and views of them
        for node in graph.nodes:
            if node.op == "placeholder":
                # An argument that is no parameter, but of the shape of one, is treated alike. What is written has no cast to make again.
                if node not in written and self._is_shaped(node.meta.get("val")):
                    parameters.add(node)
            elif node.args and node.args[0] in parameters:
                if node.target in (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default):
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                elif getattr(node.target, "is_view", False):
                    parameters.add(node)

    def _is_shaped(self, value: Any) -> bool:
        """Whether it has the shape of a parameter. Shapes that are symbols are not compared, which would make numbers of them."""
        shape = tuple(getattr(value, "shape", ()))
        return all(type(size) is int for size in shape) and shape in self._shapes

    def uuid(self) -> Any:
        """What tells graphs on disk that this has made from others; None: they are not kept there."""
        theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self._others]
        return None if None in theirs else (get_hash_for_files((__file__,)), self._shapes, *theirs)

    def patch(self) -> Any:
        """A `with` in which graphs are made so."""
        before = torch._inductor.config.joint_custom_post_pass
        if isinstance(before, MadeAgain):
            self._others = before._others
        elif isinstance(before, (list, tuple)):
            self._others = tuple(before)
        else:
            self._others = () if before is None else (before,)
        return torch._inductor.config.patch(joint_custom_post_pass=self)


def _writes(target: Any) -> bool:
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


class Casts(Mode):
    """Notes, while it is active, which tensors are casts of parameters or of views of them. Autocast's own cache, which
    would hold a copy of every parameter until its end, is off meanwhile."""

    def __init__(self, by_storage: Mapping[int, Home], made_again: MadeAgain) -> None:
        super().__init__()
        self._homes, self._made_again = by_storage, made_again
        self._casts: dict[int, tuple[StorageWeakRef, int, Cast]] = {}  # each with the version that it had
        self._cached = False
        self._patch: Any = None

    def __enter__(self) -> Any:
        self._cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._patch = self._made_again.patch()
        self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.__exit__(*error)
        torch.set_autocast_cache_enabled(self._cached)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and has_memory(args[0]) and result.layout == torch.strided:
            home = self._homes.get(storage_of(args[0]))
            if home is not None and result.storage_offset() == 0:
                cast = Cast(home, View.of(args[0]), View.of(result))
                self._casts[storage_of(result)] = (StorageWeakRef(result.untyped_storage()), result._version, cast)
        if self._casts and _writes(func):
            for tensor in written_by(func, args, kwargs or {}):
                if has_memory(tensor) and tensor.layout == torch.strided:
                    self._casts.pop(storage_of(tensor), None)
        return result

    def find(self, tensor: torch.Tensor) -> Cast | None:
        """The cast that the tensor is, or is a view of. A tensor that was written to since is no cast."""
        made, version, cast = self._casts.get(storage_of(tensor), (None, 0, None))
        return cast if made is not None and not made.expired() and tensor._version == version else None
