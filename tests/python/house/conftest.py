"""The wheel, which takes half a minute to make, and is made once for all workers."""

import os

import pytest
from support.sluice_process import BUILD
from support.wheels import made_by


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    has_kernels = (BUILD / "lib" / "libsluice_kernels.fatbin").exists()
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return made_by(folder / "wheel", *([] if has_kernels else ["--cpu"]))
