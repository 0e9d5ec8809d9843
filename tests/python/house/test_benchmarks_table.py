"""docs/benchmarks.md is what scripts/benchmarks_table.py makes of the runs, and claims nothing that no run has."""

import copy
import subprocess
import sys

import pytest
from support.sluice_process import SOURCE

sys.path.insert(0, str(SOURCE / "scripts"))
import benchmarks_table  # noqa: E402


def test_the_document_is_made_of_the_runs():
    assert benchmarks_table.DOCUMENT.read_text() == benchmarks_table.document(*benchmarks_table.read()), "run scripts/benchmarks_table.py --write"


def test_each_number_of_a_claim_stands_in_its_run():
    claims, runs = benchmarks_table.read()
    assert sum(len(section["claims"]) for section in claims["sections"]) > 80
    assert list(benchmarks_table.unfounded(claims, runs)) == []


@pytest.mark.parametrize("change, told", [
    ({"figure": "12345 MiB"}, "12345 does not stand in budget"),
    ({"run": "none"}, "names the run 'none'"),
    ({"machine": "none"}, "and a machine that are not both there"),
])  # fmt: skip
def test_a_claim_without_a_measurement_is_found(change, told):
    claims, runs = copy.deepcopy(list(benchmarks_table.read()))
    claims["sections"][0]["claims"][0].update(change)
    assert told in " ".join(benchmarks_table.unfounded(claims, runs))


def test_a_run_is_printed_whole():
    command = [sys.executable, SOURCE / "scripts" / "benchmarks_table.py", "--run"]
    printed = subprocess.run([*command, "ranks-alone"], capture_output=True, text=True, check=True).stdout
    assert "two ranks, stage 3 | 4.07 | 1.045 | 1673 MiB" in printed and "ranks_vs_alone.py" in printed
    refused = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert refused.returncode == 1 and "there is no run 'nothing'; there are budget, " in refused.stderr


def test_each_run_has_a_claim_or_a_document_that_names_it():
    claims, runs = benchmarks_table.read()
    claimed = {claim["run"] for section in claims["sections"] for claim in section["claims"]}
    documents = "".join(path.read_text() for path in (SOURCE / "docs").rglob("*.md"))
    assert [run for run in runs["runs"] if run not in claimed and run not in documents] == []
