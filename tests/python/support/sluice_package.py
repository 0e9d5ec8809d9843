"""A client of the Python package: a model of three units whose gradients depend on its values, so that a wrong byte
changes all that follows."""

import os
from pathlib import Path

import numpy as np
import pytest
from support import sluice_process  # noqa: F401 (it names the library)

import sluice

LIBRARY = Path(os.environ["SLUICE_LIBRARY_PATH"]) / "libsluice_c.so"
if not LIBRARY.exists():
    pytest.skip(f"{LIBRARY} is not built", allow_module_level=True)

UNITS = [
    sluice.Unit("unit.0", [sluice.Parameter("first.weight", (30, 1000)), sluice.Parameter("first.bias", (1000,), 1)]),
    sluice.Unit("unit.1", [sluice.Parameter("middle.weight", (700, 1000)), sluice.Parameter("scale", (), 1)]),
    sluice.Unit("unit.2", [sluice.Parameter("last.weight", (60, 1000))]),
]
GROUPS = [sluice.AdamW(lr=0.01, weight_decay=0.1), sluice.AdamW(lr=0.02, weight_decay=0.0)]


def make_engine(disk=None, **options):
    given = {"memory": "4GiB", "reserved": "64MiB", "optimizer": GROUPS, "threads": 2} | options
    return sluice.Engine(UNITS, sluice.Options(disk=disk, **given))


def start_of(unit):
    generator = np.random.default_rng(len(unit.parameters) + UNITS.index(unit))
    return {p.name: generator.uniform(-0.5, 0.5, p.shape).astype(np.float32) for p in unit.parameters}


def set_start(engine):
    for unit in UNITS:
        engine.set_values(unit.name, start_of(unit))


def widened(view, dtype):
    """The values that parameter() returns, in f32."""
    values = np.asarray(view)
    if dtype == "f16":
        return values.view(np.float16).astype(np.float32)
    return values if dtype == "f32" else (values.astype(np.uint32) << 16).view(np.float32)


def gradient_of(values, unit):
    return np.float32(0.1) * values + np.float32(0.01) * np.float32(unit)


def add_gradients(engine, u):
    with engine.acquire(UNITS[u].name, gradient=True):
        for parameter in UNITS[u].parameters:
            engine.add_gradient(parameter.name, gradient_of(widened(engine.parameter(parameter.name), engine.options.dtype), u))


def train(engine, steps, **settings):
    """Does steps, each of which uses the units forward, then backward with gradients."""
    for _ in range(steps):
        engine.begin_step()
        for unit in UNITS:
            engine.acquire(unit.name).release()
        for u in reversed(range(len(UNITS))):
            add_gradients(engine, u)
        engine.step(**settings)


def values_of(engine):
    return {name: bytes(values) for unit in UNITS for name, values in engine.get_values(unit.name).items()}


def start_values():
    return {name: values.tobytes() for unit in UNITS for name, values in start_of(unit).items()}
