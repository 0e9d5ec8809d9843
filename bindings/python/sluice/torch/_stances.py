"""What torch.compile() does not compile of wrapped models, and what it does while each of their operations must be seen."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import DynamoStance, innermost_backend
from torch._dynamo.symbolic_convert import tls as _thread

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[..., None]


def outside_of_graphs(function: Function) -> Function:
    """The same function, at which graphs of torch.compile() break, and which is compiled nowhere."""
    disabled: Function = torch.compiler.disable(
        function,
        reason="the parameters of a wrapped model come and go between operations, so it is no whole graph; compile its "
        "blocks instead, before sluice.torch.wrap() (model.blocks[i] = torch.compile(model.blocks[i])), or the model "
        "without fullgraph=True",
    )

    @functools.wraps(disabled)  # with what tells torch.compile() that it is disabled
    def made(*args: Any, **kwargs: Any) -> Any:
        # Where no frame is compiled in this thread, `disabled` changes nothing, and takes ten times as long.
        return function(*args, **kwargs) if get_eval_frame_callback() is None else disabled(*args, **kwargs)

    made._torchdynamo_wrapper_id = id(made)  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]


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


@torch._dynamo.assume_constant_result
def graph_is_seen() -> bool:
    """Whether a graph is being made in this thread of which PyTorch will do one operation after another, so that modes see them."""
    made_by = getattr(_thread, "current_tx", None)
    return made_by is not None and innermost_backend(made_by.output.compiler_fn) is _one_by_one


def is_traced() -> bool:
    """Whether PyTorch traces in this thread, for torch.compile() or torch.export(). torch.compiler.is_compiling() is true in all threads
    meanwhile. Within a graph torch.compiler.is_dynamo_compiling() says it, which is a constant there, and false everywhere else."""
    return torch._guards.detect_fake_mode() is not None


EAGER = DynamoStance("force_eager")
"""Functions that are compiled run as they are written. Operators with bodies (torch.cond) lose gradients of what these use besides
their operands, so that this is for runs without results."""

SEEN = DynamoStance(backend=_one_by_one)
"""Functions are compiled into graphs, of which PyTorch does one operation after another. Without a graph such an operator would
not know all that its bodies use."""
