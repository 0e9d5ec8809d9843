"""The engine on a GPU, whose arrays are given by addresses."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from typing import Any, ClassVar, NoReturn

from . import _make
from .engine import Engine
from .errors import StateError
from .model import DeviceFacts


def device_of(engine: Engine) -> dict[str, Any]:
    """Describes the GPU on which an engine computes, its free memory, and the "facts" from which its plan was made; empty where
    the CPU computes."""
    made: dict[str, Any] = json.loads(engine._handle.text("sluice_engine_device") or "{}")
    return made


def facts_of(engine: Engine) -> DeviceFacts:
    """Returns the facts from which the plan of an engine on a GPU was made."""
    facts = device_of(engine)["facts"]
    return DeviceFacts(**{field.name: facts[field.name] for field in dataclasses.fields(DeviceFacts)})


def predicted(engine: Engine, computing: float) -> dict[str, Any]:
    """Returns the plan of an engine on a GPU, with the predicted time of a step in which the caller computes there for so
    many seconds."""
    made: dict[str, Any] = json.loads(engine._handle.text("sluice_engine_predict", computing))
    return made


class DeviceEngine(Engine):
    """An Engine that computes on a GPU, with Options.device_memory. Values and state are in host memory, as on the CPU;
    parameters and gradients are addresses of contiguous arrays in the GPU's memory.

    The caller queues its work on one stream: work that it queues after acquire() begins when the unit is present, and the
    unit stays present until the work that was queued before release() has ended. No thread waits for either. See
    bindings/c/sluice_device.h."""

    _by_address: ClassVar[bool] = True

    def use_stream(self, stream: int) -> None:
        """States that the caller queues its work on this CUDA stream from now on; 0 is the default stream, which is used
        before the first call."""
        self._handle.call("sluice_engine_use_stream", stream)

    def device(self) -> dict[str, Any]:
        """Describes the GPU on which the engine computes, its free memory, and the "facts" from which its plan was
        made."""
        return device_of(self)

    def facts(self) -> DeviceFacts:
        """The facts from which the plan was made, as measured or stated. Options.device_facts takes them."""
        return facts_of(self)

    def address(self, name: str) -> int:
        """Returns the address of a parameter, which never changes. The values are present while the unit is held."""
        return int(self._handle.ask("sluice_engine_parameter", self._parameter(name)[0], kind=ctypes.c_void_p) or 0)

    def add_gradient(self, name: str, gradient: int, dtype: str = "f32") -> None:
        """Adds a gradient, which is contiguous at this address of the GPU's memory."""
        self._handle.call("sluice_engine_add_gradient", self._parameter(name)[0], gradient, _make.dtype_of(dtype))

    def gradient_into(self, name: str, address: int, dtype: str = "f32") -> None:
        """Writes a parameter's gradient to this address of the GPU's memory, in the order of the caller's stream."""
        self._handle.call("sluice_engine_get_gradient", self._parameter(name)[0], address, _make.dtype_of(dtype))

    def parameter(self, name: str) -> NoReturn:
        """Raises: see address()."""
        raise StateError(f"'{name}' is in a GPU's memory, which has no memoryview; use address()")

    def gradient(self, name: str, dtype: str = "f32") -> NoReturn:
        """Raises: see gradient_into()."""
        raise StateError(f"the gradient of '{name}' is in a GPU's memory, which has no memoryview; use gradient_into()")
