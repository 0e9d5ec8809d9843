"""Runs the tests on the fake GPU where they are asked to: see support/fake_gpu.py."""

import gc

import pytest
from support import fake_gpu


@pytest.fixture(scope="session")
def gpu():
    fake_gpu.share_memory(memory=64 << 30, schedule=fake_gpu.asked(), seed=1)
    gc.freeze()  # the collector runs at the end of each model and of each test, and must not look at all libraries then


@pytest.fixture(autouse=True)
def gpu_if_asked(request):
    if fake_gpu.asked() is None:
        yield
        return
    request.getfixturevalue("gpu")  # once for all tests, since models may live until the collector runs
    yield
    gc.collect()
    assert fake_gpu.take_misuses() == []
