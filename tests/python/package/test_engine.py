"""The Python package takes and gives values of every kind, and finds its library. test_optimizers.py shows that it trains to the same
bits wherever they live."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.sluice_package import (
    GROUPS, LIBRARY, UNITS, make_engine, set_start, start_of, start_values, train, values_of,
)  # fmt: skip
from support.sluice_process import PACKAGE, SLUICE, SOURCE

import sluice


@pytest.mark.parametrize("as_bits", [False, True])
def test_gradients_in_f16_are_those_in_f32(as_bits):
    def run(dtype):
        with make_engine(place="memory") as engine:
            set_start(engine)
            for step in range(3):
                engine.begin_step()
                for unit in UNITS:
                    with engine.acquire(unit.name, gradient=True):
                        for p in unit.parameters:
                            half = np.random.default_rng(step).normal(0, 1e-3, p.shape).astype(np.float16)
                            given = half if dtype == "f16" else half.astype(np.float32)
                            engine.add_gradient(p.name, given.view(np.uint16) if as_bits and dtype == "f16" else given, dtype)
                            assert engine.gradient(p.name, "f16").tobytes() == half.tobytes()
                engine.step(gradient_factor=0.25)
            return values_of(engine)

    assert run("f16") == run("f32") != start_values()


def test_what_is_held_and_which_gradients_there_are_is_asked_of_the_engine():
    with make_engine() as engine:
        set_start(engine)
        name, n = UNITS[1].parameters[0].name, UNITS[1].parameters[0].elements
        assert engine.held_units() == () and not engine.in_step and engine.failure == ""
        engine.begin_step()
        with engine.acquire("unit.1", gradient=True), engine.acquire("unit.1"):
            assert engine.held_units() == ("unit.1",) and engine.in_step and not engine.has_gradient(name)
            engine.add_gradient(name, np.ones(n, np.float32))
            assert engine.has_gradient(name)
        assert engine.held_units() == () and engine.has_gradient(name)
        engine.acquire("unit.1")
        view = engine.parameter(name)
        engine.abandon_step()
        assert engine.held_units() == () and not engine.in_step and not engine.has_gradient(name)
        with pytest.raises(ValueError, match="released"):
            view[0, 0]


def test_a_saved_engine_goes_on_with_the_same_bits(tmp_path):
    out = tmp_path / "out"
    with make_engine(disk=f"{tmp_path}:2GiB", place="disk") as engine:
        assert engine.plan()["budget"]["disk"] == 2 << 30
        set_start(engine)
        train(engine, 2)
        saved = engine.save(out, keep=1)
        at_save = values_of(engine)
        train(engine, 2)
        expected = values_of(engine)
    assert os.path.dirname(saved) == str(out) and at_save != expected
    for path in (saved, out):
        with make_engine(place="memory") as engine:
            engine.load(path)
            assert engine.steps == 2 and values_of(engine) == at_save
            train(engine, 2)
            assert values_of(engine) == expected
    with make_engine() as engine:
        engine.load_values(saved)
        assert engine.steps == 0 and values_of(engine) == at_save


def test_values_from_and_into_every_kind_of_buffer():
    start = start_of(UNITS[1])
    expected = {name: values.tobytes() for name, values in start.items()}
    flat = {name: values.ravel() for name, values in start.items()}

    def fill(name, first, part):
        part[:] = memoryview(flat[name][first : first + len(part)])

    frozen = start["middle.weight"].copy()
    frozen.setflags(write=False)
    with make_engine() as engine:
        for values in (start, expected, fill, {"middle.weight": frozen, "scale": memoryview(start["scale"])}):
            engine.set_values("unit.1", {n: np.zeros_like(v) for n, v in start.items()})
            engine.set_values("unit.1", values)
            assert {n: bytes(v) for n, v in engine.get_values("unit.1").items()} == expected
        into = {name: np.zeros_like(values) for name, values in start.items()}
        engine.get_values("unit.1", into)
        assert {name: values.tobytes() for name, values in into.items()} == expected
        runs = []
        engine.get_values("unit.1", lambda name, first, part: runs.append((name, first, bytes(part))))
        assert b"".join(part for name, _, part in runs if name == "middle.weight") == expected["middle.weight"]
        assert [first for name, first, _ in runs if name == "scale"] == [0]


def test_gradients_in_any_buffer_give_the_same_bits():
    gradient = np.full((700, 1000), 0.25, np.float32)
    frozen = gradient.copy()
    frozen.setflags(write=False)
    halves = (gradient.view(np.uint32) >> 16).astype(np.uint16)
    results = []
    for given, dtype in ((gradient, "f32"), (frozen, "f32"), (gradient.tobytes(), "f32"), (halves, "bf16")):
        with make_engine() as engine:
            set_start(engine)
            engine.begin_step()
            with engine.acquire("unit.1", gradient=True):
                engine.add_gradient("middle.weight", given, dtype)
            engine.step()
            results.append(values_of(engine))
    assert results[0] != start_values()
    assert all(result == results[0] for result in results)


def test_another_thread_goes_on_while_an_engine_works(tmp_path):
    """Calls without callbacks release the GIL, so that another thread runs meanwhile."""
    unit = sluice.Unit("big", [sluice.Parameter("big.weight", (8 << 20,))])
    options = sluice.Options(memory="4GiB", disk=tmp_path, place="disk", threads=1)
    with sluice.Engine([unit], options) as engine:
        zeros = bytes(4 * unit.parameters[0].elements)
        during = {
            "set_values": most_ticks_during(lambda: engine.set_values("big", {"big.weight": zeros})),
            "save": most_ticks_during(lambda: engine.save(tmp_path / "out")),
        }
    assert min(during.values()) >= 10, during


def most_ticks_during(action):
    """A call takes as little as 20 ms, of which another process may have most: one of many calls leaves the other thread time. Where a
    call keeps the GIL, none does."""
    most = 0
    for _ in range(50):
        most = max(most, ticks_during(action))
        if most >= 10:
            break
    return most


def ticks_during(action):
    ticks, done, begun = [0], threading.Event(), threading.Event()

    def tick():
        begun.set()
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    begun.wait()
    before = ticks[0]
    action()
    after = ticks[0]
    done.set()
    thread.join()
    return after - before


def test_the_plan_the_ledger_and_the_trace(tmp_path):
    options = sluice.Options(memory="4GiB", disk=tmp_path, optimizer=GROUPS, place="disk", trace_events=1000)
    plan = sluice.plan(UNITS, options)
    with make_engine(disk=tmp_path, place="disk", trace_events=1000) as engine:
        assert [unit["name"] for unit in plan["units"]] == [unit.name for unit in UNITS]
        assert engine.plan()["units"] == plan["units"]
        set_start(engine)
        train(engine, 1)
        totals = {line.tier: line for line in engine.ledger() if line.purpose == "total"}
        values = sum(parameter.elements for unit in UNITS for parameter in unit.parameters)
        assert 0 < totals["host"].current <= totals["host"].peak <= 4 << 30
        assert totals["disk"].peak > 3 * 4 * values
        engine.save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def python(*words, **environment):
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(PACKAGE)} | environment,
    )  # fmt: skip


def test_importing_needs_nothing():
    code = "import sys, sluice; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert python("-S", "-c", code).stdout == "[]\n"


def test_an_engine_that_is_forgotten_does_not_keep_a_process_from_ending():
    code = (
        "import sluice; e = sluice.Engine([sluice.Unit('u', [sluice.Parameter('w', (9,))])], "
        "sluice.Options(memory='2GiB')); e.set_values('u', {'w': bytes(36)}); h = e.acquire('u'); v = e.parameter('w')"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


# A thread sends Ctrl-C, or SIGTERM, whose handler returns, once the engine has taken a part of its memory.
INTERRUPTED = """
import os, signal, sys, threading, time
import sluice
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # so that one thread populates memory
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(time.monotonic()))
def pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
def send(number, least):
    while pages() < least:
        time.sleep(0.001)
    sent.append(time.monotonic())
    os.kill(os.getpid(), number)
