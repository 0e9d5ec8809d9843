"""Runs the tests on the fake GPU where they are asked to: see support/fake_gpu.py."""

import gc

import pytest
from support import fake_gpu


@pytest.fixture(scope="session")
def gpu():
    fake_gpu.begin_if_asked()
    gc.freeze()  # the collector runs at the end of each model and of each test, and must not look at all libraries then


@pytest.fixture(autouse=True)
def gpu_if_asked(request):
    if fake_gpu.asked() is None:
        yield
        return
    request.getfixturevalue("gpu")
    yield
    gc.collect()
    assert fake_gpu.take_misuses() == []
