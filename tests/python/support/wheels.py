"""Makes wheels of what is built, by scripts/wheel.sh."""

import fcntl
import os
import subprocess

import pytest
from support.sluice_process import SLUICE, SOURCE


def make_wheel(out, *words, **environment):
    """Runs scripts/wheel.sh on what is built. Returns the finished process."""
    variables = os.environ | {"SLUICE_WHEEL": str(out)} | environment
    return subprocess.run([SOURCE / "scripts" / "wheel.sh", "--built", *words], capture_output=True, text=True, timeout=300, env=variables)


def made_by(out, *words):
    """Returns the wheel in that folder, which is made where another process has not."""
    if not SLUICE.exists():
        pytest.skip(f"{SLUICE} is not built")
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            done = make_wheel(out, *words)
            assert done.returncode == 0, done.stderr + done.stdout
    (made,) = out.glob("*.whl")
    return made
