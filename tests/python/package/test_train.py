"""sluice.train() has the program's options, bits, errors and ways of stopping."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.sluice_process import PACKAGE, SLUICE, SOURCE, has_metrics, run_sluice

import sluice

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
SMALL = dict(model="tiny", seq=16, batch=2, memory="512MiB", threads=1, progress="none")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("Once upon a time there was a plan. " * 100)
    return path


def test_it_takes_every_option_of_the_program():
    flags = set(re.findall(r"^ *--([a-z0-9-]+)", run_sluice("train", "--help").stdout.decode(), re.MULTILINE))
    of_optimizers = {setting["name"] for settings in sluice.optimizers.table().values() for setting in settings}
    named = {*inspect.signature(sluice.train).parameters, *of_optimizers} - {"settings"}
    options = {name.replace("_", "-") for name in named}
    flags -= {flag for flag in flags if flag.startswith("no-") and flag[3:] in options}  # the form of a switch that is False
    assert (flags - options, options - flags) == ({"errors", "machine", "stop-with"}, set())  # --machine is for plans
    with pytest.raises(TypeError, match="'memroy'"):
        sluice.train(memroy="1GiB")


def test_a_run_has_the_bits_of_the_program(text, tmp_path):
    options = dict(SMALL, steps=3, lr=1e-3, clip=0.5, seed=7, place_state="disk")
    made = sluice.train(data=[text, text], out=tmp_path / "a", disk=sluice.Folder(tmp_path, "1GiB"), **options)
    words = ["--data", text, text, "--disk", f"{tmp_path}:1GiB", "--out", tmp_path / "b"]
    done = run_sluice("train", *words, metrics=tmp_path / "b.jsonl", **options)
    assert done.returncode == 0, done.stderr
    theirs = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in made.metrics] == [line["loss"] for line in theirs]
    assert (made.steps, made.last_loss) == (3, theirs[-1]["loss"])
    assert made.checkpoint == tmp_path / "a" / "step-00000003"
    for name in ("model.safetensors", "optimizer.exp_avg.safetensors"):
        assert (made.checkpoint / name).read_bytes() == (tmp_path / "b" / "step-00000003" / name).read_bytes()
    assert repr(made).count("loss") == 2, "the lines of metrics are many"


def test_only_whole_checkpoints_are_returned(text, tmp_path):
    out, options = tmp_path / "run", dict(SMALL, data=text, disk=f"{tmp_path}:2GiB", place_state="disk", schedule="constant")
    sluice.train(out=out, steps=1, **options)
    for name in ("step-old", "step-00009999"):
        (out / name).mkdir()
    made = sluice.train(out=out, steps=2, resume=True, **options)
    assert made.checkpoint == out / "step-00000002"


def test_a_run_goes_on_from_its_checkpoint(text, tmp_path):
    options = dict(SMALL, data=text, out=tmp_path / "run", schedule="constant")
    first = sluice.train(steps=2, metrics=tmp_path / "m.jsonl", **options)
    more = sluice.train(steps=4, metrics=tmp_path / "m.jsonl", resume=True, **options)
    assert [line["step"] for line in more.metrics] == [1, 2, 3, 4] and more.metrics[:2] == first.metrics
    without_file = sluice.train(steps=5, resume=True, **options)
    assert (without_file.steps, [line["step"] for line in without_file.metrics]) == (5, [5])
    nothing_left = sluice.train(steps=5, resume=True, **options)
    assert (nothing_left.steps, nothing_left.last_loss, nothing_left.metrics) == (5, None, [])
    assert nothing_left.checkpoint == without_file.checkpoint


def test_a_settings_file_is_the_programs(text, tmp_path):
    settings = SMALL | {"data": [str(text)], "steps": 2, "out": str(tmp_path / "run"), "metrics": str(tmp_path / "m")}
    (tmp_path / "c.json").write_text(json.dumps(settings))
    made = sluice.train(config=tmp_path / "c.json", steps=1)
    assert made.steps == 1 and made.checkpoint == tmp_path / "run" / "step-00000001"
    assert len((tmp_path / "m").read_text().splitlines()) == 1
    assert sluice.train(**SMALL, data=text, steps=1).checkpoint is None


def test_the_best_checkpoint_stays_and_is_told(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Q" * 1000)  # text unlike that of training, whose loss grows with learning
    options = dict(SMALL, data=text, valid=other, out=tmp_path / "run", steps=12, lr=1e-3, schedule="constant")
    made = sluice.train(eval_every=5, eval_batches=1, save_every=1, keep=1, **options)
    losses = {line["step"]: line["validation_loss"] for line in made.metrics}
    best = min(losses, key=losses.get)
    assert best < made.steps == len(losses), "the loss falls to the end: nothing is tried"
    assert (made.best, made.best_loss) == (tmp_path / "run" / f"step-{best:08}", losses[best])
    assert made.checkpoint == tmp_path / "run" / "step-00000012"
    assert sorted(made.checkpoint.parent.glob("step-*")) == [made.best, made.checkpoint]
    without = sluice.train(**SMALL, data=text, out=tmp_path / "plain", steps=1)
    assert without.checkpoint and (without.best, without.best_loss) == (None, None)


def refusals(text, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    yield sluice.NotFoundError, dict(data=tmp_path / "nowhere.txt"), "nowhere.txt"
    yield sluice.InvalidArgumentError, dict(data=[]), "--data is missing"
    yield sluice.InvalidArgumentError, dict(model="gpt2-124"), "gpt2-124m"
    yield sluice.InvalidArgumentError, dict(steps=True), "--steps"
    yield sluice.InvalidArgumentError, dict(resume="yes"), "resume"
    yield sluice.InvalidArgumentError, dict(disk={"/scratch": "1GiB"}), "disk is {'/scratch': '1GiB'}"
    yield sluice.InvalidArgumentError, dict(model="a\0b"), "NUL"
    yield sluice.InvalidArgumentError, dict(model="--steps"), "--steps"
    yield sluice.NotFoundError, dict(config=tmp_path / "none.json"), "none.json"
    yield sluice.BudgetError, dict(memory="2MiB"), "--memory"
    yield sluice.NotFiniteError, dict(lr=9e5, clip=0, steps=20), "finite"


def test_every_error_of_the_program_has_an_exception():
    names = re.findall(r'Row\{"(\w+)"', (SOURCE / "core" / "error.cc").read_text())
    assert len(names) == 8
    kinds = {name: type(sluice.errors.error_named(name, "text")) for name in names}
    assert len(set(kinds.values())) == 8 and kinds["internal"] is sluice.InternalError
    assert [type(sluice.errors.error_of(status, "text")) for status in range(1, 9)] == list(kinds.values())


def test_errors_are_the_engines_own(text, tmp_path, capfd):
    for kind, given, part in refusals(text, tmp_path):
        try:
            sluice.train(**{**SMALL, "data": text, "steps": 1, **given})
        except sluice.Error as error:
            assert type(error) is kind, (given, error)
            assert part in str(error) and "sluice: error" not in str(error), (given, str(error))
        else:
            pytest.fail(f"{given} was not refused")
    assert "error" not in capfd.readouterr().err


# A script whose run would not end by itself, in a session of its own, like a terminal's foreground job.
ENDLESS = """
import sys, sluice
print("begins", flush=True)
try:
    sluice.train(**eval(sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
print("ended", flush=True)
"""


class Script:
    def __init__(self, text, place):
        options = dict(SMALL, data=str(text), out=str(place / "run"), metrics=str(place / "m.jsonl"), steps=10**7)
        self.metrics, self.run = place / "m.jsonl", place / "run"
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, repr(options)],
            env=os.environ | {"PYTHONPATH": str(PACKAGE)}, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.wait_for(lambda: has_metrics(self.metrics))

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def child(self):
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return int(Path(children).read_text().split()[0])

    def steps(self):
        return len(self.metrics.read_text().splitlines())

    def checkpoints(self):
        return [name for name in os.listdir(self.run) if name.startswith("step-")]


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "process"])
def test_an_interrupt_saves_and_is_raised(text, tmp_path, whole_group):
    script = Script(text, tmp_path)
    if whole_group:
        os.killpg(script.process.pid, signal.SIGINT)
    else:
        os.kill(script.process.pid, signal.SIGINT)
    out = script.process.communicate(timeout=60)[0]
    assert script.process.returncode == -signal.SIGINT and "interrupted" in out and "ended" not in out
    assert script.checkpoints() == [f"step-{script.steps():08}"]


def test_a_run_does_not_outlive_its_caller(text, tmp_path):
    script = Script(text, tmp_path)
    child = script.child()
    script.process.kill()
    script.process.communicate(timeout=60)
    script.wait_for(lambda: not os.path.exists(f"/proc/{child}/exe"))  # the child has ended, even if it is not reaped
    assert script.checkpoints() == [f"step-{script.steps():08}"]


def test_a_run_that_is_killed_is_told(text, tmp_path):
    script = Script(text, tmp_path)
    os.kill(script.child(), signal.SIGKILL)
    assert "ended" not in script.process.communicate(timeout=60)[0]
    assert script.process.returncode == 1