units = [sluice.Unit(str(u), [sluice.Parameter(f"{u}.weight", (16 << 20,))]) for u in range(4)]
options = sluice.Options(memory="2GiB")
before = pages()
for number in (signal.SIGTERM, signal.SIGINT):
    sent, thread = [], threading.Thread(target=send, args=(number, before + (64 << 20) // 4096))
    thread.start()
    try:
        with sluice.Engine(units, options):
            print(int(number), "made", heard[0] - sent[0] < 10, flush=True)
    except KeyboardInterrupt:
        print("interrupted after", (pages() - before) >> 8, "MiB,", time.monotonic() - sent[0] < 10)
    thread.join()
"""


def test_a_signal_is_heard_while_an_engine_takes_its_memory():
    run = python("-c", INTERRUPTED)
    assert (run.returncode, run.stderr) == (0, "")
    made, interrupted = run.stdout.splitlines()
    assert made == "15 made True"
    assert re.fullmatch(r"interrupted after \d\d? MiB, True", interrupted), "memory was kept"


# A thread sends Ctrl-C while the library calls a function that fills in values.
CALLED = """
import os, signal, threading
import sluice
units = [sluice.Unit("u", [sluice.Parameter("w", (32 << 20,))])]
heard = 0
def fill(name, first, elements):
    if first == 0:
        sender.start()
with sluice.Engine(units, sluice.Options(memory="2GiB")) as engine:
    for _ in range(5):
        sender = threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGINT))
        try:
            engine.set_values("u", fill)
            sender.join()  # it may come late
        except KeyboardInterrupt:
            heard += 1
        sender.join()
