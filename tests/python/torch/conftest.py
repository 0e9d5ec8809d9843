"""Runs the tests on the fake GPU where they are asked to: see support/fake_gpu.py. And lets the collector, which runs at the end of each
model, look at what tests make alone, and not at all libraries: that would take most of many tests' time."""

import contextlib
import gc

import pytest
from support import fake_gpu, rank_pool


class Pools(contextlib.ExitStack):
    """As many ranks as are asked for, which begin when they are, and call functions of a module of support."""

    def __init__(self, module):
        super().__init__()
        self.module, self.made = module, {}

    def __getitem__(self, size):
        if size not in self.made:
            self.made[size] = self.enter_context(rank_pool.Pool(size, self.module))
        return self.made[size]


@pytest.fixture(scope="session")
def pools():
    with Pools("over_ranks") as made:
        yield made


@pytest.fixture(scope="module")
def pipelines():
    with Pools("over_pipelines") as made:
        yield made


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
