"""The Python package on a GPU: the bits of the CPU's engine, and errors that say what to do."""

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import sluice
from support import fake_gpu
from support.sluice_package import GROUPS, LIBRARY, UNITS, gradient_of, make_engine, set_start, train, values_of
from support.sluice_process import PACKAGE


def floats_at(address, shape):
    """The array at an address of the fake GPU's memory, which the CPU shares."""
    array = (ctypes.c_float * int(np.prod(shape, dtype=int))).from_address(address)
    return np.frombuffer(array, np.float32).reshape(shape)


def make_device_engine(disk=None, **options):
    given = {"memory": "4GiB", "reserved": "64MiB", "optimizer": GROUPS, "device_memory": "128MiB"}
    given |= {"device_facts": fake_gpu.FACTS} | options
    return sluice.DeviceEngine(UNITS, sluice.Options(disk=disk, **given))


def add_device_gradients(engine, u):
    with engine.acquire(UNITS[u].name, gradient=True):
        for p in UNITS[u].parameters:
            gradient = np.asarray(gradient_of(floats_at(engine.address(p.name), p.shape), u))
            engine.add_gradient(p.name, gradient.ctypes.data)


def train_on_device(engine, steps):
    for _ in range(steps):
        engine.begin_step()
        for unit in UNITS:
            engine.acquire(unit.name).release()
        for u in reversed(range(len(UNITS))):
            add_device_gradients(engine, u)
        engine.step(clip=0.5)


@pytest.mark.parametrize("place", ["device", "memory", "disk", None])
def test_a_gpu_gives_the_bits_of_the_cpu(tmp_path, place):
    with make_engine() as engine:
        set_start(engine)
        train(engine, 3, clip=0.5)
        expected = values_of(engine)
    with fake_gpu.shared(seed=2), make_device_engine(tmp_path, place=place) as engine:
        set_start(engine)
        train_on_device(engine, 3)
        assert values_of(engine) == expected


@pytest.mark.parametrize("updates", ["cpu", "gpu"])
def test_whatever_updates_gives_the_bits_of_the_cpu(tmp_path, updates):
    with make_engine() as engine:
        set_start(engine)
        train(engine, 3, clip=0.5)
        expected = values_of(engine)
    with fake_gpu.shared(seed=3), make_device_engine(tmp_path, place="memory", updates=updates) as engine:
        assert {unit["updated_by"] for unit in engine.plan()["units"]} == {updates}
        set_start(engine)
        train_on_device(engine, 3)
        assert values_of(engine) == expected
    with pytest.raises(sluice.InvalidArgumentError, match="updates is 'tpu'; it may be 'gpu' or 'cpu'"):
        make_device_engine(updates="tpu")
    with pytest.raises(sluice.InvalidArgumentError, match="device_memory is 0"):
        make_engine(updates=updates)


def test_what_an_engine_says_of_its_gpu(tmp_path):
    with fake_gpu.shared(), make_device_engine(tmp_path, place="device", device_reserved="16MiB") as engine:
        assert engine.device()["name"] == "fake GPU"
        plan = engine.plan()
        assert plan["budget"]["device"] == 128 << 20
        assert {unit["state"] for unit in plan["units"]} == {"device"}
        taken = {line.purpose: line.current for line in engine.ledger() if line.tier == "device"}
        assert taken["base"] == 16 << 20
        assert taken["total"] == plan["device"]
        with pytest.raises(sluice.StateError, match="address()"):
            engine.parameter("scale")
        with pytest.raises(sluice.StateError, match="gradient_into()"):
            engine.gradient("scale")


def test_a_gradient_is_written_where_the_caller_says():
    with fake_gpu.shared(schedule="late"), make_device_engine() as engine:
        set_start(engine)
        engine.begin_step()
        add_device_gradients(engine, 2)
        engine.multiply_gradient("last.weight", 0.5)
        found = np.zeros((60, 1000), np.float32)
        engine.gradient_into("last.weight", found.ctypes.data)
        with engine.acquire("unit.2"):
            values = floats_at(engine.address("last.weight"), (60, 1000))
            assert np.array_equal(found, gradient_of(values, 2) * np.float32(0.5))
        engine.abandon_step()


