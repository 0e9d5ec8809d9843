"""Misuse of the Python package raises an exception of the right kind that names what is wrong, and the engine goes on."""

import os
import re
import threading
import traceback

import numpy as np
import pytest
from support.sluice_package import GROUPS, UNITS, add_gradients, make_engine, set_start, start_of, values_of

import sluice


def raises(kind, *parts):
    """Expects a sluice error whose text has the parts in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, parts)))


@pytest.fixture
def engine(tmp_path):
    with make_engine(disk=tmp_path, place="disk") as made:
        set_start(made)
        yield made
        if made.closed:
            return
        before = values_of(made)
        made.begin_step()  # the engine still trains
        add_gradients(made, 0)
        made.step(clip=1.0)
        assert values_of(made) != before


def test_accesses_that_are_not_allowed(engine):
    """The package itself tells these apart; tests/bindings/c/misuse_test.cc has the refusals of the engine."""
    with raises(sluice.InvalidArgumentError, "'unit.9'", "has 3"):
        engine.acquire("unit.9")
    held = engine.acquire("unit.0")
    with engine.acquire("unit.0"):
        pass
    assert engine.parameter("first.bias")[0] == start_of(UNITS[0])["first.bias"][0]
    held.release()
    with raises(sluice.StateError, "'unit.0'", "not acquired"):
        held.release()


def test_parameters_are_seen_only_while_they_are_held(engine):
    with raises(sluice.StateError, "'first.weight'", "'unit.0'", "not held"):
        engine.parameter("first.weight")
    with raises(sluice.InvalidArgumentError, "'other'", "has 5"):
        engine.parameter("other")
    with engine.acquire("unit.0"):
        with engine.acquire("unit.0"):
            view = engine.parameter("first.weight")
        assert view[2, 3] == start_of(UNITS[0])["first.weight"][2, 3]
        with pytest.raises(TypeError, match="read-only"):
            view[2, 3] = 1.0
        assert not np.asarray(engine.parameter("first.weight")).flags.writeable
    with pytest.raises(ValueError, match="released"):
        view[2, 3]


def test_a_unit_is_released_when_its_block_raises(engine):
    with pytest.raises(KeyError), engine.acquire("unit.0"):
        raise KeyError
    engine.acquire("unit.1").release()


def test_gradients_that_are_not_allowed(engine):
    gradient = np.ones((30, 1000), np.float32)
    with raises(sluice.InvalidArgumentError, "'other'"):
        engine.add_gradient("other", gradient)
    engine.begin_step()
    with engine.acquire("unit.0", gradient=True):
        for wrong, *parts in (
            (gradient[:, :999], "gaps"),
            (gradient[:29], "'first.weight'", "116000 bytes", "120000", "30000 elements in f32"),
            (gradient.astype(np.float64), "'d'", "f32"),
            (gradient.astype(">f4"), "'>f'"),
            (None, "NoneType"),
        ):
            with raises(sluice.InvalidArgumentError, *parts):
                engine.add_gradient("first.weight", wrong)
        with raises(sluice.InvalidArgumentError, "'f'", "bf16"):
            engine.add_gradient("first.weight", gradient, "bf16")
        with raises(sluice.InvalidArgumentError, "'f'", "f16"):
            engine.add_gradient("first.weight", gradient, "f16")
        with raises(sluice.InvalidArgumentError, "'e'", "bf16"):
            engine.add_gradient("first.weight", gradient.astype(np.float16), "bf16")
        with raises(sluice.InvalidArgumentError, "'f64'"):
            engine.add_gradient("first.weight", gradient, "f64")
    engine.step()


def test_steps_that_are_not_allowed(engine):
    engine.begin_step()
    with raises(sluice.InvalidArgumentError, "1 groups", "2"):
        engine.step(GROUPS[0])
    with raises(sluice.InvalidArgumentError, "AdamW(", "Lion(", "only lr, weight_decay and betas may"):
        engine.step([sluice.Lion(betas=(0.5, 0.9))] * 2)
    for clip in (0.0, -1.0, float("nan")):
        with raises(sluice.InvalidArgumentError, "clip"):
            engine.step(clip=clip)
    with raises(sluice.InvalidArgumentError, "gradient_factor"):
        engine.step(gradient_factor=0)
    engine.step()


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_what_a_function_of_the_callers_raises_is_raised(engine, kind):
    def stop(name, first, part):
        raise kind(f"at {name} {first}")

    for function in (engine.get_values, engine.set_values):
        with pytest.raises(kind, match="at middle.weight 0") as caught:
            function("unit.1", stop)
        assert "in stop" in "".join(traceback.format_tb(caught.value.__traceback__))
    engine.set_values("unit.1", start_of(UNITS[1]))


def test_elements_that_a_function_keeps(engine):
    kept = []
    engine.get_values("unit.1", lambda name, first, part: kept.append(part))
    with pytest.raises(ValueError, match="released"):
        kept[0][0]
    for keep in (np.asarray, lambda part: part[5:]):
        with raises(sluice.StateError, "'middle.weight'", "copy"):
            engine.get_values("unit.1", lambda name, first, part, keep=keep: kept.append(keep(part)))
    kept.clear()
    engine.get_values("unit.1", lambda name, first, part: np.asarray(part).sum())


def test_the_engine_in_a_function_that_it_calls(engine):
    def use(name, first, part):
        engine.acquire("unit.0")

    def close(name, first, part):
        engine.close()

    for function in (use, close):
        with raises(sluice.StateError, "that it calls itself"):
            engine.get_values("unit.1", function)
    assert not engine.closed


def test_values_that_do_not_fit(engine):
    before = values_of(engine)
    start = start_of(UNITS[1])
    for wrong, *parts in (
        ({"scale": start["scale"]}, "'middle.weight'", "has no values", "'unit.1'"),
        (start | {"first.bias": start["scale"]}, "'first.bias'", "not a parameter"),
        (start | {"scale": bytes(8)}, "'scale'", "8 bytes", "has 4"),
        (start | {"scale": 1.0}, "'scale'", "float", "buffer"),
    ):
        with raises(sluice.InvalidArgumentError, *parts):
            engine.set_values("unit.1", wrong)
        with raises(sluice.InvalidArgumentError, *parts):
            engine.get_values("unit.1", wrong)
    with raises(sluice.InvalidArgumentError, "read-only"):
        engine.get_values("unit.1", {"middle.weight": start["middle.weight"], "scale": bytes(4)})
    assert values_of(engine) == before


def test_files_that_cannot_be_loaded(engine, tmp_path):
    for function in (engine.load, engine.load_values):
        with raises(sluice.NotFoundError, "none"):
            function(tmp_path / "none")
    assert issubclass(sluice.NotFoundError, FileNotFoundError)
    (tmp_path / "text.safetensors").write_text("no safetensors")
    with raises(sluice.CorruptError, "text"):
        engine.load_values(tmp_path / "text.safetensors")
    with raises(sluice.StateError, "trace_events"):
        engine.save_trace(tmp_path / "trace.json")
    engine.add_event("compute", "nothing keeps it", 0)
    text = "the lane is 'read'; it is compute, rank wait or message"
    with make_engine(trace_events=1) as other, raises(sluice.InvalidArgumentError, text):
        other.add_event("read", "a pass", 0)
    with make_engine(trace_events=1) as other:
        with raises(sluice.InvalidArgumentError, f"an event begins at {2**62} and ends at"):
            other.add_event("compute", "a pass", 2**62)
        with raises(sluice.InvalidArgumentError, "the name of an event is no UTF-8"):
            other._handle.call("sluice_engine_add_event", b"compute", b"\xff", 0, 1, 0)
        other.save_trace(tmp_path / "trace.json")
    with raises(sluice.InvalidArgumentError, "NUL"):
        engine.save(f"{tmp_path}/a\0b")


def test_a_closed_engine_says_so(tmp_path):
    engine = make_engine(disk=tmp_path, place="disk")
    set_start(engine)
    engine.begin_step()
    held = engine.acquire("unit.0", gradient=True)
    view = engine.parameter("first.weight")
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    for use in (
        held.release, engine.begin_step, engine.step, engine.settle, engine.plan, engine.ledger,
        lambda: engine.steps, lambda: engine.acquire("unit.0"), lambda: engine.parameter("first.weight"),
        lambda: engine.get_values("unit.0"), lambda: engine.set_values("unit.0", start_of(UNITS[0])),
        lambda: engine.save(tmp_path), lambda: engine.load(tmp_path), lambda: engine.load_values(tmp_path),
        lambda: engine.save_trace(tmp_path), lambda: engine.add_gradient("scale", bytes(4)),
    ):  # fmt: skip
        with raises(sluice.StateError, "closed"):
            use()


def test_close_waits_for_the_calls_of_other_threads(tmp_path):
    engine = make_engine(disk=tmp_path, place="disk")
    inside, go_on, errors = threading.Event(), threading.Event(), []

    def slow(name, first, part):
        inside.set()
        go_on.wait(10)
        part[:] = memoryview(np.zeros(len(part), np.float32))

    def work():
        try:
            engine.set_values("unit.1", slow)
        except BaseException as error:
            errors.append(error)

    worker, closer = threading.Thread(target=work), threading.Thread(target=engine.close)
    worker.start()
    assert inside.wait(10)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    worker.join(10)
    closer.join(10)
    assert errors == [] and not closer.is_alive() and engine.closed


def test_a_forked_process_may_not_use_the_engine(engine):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            engine.close()  # as its exit would; the child must not close its parent's engine
            engine.begin_step()
        except sluice.StateError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as text:
        assert "forked" in text.read()
    os.waitpid(child, 0)


def test_a_checkpoint_of_another_model_is_told_by_what_differs(engine, tmp_path):
    engine.save(tmp_path / "run")
    for parameter, *parts in (
        (sluice.Parameter("other", (7,)), "of another model than this one: it has no 'other'; build the model as"),
        (sluice.Parameter("first.weight", (1000, 30)), "of another model", "'first.weight'", "30, 1000", "1000, 30"),
    ):
        # The stated memory also has to hold what earlier tests have left in this process.
        options = sluice.Options(memory="8GiB", optimizer=sluice.AdamW(), threads=1)
        with sluice.Engine([sluice.Unit("u", [parameter])], options) as other:
            with raises(sluice.InvalidArgumentError, *parts):
                other.load(tmp_path / "run")
            other.set_values("u", {parameter.name: np.zeros(parameter.shape, np.float32)})
            other.acquire("u").release()


def test_plans_that_do_not_fit(tmp_path):
    with raises(sluice.BudgetError, "memory", "short"):
        sluice.plan(UNITS, sluice.Options(memory="1MiB", optimizer=GROUPS))
    large = [sluice.Unit(str(u), [sluice.Parameter(f"{u}.weight", (8 << 20,))]) for u in range(8)]
    for options in ({"memory": "256MiB"}, {"memory": "256MiB", "disk": sluice.Folder(tmp_path, "2MiB")}):
        with raises(sluice.BudgetError, "memory=", "MiB") as refused:
            sluice.plan(large, sluice.Options(**options))
        assert "--" not in str(refused.value) and "disk folder" in str(refused.value)
    for wrong, *parts in (
        ({"memory": 0}, "memory"),
        ({"memory": -1}, "memory", "-1"),
        ({"memory": "4 parsecs"}, "'4 parsecs'", "512MiB"),
        ({"optimizer": GROUPS[0]}, "'first.bias'", "group 1"),
        ({"place": "elsewhere"}, "'elsewhere'"),
        ({"place": {"weights": "disk"}}, "'weights'", "parameters"),
        ({"dtype": "f64"}, "'f64'", "bf16", "f16"),
        ({"dtype": "f16", "master": "none", "optimizer": GROUPS}, "f16", "keep the masters"),
        ({"threads": 2**32 + 1}, "threads", "4294967297"),
        ({"threads": 4097}, "threads is 4097; it is a whole number from 0 to 4096"),
        ({"prefetch": 65}, "prefetch is 65; it is a whole number from 0 to 64"),
        ({"disk": {"/scratch": "1GiB"}}, "disk is {'/scratch': '1GiB'}; give a folder, 'FOLDER:SIZE'"),
        ({"held_units": -1}, "held_units"),
        ({"optimizer": [GROUPS[0], sluice.Adam()]}, "differ"),
        ({"optimizer": [sluice.SGD(), sluice.SGD(momentum=0.9)]}, "differ"),
    ):
        with raises(sluice.InvalidArgumentError, *parts):
            sluice.plan(UNITS, sluice.Options(**{"memory": "4GiB", "optimizer": GROUPS} | wrong))
    with raises(sluice.NotFoundError, str(tmp_path / "none")):
        sluice.plan(UNITS, sluice.Options(memory="4GiB", optimizer=GROUPS, disk=tmp_path / "none"))
    with raises(sluice.InvalidArgumentError, "limit"):
        sluice.Folder(tmp_path, 0)


def test_what_is_no_model():
    parameter = sluice.Parameter("a", (3,))
    options = sluice.Options(memory="4GiB")
    with raises(sluice.InvalidArgumentError, "'a'"):
        sluice.Engine([sluice.Unit("u", [parameter, parameter])], options)
    with raises(sluice.InvalidArgumentError, "same name"):
        sluice.Engine([sluice.Unit("u", [parameter]), sluice.Unit("u", [])], options)
    with raises(sluice.InvalidArgumentError, "no units"):
        sluice.Engine([], options)
    with raises(sluice.InvalidArgumentError, "'a'", "(3, 0)"):
        sluice.Parameter("a", (3, 0))
    with raises(sluice.InvalidArgumentError, "'a'", "-3"):
        sluice.Parameter("a", (-3,))
    for name in ("", "__metadata__", "\ud800", "a\0b"):
        with raises(sluice.InvalidArgumentError, "name"):
            sluice.plan([sluice.Unit("u", [sluice.Parameter(name, (3,))])], options)
    for wrong in (
        *({"betas": betas} for betas in ((0.9, 1.0), (0.9,), 0.9, None, ("0.9", 0.9))),
        *({"eps": eps} for eps in (-1e-8, "1e-8", None)),
        *({"lr": lr} for lr in (float("nan"), float("inf"), None, (1e-3, 1e-3))),
        {"weight_decay": -1},
    ):
        with raises(sluice.InvalidArgumentError, next(iter(wrong))):
            sluice.AdamW(**wrong)


@pytest.mark.parametrize(
    "size, expected", [("1KiB", 1024), ("1.5GB", 1500000000), ("4Gi", 4 << 30), (" 7 ", 7), (9, 9)]
)
def test_sizes(size, expected):
    from sluice.model import size_of

    assert size_of(size, "memory") == expected