print(heard)
"""


def test_a_signal_is_heard_while_the_library_calls_a_function():
    run = python("-c", CALLED)
    assert (run.returncode, run.stdout, run.stderr) == (0, "5\n", "")


@pytest.mark.skipif(not SLUICE.exists(), reason="the program is not built")
def test_the_command_line_is_passed_on():
    for words in (["--version"], ["plan", "--model", "no such model"], ["nothing of this name"]):
        expected = subprocess.run([SLUICE, *words], capture_output=True, text=True, timeout=60)
        found = python("-m", "sluice", *words)
        told = expected.stderr.replace("doctor, bench\n", "doctor, bench, tokenize\n")  # the list of all commands
        assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, told)
        assert ("tokenize" in told) == (words == ["nothing of this name"])


def test_a_library_or_a_program_that_is_missing(tmp_path):
    found = python("-c", "import sluice; sluice.plan([], sluice.Options(memory=1))", SLUICE_LIBRARY_PATH=str(tmp_path))
    assert found.returncode == 1 and f"'{tmp_path}/libsluice_c.so'" in found.stderr and "LibraryError" in found.stderr
    (tmp_path / "libsluice_c.so").symlink_to(LIBRARY)
    found = python("-m", "sluice", "doctor", SLUICE_LIBRARY_PATH=str(tmp_path))
    assert found.returncode == 1 and found.stderr.startswith("sluice: error: the program sluice was not found")
    (tmp_path / "libsluice_c.so").unlink()
    (tmp_path / "libsluice_c.so").write_text("no library")
    found = python("-c", "import sluice; sluice.plan([], sluice.Options(memory=1))", SLUICE_LIBRARY_PATH=str(tmp_path))
    assert "could not be loaded" in found.stderr


def test_vectors_no_wider_than_the_environment_says():
    code = "import sluice; sluice.plan([sluice.Unit('u', [sluice.Parameter('w', (9,))])], sluice.Options(memory='2GiB'))"
    for word, status in (("scalar", 0), ("avx3", 1)):
        found = python("-c", code, SLUICE_MAX_TARGET=word)
        assert found.returncode == status, found.stderr
    assert "InvalidArgumentError: SLUICE_MAX_TARGET is 'avx3'; it may be" in found.stderr


def test_the_package_has_the_version_of_its_library():
    from sluice._library import library

    assert library().sluice_version().decode() == sluice.__version__


def test_where_the_library_is_looked_for(tmp_path):
    """The library is taken from the package, else from the variable's folder, else from the checkout."""
    installed = tmp_path / "sluice"
    shutil.copytree(PACKAGE / "sluice", installed)
    code = "from sluice._library import find_library; print(find_library())"
    for given in (LIBRARY, LIBRARY.parent):
        found = python("-c", code, PYTHONPATH=str(tmp_path), SLUICE_LIBRARY_PATH=str(given))
        assert found.stdout.strip() == str(LIBRARY), found.stderr
    (installed / LIBRARY.name).symlink_to(LIBRARY)
    found = python("-c", code, PYTHONPATH=str(tmp_path))
    assert found.stdout.strip() == str(installed / LIBRARY.name), found.stderr
    checkout = SOURCE / "build" / "lib" / LIBRARY.name
    found = python("-c", code, SLUICE_LIBRARY_PATH="")
    assert str(checkout) in (found.stdout if checkout.exists() else found.stderr)


def test_a_library_of_another_version(tmp_path):
    source = tmp_path / "other.c"
    source.write_text("unsigned sluice_abi_version(void) { return 99; }\n")
    library = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = python("-c", "import sluice; sluice.plan([], sluice.Options(memory=1))", SLUICE_LIBRARY_PATH=str(library))
    assert found.returncode == 1 and "version 99 of the C ABI, and this package needs 1" in found.stderr
