"""The engine's memory as tensors, and tensors as memory for the engine."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclasses.dataclass
class Home:
    """Where a parameter lives: its unit, its address in the engine, and the tensor over that memory."""

    name: str
    index: int  # of the engine's parameters
    unit: int
    group: int  # of the optimizer's settings
    parameter: torch.nn.Parameter
    memory: torch.Tensor
    trainable: bool

    @property
    def version(self) -> int:
        """Another one when its values were changed, by a step or by the user."""
        return self.parameter._version

    def changed(self) -> None:
        """Its values are others now: backward through a graph that was made before is an error, as in PyTorch."""
        torch.autograd.graph.increment_version(self.parameter)

    @property
    def replaced(self) -> bool:
        """Whether somebody gave the parameter other memory."""
        return self.parameter.data_ptr() != self.memory.data_ptr()


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the engine's memory; it does not keep that alive, and touches none of it."""
    elements = 1
    for length in shape:
        elements *= length
    item = torch.empty((), dtype=dtype).element_size()
    raw = (ctypes.c_char * (elements * item)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU. Valid as long as the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def floats_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in f32, contiguous, on the CPU: itself where that is so already."""
    return tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()


def storage_of(tensor: Any) -> int:
    """Which memory a tensor lies in."""
    return int(tensor.untyped_storage().data_ptr())
