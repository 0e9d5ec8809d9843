"""Runs the tests on the fake GPU where they are asked to: see support/fake_gpu.py. And lets the collector, which runs at the end of each
model, look at what tests make alone, and not at all libraries: that would take most of many tests' time."""

import contextlib
import gc

import pytest
from support import fake_gpu, rank_pool


@pytest.fixture(scope="session")
def pools():
    """As many ranks as are asked for (support.over_ranks), which begin when they are."""

    class Pools(dict):
        def __missing__(self, size):
            return self.setdefault(size, running.enter_context(rank_pool.Pool(size)))

    with contextlib.ExitStack() as running:
        yield Pools()


@pytest.fixture(scope="session")
def gpu():
    fake_gpu.begin_if_asked()


@pytest.fixture(scope="module", autouse=True)
def without_older_objects():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def gpu_if_asked(request):
    if fake_gpu.asked() is None:
        yield
        return
    request.getfixturevalue("gpu")
    yield
    gc.collect()
    assert fake_gpu.take_misuses() == []
