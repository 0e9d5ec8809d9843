"""Casts of parameters by autocast: autograd keeps references to them, and they are made again in backward."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.multiprocessing.reductions import StorageWeakRef

from ._absent import storage_of
from ._homes import Home, View, has_memory, written_by
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


_library = torch.library.Library("sluice", "DEF")
_library.define("cast(Tensor source, ScalarType dtype) -> Tensor")
_library.impl("cast", lambda source, dtype: torch.ops.aten._to_copy.default(source, dtype=dtype), "CompositeExplicitAutograd")
_CAST = torch.ops.sluice.cast.default
_CASTS = (_CAST, torch.ops.aten._to_copy.default)
# Views that are not the same ones of a cast and of its source, or are larger than what they are views of.
_OTHER_THAN_OF_ELEMENTS = (torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype, torch.ops.aten.expand.default)
_OF_AUTOCAST = (torch.bfloat16, torch.float16, torch.float32)  # to other types operations and compilers may not round alike


class SeenCasts(CustomGraphPass):
    """Lets graphs of torch.compile() that are made by its backend "inductor" make the casts that they keep for backward by an operation
    that modes see. By themselves they make them in kernels of their own, and nobody sees what these are casts of. Whether that is a
    parameter is asked at each call: one graph may have a parameter in one call and another tensor in the next."""

    def __init__(self, others: tuple[Any, ...]) -> None:
        """others: the user's own passes, which come first."""
        self._others = others

    def __call__(self, graph: torch.fx.Graph) -> None:
        for other in self._others:
            other(graph)
        output = next(iter(reversed(graph.nodes)))
        shown = output.meta.get("user_visible_output_idxs")
        if shown is None:
            return
        written = {node.args[0] for node in graph.nodes if node.args and _writes(node.target)}
        results = list(output.args[0])
        for index, kept in enumerate(results):
            # What the user sees may be written where no mode sees it, as in another graph.
            if index not in shown and (views := _views_of_cast(kept)) is not None and _argument(views[0].args[0]) not in written:
                with graph.inserting_before(output):
                    results[index] = _made_by_cast(graph, views)
        output.args = (tuple(results),)

    def uuid(self) -> Any:
        """What tells graphs on disk that this has made from others; None: they are not kept there."""
        theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self._others]
        return None if None in theirs else (get_hash_for_files((__file__,)), *theirs)


def _views_of_cast(node: Any) -> list[torch.fx.Node] | None:
    """The cast of an argument, or of a view of one, and the views of it that lead to the node, which may be the cast itself."""
    views = []
    while _is_view(node) and node.target not in _OTHER_THAN_OF_ELEMENTS:
        views.append(node)
        node = node.args[0]
    is_cast = isinstance(node, torch.fx.Node) and node.target is torch.ops.prims.convert_element_type.default
    if not is_cast or node.args[1] not in _OF_AUTOCAST or _argument(node.args[0]) is None:
        return None
    return [node, *reversed(views)]


def _argument(node: Any) -> torch.fx.Node | None:
    """The argument of the graph that a node is, or is a view of."""
    while _is_view(node):
        node = node.args[0]
    return node if node.op == "placeholder" else None


def _is_view(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and (node.target is operator.getitem or getattr(node.target, "is_view", False))


def _made_by_cast(graph: torch.fx.Graph, views: list[torch.fx.Node]) -> torch.fx.Node:
    """The last of the views, made by _CAST out of the same view of the cast's source, so that it is a tensor of its own."""
    cast = views[0]
    source: Any = cast.args[0]
    for view in views[1:]:
        source = graph.call_function(view.target, (source, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
    return graph.call_function(_CAST, (source, cast.args[1]))


def _seen_casts() -> Any:
    """A `with` in which this thread's graphs are made so."""
    before = torch._inductor.config.post_grad_custom_post_pass
    others = tuple(before) if isinstance(before, (list, tuple)) else () if before is None else (before,)
    return torch._inductor.config.patch(post_grad_custom_post_pass=SeenCasts(others))


def _writes(target: Any) -> bool:
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


class Casts(Mode):
    """Notes, while it is active, which tensors are casts of parameters or of views of them. Autocast's own cache, which
    would hold a copy of every parameter until its end, is off meanwhile."""

    def __init__(self, by_storage: Mapping[int, Home]) -> None:
        super().__init__()
        self._homes = by_storage
        self._casts: dict[int, tuple[StorageWeakRef, int, Cast]] = {}  # each with the version that it had
        self._cached = False
        self._patch: Any = None

    def __enter__(self) -> Any:
        self._cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._patch = _seen_casts()
        self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.__exit__(*error)
        torch.set_autocast_cache_enabled(self._cached)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and has_memory(args[0]) and result.layout == torch.strided:
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
        if not self._casts:
            return None
        made, version, cast = self._casts.get(storage_of(tensor), (None, 0, None))
        return cast if made is not None and not made.expired() and tensor._version == version else None
