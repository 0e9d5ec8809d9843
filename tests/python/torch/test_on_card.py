"""A chosen part of the tests that are written for the CPU, run again on the fake GPU: see support/fake_gpu.py. A process of its own has it,
since a process has one driver for its whole life. What a GPU does not have is skipped there, by fake_gpu.cpu_alone, with the reason.
The tests of the GPU itself are in test_gpu_*.py."""

import os
import subprocess

import pytest
from support import fake_gpu, warm_python
from support.sluice_process import SOURCE

# When the GPU does its work, the files, and which of their tests.
RUNS = [
    ("early", ["test_wrapping.py", "test_gradients.py"], "gradients or midway or tied or elements or estimate or keep_their_names"),
    ("late", ["test_loop.py", "test_at_once.py"], "cycles or exception or needs or reentrant"),
    ("random", ["test_saving.py", "test_models.py"], "mixtral or (both_state_dicts and options0)"),
    ("early", ["test_trainer.py", "test_pretrained.py"],
     "not accelerate and not test_adapters and (trainer or adapter or to-bf16 or mixtral or vit or bert-of-old)"),
    pytest.param("late", ["test_trainer.py", "test_models.py", "test_saving.py"],
                 "accelerate or test_adapters or (twins and t5) or checkpoint", marks=pytest.mark.long),
]


@pytest.mark.parametrize("when, files, chosen", RUNS, ids=["wrapping", "loop", "saving", "trainer", "what takes long"])
@pytest.mark.skipif(fake_gpu.asked() is not None, reason="this run is on the fake GPU already")
def test_files_pass_on_a_gpu_too(when, files, chosen):
    fake_gpu.require_built()
    paths = [os.path.join("tests", "python", "torch", name) for name in files]
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider", *paths, "-k", chosen]
    ended = subprocess.run([warm_python.executable(), *words], cwd=SOURCE, env={**os.environ, "SLUICE_FAKE_GPU": when}, capture_output=True,
                           text=True, timeout=600)
    print(ended.stdout[-20_000:], ended.stderr[-5_000:])
    assert ended.returncode == 0, f"SLUICE_FAKE_GPU={when} pytest {' '.join(paths)} -k '{chosen}'"
