"""Modes of PyTorch that see each operation of their thread, and what torch.compile() does not compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._python_dispatch import TorchDispatchMode

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[..., None]


class Mode(TorchDispatchMode):
    """A mode of its thread under which functions are compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise nothing is compiled while it is active, nothing that was compiled before is used, and what PyTorch is to compile
        then it never compiles."""
        return True


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
