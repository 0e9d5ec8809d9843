"""How ranks join each other over memory that they share."""

import os

import pytest
from support import sluice_package  # noqa: F401: skips where the library is not built

import sluice
from sluice.torch import _together


class Failing:
    """A group of two ranks whose calls fail, from that one on."""

    size = 2

    def __init__(self, rank, fails):
        self.rank, self._left = rank, fails

    def gather(self, value):
        if self._left == 0:
            raise sluice.StateError("another rank is gone")
        self._left -= 1
        return [[os.getpid(), os.open("/dev/null", os.O_RDWR) if self.rank else value[1]]] * 2


@pytest.mark.parametrize("rank, fails", [(0, 0), (0, 1), (1, 1)])
def test_no_descriptor_is_left_where_a_rank_is_gone(rank, fails):
    group = Failing(rank, fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(sluice.StateError, match="another rank is gone"):
        _together._opened(group)
    assert len(os.listdir("/proc/self/fd")) == before + (1 if rank else 0)  # that of the other rank
