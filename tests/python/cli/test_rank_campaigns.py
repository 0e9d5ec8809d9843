"""The short forms of scripts/kill_campaign.py, fault_campaign.py and matrix.py with --ranks. Time limits are far from what a busy
machine needs; the scripts have those of docs/ranks.md."""

import random

import pytest
import rank_matrix
from kill_campaign import SLUICE
from matrix import pairs_of
from rank_campaign import RankCampaign
from rank_faults import RankFaults

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
CELLS = pairs_of(rank_matrix.all_cells())


@pytest.fixture(scope="module")
def matrix():
    return rank_matrix.Matrix()


def test_lost_ranks_and_resumes_change_no_bit(tmp_path):
    campaign = RankCampaign(tmp_path, 4, seed=random.randrange(1 << 30), within=30)
    campaign.run(5)
    assert campaign.killed >= 5 and campaign.rounds >= 1, campaign.kills


def test_real_faults_of_a_rank_are_survived_or_reported(tmp_path):
    faults = RankFaults(tmp_path, 3, seed=4)
    told = []
    faults.all(1, told.append)
    print("\n".join(told))
    assert faults.reported + faults.missed >= 3 and faults.reported >= 1, told  # runs cannot survive flips, cuts and limits
    assert faults.survived >= 1, told


def test_the_cells_have_every_value():
    for axis, values in enumerate(rank_matrix.AXES):
        there = {"shared memory"} if "mpirun" in values and not rank_matrix.mpirun_is_there() else set(values)
        assert {cell[axis] for cell in CELLS} == there


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell).replace(" ", "_"))
def test_twins(matrix, cell):
    assert matrix.try_cell(cell) == "same bits"


@pytest.mark.parametrize("model, optimizer", [("tiny", "8-bit adamw"), ("tiny-llama", "muon")])
def test_what_four_ranks_save_goes_on_at_other_numbers(matrix, model, optimizer):
    results = matrix.try_loads(model, optimizer)
    assert len(results) == 4 and set(results.values()) == {"same bits"}, results
