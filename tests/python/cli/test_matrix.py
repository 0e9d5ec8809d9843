"""A sample of scripts/matrix.py that has every pair of values of two axes."""

import pytest
from kill_campaign import SLUICE
from matrix import AXES, sample, try_cell

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
CELLS = sample()


def test_the_sample_has_every_value():
    for axis, values in enumerate(AXES):
        assert {cell[axis] for cell in CELLS} == set(values)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell).replace(" ", "_"))
def test_cell(cell):
    result = try_cell(cell)
    assert result == "same bits" or result.startswith("refused"), result
