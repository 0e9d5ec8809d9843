"""The short form of scripts/fault_campaign.py: some injected faults, and each real one once."""

import subprocess

import pytest
from fault_campaign import RealFaults
from kill_campaign import SLUICE

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")


def test_injected_faults_are_survived_or_reported():
    program = SLUICE.parent / "fault_campaign"
    done = subprocess.run([program, "200", "1000000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "ended with an error that names the file" in done.stdout


def test_real_faults_are_survived_or_reported(tmp_path):
    faults = RealFaults(tmp_path, seed=3)
    told = []
    faults.all(1, told.append)
    print("\n".join(told))
    assert faults.reported >= 2, told  # runs cannot survive flips and limits
    assert faults.survived >= 3, told  # they must survive the others
