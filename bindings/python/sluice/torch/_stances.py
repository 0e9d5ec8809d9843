"""What torch.compile() does not compile of wrapped models, and what it does while each of their operations must be seen."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
import torch._dynamo

from . import _absent

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[..., None]


def outside_of_graphs(function: Function) -> Function:
    """The same function, at which graphs of torch.compile() break, and which is compiled nowhere."""
    made: Function = torch.compiler.disable(
        function,
        reason="the parameters of a wrapped model come and go between operations, so it is no whole graph; compile its "
        "blocks instead, before sluice.torch.wrap() (model.blocks[i] = torch.compile(model.blocks[i])), or the model "
        "without fullgraph=True",
    )
    return made


def _one_by_one(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The backend of torch.compile() with which modes see a graph's operations. flex_attention alone would then take memory for all
    scores, so what the user compiles of it, without parameters, is compiled."""
    attention = torch.ops.higher_order.flex_attention
    if (
        any(node.target is attention for node in graph.graph.nodes)
        and not any(isinstance(each, torch.nn.Parameter) for each in inputs)
        and not _is_called_by("torch.nn.attention")
    ):
        made: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        return made
    return graph.forward


def _is_called_by(package: str) -> bool:
    """Whether the compiled function, for which there is no graph yet, was called by this part of PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is not None and caller.f_globals.get("__name__", "").startswith(package)


# Functions that are compiled run as they are written. Operators with bodies (torch.cond) lose gradients of what these use besides
# their operands, so that this is for runs without results.
_EAGER: dict[str, Any] = {"stance": "force_eager"}
# Functions are compiled into graphs, of which PyTorch does one operation after another. Without a graph such an operator would
# not know all that its bodies use.
_SEEN: dict[str, Any] = {"stance": "default", "force_backend": _one_by_one}

# The stance is the whole process's. So it is noted who asks for what, as long as they live, and the last one brings the user's back.
_lock = threading.RLock()  # the collector may end who asks at any time
_asked: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_users: Any = None  # what brings the user's stance back


def see(asks: object) -> None:
    """From now on graphs of torch.compile() consist of operations that modes see, until end_seeing() with the same object, or its
    end. Not inside of a graph."""
    with _lock:
        _asked[asks] = _SEEN
        _follow()
    weakref.finalize(asks, _follow).atexit = False


def end_seeing(asks: object) -> None:
    """Ends see(); without it nothing happens."""
    with _lock:
        if _asked.pop(asks, None) is not None:
            _follow()


class _Asks:
    """Who asks that nothing is compiled."""


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Inside of the `with` nothing is compiled, in no thread."""
    asks = _Asks()
    with _lock:
        _asked[asks] = _EAGER
        _follow()
    try:
        yield
    finally:
        with _lock:
            del _asked[asks]
            _follow()


def _follow() -> None:
    global _users
    with _lock:
        asked = list(_asked.values())
        _absent.see_graphs(_SEEN in asked)
        if asked:
            set_now = torch.compiler.set_stance(**(_EAGER if _EAGER in asked else _SEEN))
            _users = _users or set_now
        elif _users is not None:
            users, _users = _users, None
            users.__exit__(None, None, None)
