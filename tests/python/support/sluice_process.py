"""Runs the program, and reads what it writes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parents[1]
PACKAGE = SOURCE / "bindings" / "python"
BUILD = Path(os.environ.get("SLUICE_BUILD", SOURCE / "build"))
SLUICE = BUILD / "bin" / "sluice"
os.environ.setdefault("SLUICE_LIBRARY_PATH", str(BUILD / "lib"))  # of the package, in this process and in those that it starts


def run_sluice(command, *words, **flags):
    """Runs sluice COMMAND WORDS --flag value ... Returns the finished process, with the bytes that it printed."""
    if not SLUICE.exists():
        pytest.skip(f"{SLUICE} is not built")
    arguments = [str(word) for word in words]
    for name, value in flags.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run([SLUICE, command, *arguments], capture_output=True, timeout=120)


def has_metrics(path):
    """Whether a run has written metrics. (At first it makes the file and removes it, to see whether it can.)"""
    try:
        return bool(path.read_bytes())
    except FileNotFoundError:
        return False


def train(**flags):
    """Runs `sluice train`, which must succeed. Returns the lines of its metrics and the folder of its last checkpoint."""
    out = Path(flags["out"])
    metrics = out.with_suffix(".jsonl")
    finished = run_sluice("train", metrics=metrics, memory="512MiB", progress="none", **flags)
    assert finished.returncode == 0, finished.stderr.decode()
    return [json.loads(line) for line in metrics.read_text().splitlines()], out / f"step-{flags['steps']:08}"
