"""The Python package on a GPU: the bits of the CPU's engine, and errors that say what to do."""

import concurrent.futures
import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import sluice
from sluice.ranks import Ranks, shared_memory
from support import fake_gpu, warm_python
from support.sluice_package import GROUPS, LIBRARY, UNITS, gradient_of, make_engine, set_start, train, values_of
from support.sluice_process import PACKAGE, TESTS


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


@pytest.fixture(scope="module")
def of_the_cpu():
    with make_engine() as engine:
        set_start(engine)
        train(engine, 3, clip=0.5)
        return values_of(engine)


@pytest.mark.parametrize("options", [
    {"place": "device"}, {"place": "disk"}, {}, {"place": "memory", "updates": "cpu"}, {"place": "memory", "updates": "gpu"},
], ids=lambda options: "-".join(options.values()))  # fmt: skip
def test_a_gpu_gives_the_bits_of_the_cpu(tmp_path, of_the_cpu, options):
    with fake_gpu.shared(seed=2), make_device_engine(tmp_path, **options) as engine:
        assert "updates" not in options or {unit["updated_by"] for unit in engine.plan()["units"]} == {options["updates"]}
        set_start(engine)
        train_on_device(engine, 3)
        assert values_of(engine) == of_the_cpu


def run_on_ranks(run):
    """Returns the results of run(rank, ranks) on each of two ranks, which are threads."""
    descriptor = shared_memory(2)

    def work(rank):
        ranks = Ranks.local(descriptor, rank)
        try:
            return run(rank, ranks)
        except BaseException as error:
            ranks.fail(str(error))
            raise
        finally:
            ranks.close()

    try:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, range(2)))
    finally:
        os.close(descriptor)


def test_ranks_on_gpus_have_the_bits_of_ranks_on_the_cpu(tmp_path):
    def on_the_cpu(rank, ranks):
        with make_engine(ranks=ranks, stage=1, threads=1) as engine:
            set_start(engine)
            train(engine, 3, clip=0.5)
            return values_of(engine)

    def on_a_gpu(rank, ranks):
        with make_device_engine(tmp_path, ranks=ranks, stage=1, threads=1, device=rank, place=("memory", "disk")[rank]) as engine:
            set_start(engine)
            train_on_device(engine, 3)
            return values_of(engine)

    with fake_gpu.shared(seed=3, devices=2):
        assert run_on_ranks(on_a_gpu) == run_on_ranks(on_the_cpu)


def gpus_of_ranks(tmp_path, *of_ranks):
    """The index of the GPU of each rank, which has these options, or the error."""

    def run(rank, ranks):
        try:
            with make_device_engine(tmp_path, ranks=ranks, **{"threads": 1} | of_ranks[rank]) as engine:
                return engine.device()["index"]
        except sluice.Error as error:
            return f"{type(error).__name__}: {error}"

    with fake_gpu.shared(devices=2):
        return run_on_ranks(run)


ON_ONE = r"InvalidArgumentError: ranks 0, 1 of one host are on one GPU \(0000:1b:00.0, 'fake GPU'\); .*options.device.*LOCAL_RANK.*device_facts"
UNNAMED, FIRST, MEASURED = {}, {"device": 0}, {"device": 0, "device_facts": None}


@pytest.mark.parametrize("local_rank, of_ranks, found", [
    ("1", [FIRST, UNNAMED], [0, 1]), ("1", [UNNAMED, FIRST], [1, 0]), (None, [FIRST, {"device": 1}], [0, 1]), (None, [FIRST, FIRST], [0, 0]),
    (None, [UNNAMED, UNNAMED], ON_ONE), ("0", [UNNAMED, FIRST], ON_ONE), (None, [FIRST, UNNAMED], ON_ONE), (None, [FIRST, MEASURED], ON_ONE),
    ("2", [UNNAMED, UNNAMED], "InvalidArgumentError: options.device names no GPU, so that it is GPU 2 .*LOCAL_RANK=2, and this process sees 2 GPUs"),
])  # fmt: skip
def test_a_rank_has_the_gpu_that_it_names_or_that_of_its_place_and_shares_none_unasked(tmp_path, monkeypatch, local_rank, of_ranks, found):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    gpus = gpus_of_ranks(tmp_path, *of_ranks)
    assert gpus == found if isinstance(found, list) else all(re.match(found, text) for text in gpus), gpus


