"""A sample of scripts/matrix.py that has every pair of values of two axes."""

import argparse
import json

import pytest
from kill_campaign import SLUICE
from matrix import AXES, sample, try_all, try_cell

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
CELLS = sample()


def test_the_sample_has_every_value():
    for axis, values in enumerate(AXES):
        assert {cell[axis] for cell in CELLS} == set(values)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell).replace(" ", "_"))
def test_cell(cell):
    result = try_cell(cell)
    assert result == "same bits" or result.startswith("refused"), result


def test_slices_try_each_cell_once_and_what_was_wrong_again(tmp_path, capsys):
    """A cell is wrong at first; every slice ends after two cells."""
    tried = []

    def task(cell):
        tried.append(cell)
        return {cell: "WRONG: at first" if cell == "b" and tried.count(cell) == 1 else "same bits"}

    tasks = [([cell], lambda cell=cell: task(cell)) for cell in "abcde"]
    slices = argparse.Namespace(jobs=1, json=tmp_path / "results.json", resume=True, most=2)
    kinds = {"same bits": "right", "WRONG": "wrong"}
    assert [try_all(tasks, slices, 1).finish("cells", kinds) for _ in range(4)] == [1, 0, 0, 0]
    assert tried == ["a", "b", "b", "c", "d", "e"]
    assert "2 of 5 cells: 1 right, 1 wrong" in capsys.readouterr().out

    earlier = json.loads(slices.json.read_text())
    slices.json.write_text(json.dumps(earlier | {"build": "another"}))
    with pytest.raises(SystemExit, match="another build"):
        try_all(tasks, slices, 1)
