"""Files of tests that are written for the CPU, run again on the fake GPU: see support/fake_gpu.py. A process of its own has it, since
a process has one driver for its whole life. What a GPU does not have is skipped there, by fake_gpu.cpu_alone, with the reason.

Not here are files about what a GPU refuses (ranks, reproducible sums, spans), or about the host's memory alone, and those that
have a GPU already."""

import os
import subprocess
import sys

import pytest
from support import fake_gpu
from support.sluice_process import SOURCE

# When the GPU's work is done, and what runs so. Each line is one process, whose start takes as long as a file.
RUNS = [
    ("early", ["test_saved.py", "test_wrapping.py", "test_gradients.py", "test_types.py", "test_edits.py", "test_threads.py"]),
    ("early", ["test_meta.py", "test_pretrained.py", "test_trainer.py", "test_interrupts.py", "test_plan.py", "test_compile.py",
               "test_operators.py"]),
    ("late", ["test_at_once.py", "test_loop.py", "test_team.py"]),
    ("late", ["test_autograd.py", "test_closing.py", "test_half.py", "test_misuse.py", "test_engine_of.py"]),
    ("random", ["test_saving.py", "test_large.py", "test_muon.py"]),
    ("random", ["test_models.py", "test_examples.py"]),
]  # fmt: skip


@pytest.mark.parametrize("when, files", RUNS, ids=lambda given: given if isinstance(given, str) else " ".join(given))
@pytest.mark.skipif(fake_gpu.asked() is not None, reason="this run is on the fake GPU already")
def test_files_pass_on_a_gpu_too(when, files):
    fake_gpu.require_built()
    paths = [os.path.join("tests", "python", "torch", name) for name in files]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider", *paths],
        cwd=SOURCE,
        env={**os.environ, "SLUICE_FAKE_GPU": when},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(ended.stdout[-20_000:], ended.stderr[-5_000:])
    assert ended.returncode == 0, f"SLUICE_FAKE_GPU={when} pytest {' '.join(paths)}"
