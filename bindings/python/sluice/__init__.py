"""Sluice: a model's parameters, gradients and optimizer state in stated memory and on disk.

    import sluice

    units = [sluice.Unit("layer.0", [sluice.Parameter("layer.0.weight", (1024, 1024))])]
    with sluice.Engine(units, sluice.Options(memory="1GiB", disk="/nvme")) as engine:
        engine.set_values("layer.0", {"layer.0.weight": start})
        engine.begin_step()
        with engine.acquire("layer.0", gradient=True):
            gradient = backward(engine.parameter("layer.0.weight"))
            engine.add_gradient("layer.0.weight", gradient)
        engine.step(clip=1.0)

sluice.train() trains the native models, as `sluice train` does. `python -m sluice` is the command line.
"""

from .device import DeviceEngine
from .engine import Engine, Held, plan
from .errors import (
    BudgetError,
    CorruptError,
    Error,
    InternalError,
    InvalidArgumentError,
    LibraryError,
    NotFiniteError,
    NotFoundError,
    StateError,
    SystemIOError,
)
from .model import SPAN_GRAIN, Counters, DeviceFacts, Folder, LedgerLine, Options, Parameter, Sections, StepResult, Unit
from .optimizers import SGD, Adafactor, Adam, AdamW, Lion, Muon, Optimizer
from .ranks import Ranks, Traffic, shared_memory
from .training import TrainResult, train

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "BudgetError",
    "CorruptError",
    "Counters",
    "DeviceEngine",
    "DeviceFacts",
    "Engine",
    "Error",
    "Folder",
    "Held",
    "InternalError",
    "InvalidArgumentError",
    "LedgerLine",
    "LibraryError",
    "Lion",
    "Muon",
    "NotFiniteError",
    "NotFoundError",
    "Optimizer",
    "Options",
    "Parameter",
    "Ranks",
    "SPAN_GRAIN",
    "Sections",
    "StateError",
    "StepResult",
    "SystemIOError",
    "Traffic",
    "TrainResult",
    "Unit",
    "plan",
    "shared_memory",
    "train",
]