def test_a_process_alone_has_the_first_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with fake_gpu.shared(devices=2), make_device_engine(tmp_path) as engine:
        assert engine.device()["index"] == 0


@pytest.mark.parametrize("second, says", [
    ({"device_facts": None}, None), ({}, None), ({"memory": "100MiB"}, "BudgetError: .*|BudgetError: rank 1 could not make its engine: .*"),
])  # fmt: skip
def test_ranks_measure_together_whatever_another_does(tmp_path, second, says):
    given = {"device_facts": None, "device_memory": "900MiB"}
    found = gpus_of_ranks(tmp_path, given | {"device": 0}, {"device_memory": "900MiB", "device": 1} | second)
    assert found == [0, 1] if says is None else all(re.match(says, text) for text in found), found


def test_ranks_measure_each_rate_at_the_same_time(tmp_path):
    """Rank 0 waits after its first measurement of the CPU's loops for rank 1, and measures others then."""
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    loops = [], []  # by rank, when each of its loops ended
    has_measured = threading.Event()  # of rank 0, and its first loop

    def team_of(rank):
        def run(loop, data, threads, flags):
            if rank == 1 and not loops[1]:
                assert has_measured.wait(60)
                time.sleep(1)  # in which rank 0 would go on
            work(loop)(data)
            loops[rank].append(time.monotonic())
            if rank == 0:
                has_measured.set()

        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(run)

    teams = [team_of(rank) for rank in range(2)]
    given = {"device_facts": None, "device_memory": "900MiB", "threads": 2}
    options = [given | {"device": rank, "team": ctypes.cast(team, ctypes.c_void_p).value} for rank, team in enumerate(teams)]
    assert gpus_of_ranks(tmp_path, *options) == [0, 1]
    before = [moment for moment in loops[0] if moment < loops[1][0]]
    assert 0 < len(before) < len(loops[0])


def test_a_plan_has_shards_of_parameters_on_disk_where_gpus_compute(tmp_path):
    units = [sluice.Unit("layer", [sluice.Parameter("weight", [4096, 1024])])]

    def planned(place, stage=3, **asked):
        given = {"device_facts": fake_gpu.FACTS, "planned": (0, 2), "stage": stage, "disk": tmp_path, "place": place} | asked
        return sluice.plan(units, sluice.Options(memory="4GiB", device_memory="1GiB", **given))

    for place, state in (("disk", "disk"), ({"parameters": "disk"}, "memory"), ({"parameters": "disk", "state": "disk"}, "disk")):
        plan = planned(place)
        unit = plan["units"][0]
        assert [unit[key] for key in ("parameters", "shard", "state", "updated_by")] == ["ranks", "disk", state, "cpu"]
        shard = 4096 * 1024 * 4 // 2
        read, apart, written = (plan["step"][f"bytes_{key}"] for key in ("read", "read_apart", "written"))
        assert read >= 2 * shard and apart >= read + shard and written >= shard  # at least a fetch, and the update
    assert planned({"parameters": "disk"}, stage=1)["units"][0]["parameters"] == "disk"
    assert planned({"state": "disk"}, updates="cpu")["units"][0]["shard"] == "memory"
    with pytest.raises(sluice.InvalidArgumentError, match="updates on the GPU are asked for at stage 3, .* asked to be on disk"):
        planned({"parameters": "disk"}, updates="gpu")


def test_a_plan_joins_ranks_by_gpus_where_it_is_stated_how_fast():
    units = [sluice.Unit("layer", [sluice.Parameter("weight", [4096, 1024])])]

    def links(ranks, between=0.0, **asked):
        facts = dataclasses.replace(fake_gpu.FACTS, between_gpus=between)
        options = sluice.Options(memory="4GiB", device_memory="1GiB", device_facts=facts, planned=(0, ranks), stage=1, **asked)
        return sluice.plan(units, options)["links"]

    assert links(2) == links(2, 1e11, links="host") == links(17, 1e11) == "host"  # a GPU adds up what 16 have
    assert links(2, 1e11) == links(16, 1e11, links="gpus") == "gpus"
    assert links(2, 1e8) == "host" and links(2, 1e8, links="gpus") == "gpus"  # the host's memory is faster
    for ranks, between in ((2, 0.0), (17, 1e11)):
        with pytest.raises(sluice.InvalidArgumentError, match="2 to 16 ranks on one host, with options.device_facts.between_gpus"):
            links(ranks, between, links="gpus")


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


