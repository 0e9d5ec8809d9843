"""A share of each campaign of tests/campaigns, the same in each run; tests/campaigns/run.py runs the whole. Time limits are far from what
a busy machine needs. Cells that have every value of a setting run always (of ranks every eighth one), and those with every pair are long."""

import itertools
import os
import subprocess
import sys

import pytest
import rank_matrix
from fault_campaign import RealFaults
from gpu_rank_campaign import GpuRankCampaign
from kill_campaign import SLUICE, Campaign
from matrix import AXES, pairs_of, sample, try_cell
from rank_campaign import RankCampaign
from rank_faults import RankFaults
from support import fake_gpu
from support.sluice_process import PACKAGE, SOURCE, TESTS

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
CELLS, CELLS_OF_RANKS, LOADS = sample(), pairs_of(rank_matrix.candidates()), pairs_of(rank_matrix.loads())


def params(cells, every=1, first=0):
    few = pairs_of(cells, together=1)[first::every]
    return [pytest.param(cell, id="-".join(cell).replace(" ", "_"), marks=() if cell in few else pytest.mark.long) for cell in cells]


@pytest.fixture(scope="module")
def twins():
    return rank_matrix.Matrix()


OF_THIS_RUN = ("SLUICE_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


def as_in_a_shell(*words, **variables):
    """Runs a command without what a run of the tests adds to the environment."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_THIS_RUN}
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, env=clean | variables)


@pytest.mark.parametrize("kind", ["kill", pytest.param("gpu-rank", marks=pytest.mark.long)])
def test_the_command_runs_as_it_is_printed(tmp_path, kind):
    done = as_in_a_shell(SOURCE / "tests" / "campaigns" / "run.py", kind, "--count", "0", "--folder", tmp_path / "a" / "folder")
    assert done.returncode == 0 and f"{kind}: passed" in done.stdout, done.stdout + done.stderr
    (tmp_path / "file").touch()
    done = as_in_a_shell(SOURCE / "tests" / "campaigns" / "run.py", kind, "--folder", tmp_path / "file")
    assert done.returncode == 2 and "--folder cannot be made" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_campaigns_rank_finds_the_library_where_no_variable_names_it():
    paths = os.pathsep.join(map(str, (PACKAGE, TESTS)))
    done = as_in_a_shell(sys.executable, "-c", "from support import sluice_package; sluice_package.make_engine().close()", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr


def test_kills_and_resumes_change_no_bit(tmp_path):
    campaign = Campaign(tmp_path, seed=3)
    campaign.run(2)
    assert campaign.killed >= 2 and campaign.rounds >= 1, campaign.kills


def test_lost_ranks_and_resumes_change_no_bit(tmp_path):
    campaign = RankCampaign(tmp_path, 3, seed=2, within=30)
    campaign.run(1)
    assert campaign.killed >= 1 and campaign.rounds >= 1, campaign.kills


@pytest.mark.long
def test_lost_ranks_on_gpus_change_no_bit(tmp_path):
    fake_gpu.require_built()
    campaign = GpuRankCampaign(tmp_path, 2, seed=2, within=30)
    campaign.run(2)
    assert campaign.killed >= 2 and campaign.rounds >= 1, campaign.kills


@pytest.mark.parametrize("make, chosen", [
    (lambda folder: RealFaults(folder, seed=3), ["bits flipped in the swap file", "io_uring forbidden"]),
    pytest.param(lambda folder: RealFaults(folder, seed=3), ["a file system that others fill", "no locked memory"], marks=pytest.mark.long),
    pytest.param(lambda folder: RankFaults(folder, 3, seed=4), ["a rank's swap file cut", "a rank stopped and continued"],
                 marks=pytest.mark.long),
], ids=["of a run", "of a run's machine", "of a rank"])  # fmt: skip
def test_real_faults_are_survived_or_reported(tmp_path, make, chosen):
    faults, told = make(tmp_path), []
    faults.all(1, told.append, chosen)
    print("\n".join(told))
    assert faults.survived >= 1 and faults.reported + faults.missed >= 1, told


def test_the_cells_have_every_value():
    for axes, cells in ((AXES, CELLS), (rank_matrix.AXES, CELLS_OF_RANKS), (rank_matrix.AXES_OF_LOADS, LOADS)):
        cells = pairs_of(cells, together=1)
        for axis, values in enumerate(axes):
            missing = {"mpirun"} if "mpirun" in values and not rank_matrix.mpirun_is_there() else set()
            assert {cell[axis] for cell in cells} == set(values) - missing


def test_the_cells_of_ranks_have_every_pair():
    """That any of so many others has, drawn at random."""
    cells, others = (
        {pair for cell in cells for pair in itertools.combinations(enumerate(cell), 2)} for cells in (CELLS_OF_RANKS, rank_matrix.drawn(5000, 1))
    )
    assert cells >= others
    assert {load[-2:] for load in LOADS} == set(itertools.permutations(rank_matrix.MESHES, 2))


@pytest.mark.parametrize("cell", params(CELLS))
def test_a_cell_has_the_same_bits_in_memory_and_on_disk(cell):
    result = try_cell(cell)
    assert result == "same bits" or result.startswith("refused"), result


@pytest.mark.parametrize("cell", params(CELLS_OF_RANKS, every=8))
def test_a_cell_of_ranks_has_the_bits_of_its_twin(twins, cell):
    assert twins.try_cell(cell) == "same bits"


@pytest.mark.parametrize("load", params(LOADS, every=8, first=3))
def test_what_a_mesh_saves_goes_on_at_another(twins, load):
    assert twins.try_load(load) == "same bits"
