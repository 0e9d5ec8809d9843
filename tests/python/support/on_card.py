"""Runs files of tests on the fake GPU, in a process of its own: a process has one driver for its whole life."""

import os
import subprocess
import sys

import pytest
from support import fake_gpu
from support.sluice_process import SOURCE


def each_of(runs):
    """A test for each of these: when the GPU's work is done, and the files of tests/python/torch that run so."""

    @pytest.mark.parametrize("when, files", runs, ids=lambda given: given if isinstance(given, str) else " ".join(given))
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

    return test_files_pass_on_a_gpu_too