def test_what_is_stated_of_a_gpu_is_planned_with_or_refused():
    """That measured facts may be stated to another engine is in tests/bindings/c/device_test.cc."""
    stated = planned(device_memory="128MiB", device_facts=dataclasses.replace(fake_gpu.FACTS, base="16MiB", computing=2.5))
    assert stated["step"]["compute_seconds"] == 2.5 <= stated["step"]["seconds"]
    for bad, words in (
        (5e9, "sluice.DeviceFacts"), (sluice.DeviceFacts("fast", 1, 1, 1, 1, 0), "'fast'"), (sluice.DeviceFacts(1, 0, 1, 1, 1, 0), "from_gpu is 0"),
    ):  # fmt: skip
        with pytest.raises(sluice.InvalidArgumentError, match=words):
            planned(device_memory="1GiB", device_facts=bad)


# Opens a GPU with each of the files that are named, in turn, as the file of kernels, and prints what is said of it.
PROGRAM = """
import json, os, shutil, sys
import sluice
from support import fake_gpu, warm_python
fake_gpu.share_memory()
unit = sluice.Unit("unit", [sluice.Parameter("weight", (1000, 1000))])
kernels, *others = sys.argv[1:]
told = []
for other in others:
    shutil.copy(other, kernels) if os.path.exists(other) else os.remove(kernels)
    try:
        sluice.DeviceEngine([unit], sluice.Options(memory="4GiB", device_memory="128MiB"))
        told.append("")
    except (sluice.NotFoundError, sluice.CorruptError) as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_kernels_that_are_not_those_of_this_build_are_refused(tmp_path):
    fake_gpu.require_built()
    own = fake_gpu.KERNELS.read_bytes()
    files = {"other": b"0" * 64 + b"of other sources", "cut": own[:-1000], "beginning": own[:70], "empty": own[:64]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("libsluice_c.so", "libsluice_cuda.so"):
        shutil.copy(LIBRARY.parent / name, tmp_path / name)
    path = tmp_path / "libsluice_kernels.fatbin"
    words = {"other": "are of another build", "none": "kernels are missing", "cut": "are damaged", "beginning": "are damaged", "empty": "are damaged"}
    found = subprocess.run(
        [warm_python.executable(), "-c", PROGRAM, path, *(tmp_path / name for name in words)], capture_output=True, text=True, timeout=60,
        env=os.environ | {"SLUICE_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, TESTS)))},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    for name, told in zip(words, json.loads(found.stdout), strict=True):
        for word in (words[name], str(path), "install the wheel again", f"`scripts/kernels.sh {path}`"):
            assert word in told, (name, told)


def test_a_driver_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setenv("SLUICE_CUDA_DRIVER", "/nowhere/libcuda.so.1")
    with pytest.raises(sluice.NotFoundError, match="580 or later, or do without a GPU"):
        make_device_engine()


def test_nccl_of_nvidias_package_is_found(tmp_path):
    """A library with its name, which the process then has."""
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    built = ["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-Wl,-soname,libnccl.so.2", "-o", str(folder / "libnccl.so.2")]
    subprocess.run(built, check=True)
    looks = "import ctypes, os, sluice._library as l; l.load_nccl(); ctypes.CDLL('libnccl.so.2', mode=os.RTLD_NOLOAD)"
    clean = {name: value for name, value in os.environ.items() if name != "SLUICE_NCCL"}
    for path, found in ((str(tmp_path), True), ("/nowhere", False)):
        given = clean | {"PYTHONPATH": os.pathsep.join([path, str(PACKAGE)])}
        done = subprocess.run([sys.executable, "-S", "-c", looks], env=given, capture_output=True, text=True)
        assert (done.returncode == 0) == found, done.stderr
