"""Whole runs of the command line: twins that differ in placement alone, kills, signals. Tolerance: zero."""
import atexit
import json
import signal
import subprocess
import time

import pytest
from kill_campaign import PLACES, SLUICE, final_files, leftovers, losses
from support.runs import PATIENCE, assert_same, common, sluice, train, without_earlier
from support.sluice_process import has_metrics
from transformers import GPT2LMHeadModel

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
CHUNK = 512 * 1024  # elements of the smallest chunk


def plan(place, model, dtype, *more):
    return json.loads(sluice("plan", "--json", *common(place, model, dtype, *more)))


def ways(model):
    some = "ln1+attention+" + ("swiglu" if "llama" in model else "gelu")
    memory, disk = ["--memory", "600MiB", *PLACES["memory"]], ["--memory", "600MiB", *PLACES["disk"]]
    # fmt: off
    return {
        "state on disk": [*memory, "--place-state", "disk", "--recompute", "none", "--group", "4"],
        "gradients on disk, full": [*memory, "--place-gradients", "disk", "--recompute", "full", "--group", "2"],
        "selective, uneven groups": [*memory, "--recompute", some, "--group", "3"],
        "all on disk, near": [*disk, "--recompute", "none", "--group", "1", "--prefetch", "1"],
        "all on disk, far": [*disk, "--recompute", some, "--group", "4", "--prefetch", "6"],
        "all on disk, large chunks": [*disk, "--recompute", "full", "--chunk-elements", str(2 * CHUNK)],
    }
    # fmt: on


MODELS = [
    ("llama-tied", "f32"),
    ("wide-untied", "f16"),  # GPT-2
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("tiny", "f32"), ("tiny", "bf16"), ("tiny-llama", "f32"), ("wide-untied", "bf16"))),
]  # fmt: skip


@pytest.mark.parametrize("model, dtype", MODELS)
def test_placement_recomputation_groups_prefetch_and_chunks_never_change_a_bit(place, model, dtype):
    name = f"{model}-{dtype}"
    memory = ["--memory", "600MiB", *PLACES["memory"], "--recompute", "none", "--group", "1"]
    expected, rows = train(place, f"{name}-memory", model, dtype, *memory)
    assert all(row["disk_read"] == row["disk_written"] == 0 for row in rows)
    moved = {}
    for way, flags in ways(model).items():
        flags = without_earlier(flags)
        found, rows = train(place, f"{name}-{way.replace(' ', '-')}", model, dtype, *flags)
        assert_same(found, expected)
        moved[way] = sum(row["disk_read"] + row["disk_written"] for row in rows)
    assert moved.pop("selective, uneven groups") == 0
    # Gradients are written where their room is needed; the frames of this model have room for all of them.
    gradients = moved.pop("gradients on disk, full")
    assert gradients > 0 or model == "wide-untied"
    assert min(moved.values()) > 0
    # Without groups each micro-batch loads everything again.
    assert moved["all on disk, near"] > max(1.5 * moved["all on disk, far"], moved["state on disk"])


def test_the_savings_happen(place):
    def host(*flags):
        found = plan(place, "wide-untied", "f32", *without_earlier(flags))
        return found, found["bytes"]["host"]

    memory = ["--memory", "600MiB", *PLACES["memory"], "--group", "4", "--recompute"]
    kept, kept_bytes = host(*memory, "none")
    full, full_bytes = host(*memory, "full")
    assert (kept["recompute"], full["recompute"]) == ("none", "full")
    assert full_bytes["activation"] < kept_bytes["activation"]
    on_disk, disk_bytes = host(*memory, "none", "--place-state", "disk")
    assert disk_bytes["optimizer state"] == 0 < kept_bytes["optimizer state"]
    model = GPT2LMHeadModel.from_pretrained(place / "wide-untied")
    assert on_disk["bytes"]["disk"]["optimizer state"] >= 8 * sum(p.numel() for p in model.parameters())
    assert on_disk["step"]["bytes_read"] > 0 == kept["step"]["bytes_read"]
    assert {unit["state"] for unit in on_disk["units"]} == {"disk"}
    assert on_disk["chunk_elements"] >= CHUNK  # by this machine's disk
    stated = [host(*memory, "none", "--place-state", "disk", "--chunk-elements", str(n))[0] for n in (CHUNK, 2 * CHUNK)]
    assert stated[0]["chunk_elements"] == CHUNK < stated[1]["chunk_elements"]
    assert max(sum(p.numel() for p in block.parameters()) for block in model.transformer.h) > CHUNK


class Started:
    """A run that would not end by itself."""

    def __init__(self, place, name, *more, hangup=signal.SIG_DFL):
        self.out, self.metrics = place / name, place / f"{name}.jsonl"
        words = without_earlier([*common(place, "tiny", "f32", "--memory", "600MiB"), "--steps", "1000000", *more])
        output = ["--out", str(self.out), "--metrics", str(self.metrics), "--progress", "lines"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        before = signal.signal(signal.SIGHUP, hangup)
        self.process = subprocess.Popen([SLUICE, "train", *words, *output], **pipes)
        signal.signal(signal.SIGHUP, before)
        atexit.register(self.process.kill)  # for a test that fails

    def wait_for_a_step(self):
        deadline = time.monotonic() + PATIENCE
        while not has_metrics(self.metrics):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def end(self):
        text = self.process.communicate(timeout=PATIENCE)[0]
        return self.process.returncode, text


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_saves_and_stops_at_the_end_of_the_step(place, number):
    """So does SIGTERM, the run goes on, and a second Ctrl-C stops at once: tests/bindings/training_test.cc."""
    run = Started(place, f"stopped-{number.name}", "--schedule", "constant", *PLACES["disk"])
    run.wait_for_a_step()
    run.process.send_signal(number)
    status, text = run.end()
    assert status == 0, text
    done = len(losses(run.metrics))
    assert f"saved after step {done} of" in text
    assert len(final_files(run.out, done)) == 3 and not leftovers(run.out)


def test_a_hangup_that_is_ignored_stops_nothing(place):
    """Under nohup SIGHUP is ignored."""
    run = Started(place, "nohup", "--schedule", "constant", hangup=signal.SIG_IGN)
    run.wait_for_a_step()
    run.process.send_signal(signal.SIGHUP)
    steps = len(losses(run.metrics))
    deadline = time.monotonic() + PATIENCE
    while len(losses(run.metrics)) < steps + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    run.process.send_signal(signal.SIGTERM)
    status, text = run.end()
    assert status == 0 and "SIGTERM" in text and len(losses(run.metrics)) >= steps + 3
