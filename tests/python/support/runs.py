"""Whole runs of the command line, and their results. A place is a folder that the fixture of that name makes."""

import json
import subprocess

import pytest
from kill_campaign import SLUICE, final_files, losses

PATIENCE = 120
STEPS, ACCUMULATE = 3, 4


def common(place, model, dtype, *more):
    # fmt: off
    return ["--model", str(place / model) if (place / model).is_dir() else model, "--dtype", dtype,
            "--data", str(place / "text.txt"), "--seq", "32", "--batch", "2", "--accumulate", str(ACCUMULATE),
            "--steps", str(STEPS), "--lr", "1e-3", "--threads", "2", "--disk", f"{place / 'disk'}:1GiB", *more]
    # fmt: on


def sluice(*words, status=0):
    done = subprocess.run([SLUICE, *words], capture_output=True, text=True, timeout=PATIENCE)
    if "O_DIRECT" in done.stderr or "lies in memory" in done.stderr:
        pytest.skip(f"the temporary folder is on no disk: {done.stderr}")
    assert done.returncode == status, done.stderr + done.stdout
    return done.stdout


def train(place, name, model, dtype, *more):
    """Trains. Returns the losses' bits with the files, and the metrics."""
    out, metrics = place / name, place / f"{name}.jsonl"
    output = ["--out", str(out), "--metrics", str(metrics), "--progress", "none"]
    sluice("train", *common(place, model, dtype, *more), *output)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return (losses(metrics), final_files(out, STEPS)), rows


def assert_same(found, expected):
    assert len(expected[0]) == STEPS and len(set(expected[0])) == STEPS
    assert found[0] == expected[0], "the losses differ"
    assert found[1].keys() == expected[1].keys() and len(found[1]) >= 3
    for name, content in expected[1].items():
        assert found[1][name] == content, f"{name} differs"


def without_earlier(words):
    """The words without flags that come again later, since the command line takes each once."""
    pairs = dict(zip(words[::2], words[1::2]))
    return [word for pair in pairs.items() for word in pair]