def test_an_engine_without_addresses_refuses_a_gpu():
    with pytest.raises(sluice.InvalidArgumentError, match="DeviceEngine"):
        make_engine(device_memory="1GiB")


def planned(**options):
    return sluice.plan(UNITS, sluice.Options(memory="4GiB", optimizer=GROUPS, **options))


def test_a_plan_for_a_gpu_needs_none():
    plan = planned(device_memory="128MiB", device_facts=dataclasses.replace(fake_gpu.FACTS, base="16MiB"))
    assert 0 < plan["device"] <= 128 << 20
    assert plan["bytes"]["device"]["base"] == 16 << 20
    with pytest.raises(sluice.BudgetError, match="device_memory="):
        planned(device_memory="1MiB")
    assert planned(device_memory="1GiB")["rates"]["known"] == "assumed"


def test_what_one_engine_measures_another_may_be_told(tmp_path):
    with fake_gpu.shared():
        with make_device_engine(tmp_path, device_facts=None) as engine:
            measured, plan = engine.facts(), engine.plan()
            assert plan["rates"]["known"] == "measured" and plan["step"]["compute_seconds"] is None
        with make_device_engine(tmp_path, device_facts=measured) as engine:
            told = engine.plan()
            assert engine.facts() == measured and told["rates"] == plan["rates"] | {"known": "stated"}
            assert told["step"]["link_seconds"] == pytest.approx(plan["step"]["link_seconds"], rel=0.5)
    stated = planned(device_memory="128MiB", device_facts=dataclasses.replace(fake_gpu.FACTS, base="16MiB", computing=2.5))
    assert stated["step"]["compute_seconds"] == 2.5 <= stated["step"]["seconds"]
    for bad, words in ((5e9, "sluice.DeviceFacts"), (sluice.DeviceFacts("fast", 1, 1, 1, 1, 0), "'fast'")):
        with pytest.raises(sluice.InvalidArgumentError, match=words):
            planned(device_memory="1GiB", device_facts=bad)
    with pytest.raises(sluice.InvalidArgumentError, match="from_gpu is 0"):
        planned(device_memory="1GiB", device_facts=sluice.DeviceFacts(1, 0, 1, 1, 1, 0))


def libraries_with(folder, kernels):
    """A folder of the libraries, with another file of kernels, or with none."""
    for name in ("libsluice_c.so", "libsluice_cuda.so"):
        shutil.copy(LIBRARY.parent / name, folder / name)
    if kernels is not None:
        (folder / "libsluice_kernels.fatbin").write_bytes(kernels)
    return folder


PROGRAM = """
import sluice
from support import fake_gpu
fake_gpu.share_memory()
unit = sluice.Unit("unit", [sluice.Parameter("weight", (1000, 1000))])
try:
    sluice.DeviceEngine([unit], sluice.Options(memory="4GiB", device_memory="128MiB"))
except (sluice.NotFoundError, sluice.CorruptError) as error:
    print(error)
"""


@pytest.mark.parametrize("kernels, words", [
    (lambda own: b"0" * 64 + b"of other sources", "are of another build"),
    (lambda own: None, "kernels are missing"),
    (lambda own: own[:-1000], "are damaged"),
    (lambda own: own[:70], "are damaged"),
    (lambda own: own[:64], "are damaged"),
])  # fmt: skip
def test_kernels_that_are_not_those_of_this_build_are_refused(tmp_path, kernels, words):
    if not fake_gpu.KERNELS.exists():
        pytest.skip("the GPU's kernels are not built")
    places = [str(PACKAGE), str(PACKAGE.parents[1] / "tests" / "python")]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60,
        env=os.environ | {"SLUICE_LIBRARY_PATH": str(libraries_with(tmp_path, kernels(fake_gpu.KERNELS.read_bytes()))), "PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    path = tmp_path / "libsluice_kernels.fatbin"
    for word in (words, str(path), "install the wheel again", f"`scripts/kernels.sh {path}`"):
        assert word in found.stdout, found.stdout


def test_a_driver_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setenv("SLUICE_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    with pytest.raises(sluice.NotFoundError, match="580 or later, or do without a GPU"):
        make_device_engine()
