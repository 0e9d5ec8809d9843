"""Files of tests that are written for the CPU, run again on the fake GPU: see support/fake_gpu.py. A process of its own has it, since
a process has one driver for its whole life. What a GPU does not have is skipped there, by fake_gpu.cpu_alone, with the reason."""

import os
import subprocess
import sys

import pytest
from support import fake_gpu
from support.sluice_process import SOURCE

# Each line is one process, whose start takes as long as a file.
RUNS = [
    ["test_saved.py", "test_wrapping.py", "test_gradients.py", "test_types.py", "test_edits.py", "test_threads.py"],
    ["test_meta.py", "test_pretrained.py", "test_trainer.py", "test_interrupts.py", "test_plan.py", "test_compile.py", "test_operators.py"],
]


@pytest.mark.parametrize("files", RUNS, ids=" ".join)
@pytest.mark.skipif(fake_gpu.asked() is not None, reason="this run is on the fake GPU already")
def test_files_pass_on_a_gpu_too(files):
    fake_gpu.require_built()
    paths = [os.path.join("tests", "python", "torch", name) for name in files]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider", *paths],
        cwd=SOURCE,
        env={**os.environ, "SLUICE_FAKE_GPU": "early"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(ended.stdout[-20_000:], ended.stderr[-5_000:])
    assert ended.returncode == 0, f"SLUICE_FAKE_GPU=early pytest {' '.join(paths)}"
