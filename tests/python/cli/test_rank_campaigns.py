"""The short forms of scripts/kill_campaign.py, fault_campaign.py and matrix.py with --ranks. Time limits are far from what a busy
machine needs; the scripts have those of docs/ranks.md."""

import random
import subprocess

import pytest
import rank_matrix
from kill_campaign import PATIENCE, PLACES, SLUICE, lesson, losses
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


# The memory is little more than the least that the plan allows. Updates wait for each other, and hold their gradients.
@pytest.mark.parametrize("stage, optimizer", [("0", "adafactor"), ("2", "lion"), ("3", "sgd"), ("3", "muon")])
def test_updates_in_backward_have_room_while_ranks_wait_for_each_other(tmp_path, stage, optimizer):
    def train(name, *more):
        metrics = tmp_path / f"{name}.jsonl"
        words = rank_matrix.started(
            "shared memory", "3", "--model", "tiny", "--data", tmp_path / "text.txt", "--seq", "32", "--batch", "1", "--accumulate", "3",
            "--steps", "4", "--threads", "1", "--progress", "none", "--clip", "0", "--dtype", "bf16", "--optimizer", optimizer,
            "--metrics", metrics, *more)  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return losses(metrics)

    (tmp_path / "text.txt").write_text(lesson())
    (tmp_path / "disk").mkdir()
    expected = train("whole", "--stage", "0", "--memory", "1GiB")
    for number in range(4):
        found = train(f"disk{number}", "--stage", stage, "--memory", "90MiB", "--disk", f"{tmp_path}/disk:1GiB", *PLACES["disk"])
        assert found == expected
