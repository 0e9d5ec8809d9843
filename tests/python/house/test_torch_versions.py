"""scripts/test_torch.sh, which runs tests with another PyTorch than the one that is pinned."""

import shutil
import subprocess

import pytest
from support.sluice_process import SOURCE

# Stands in for interpreters: notes its words, and what pip is to install; "-m venv --clear FOLDER" makes another one there.
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  -V) echo "Python {release}" ;;
  *venv*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  */dev/stdin*) cat >> {log} ;;
esac
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script in another folder, which has a build, with an interpreter of a release. Returns the finished process, and what
    interpreters noted in it."""
    for name in ("scripts/test_torch.sh", "requirements.txt", "build/lib/libsluice_c.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(SOURCE / "scripts" / "test_torch.sh", tmp_path / "scripts")
    shutil.copy(SOURCE / "requirements.txt", tmp_path)
    (tmp_path / "build" / "lib" / "libsluice_c.so").touch()
    log, python = tmp_path / "log", tmp_path / "python"

    def run(*words, release="3.11.7"):
        python.write_text(PYTHON.format(log=log, release=release))
        python.chmod(0o755)
        log.write_text("")
        variables = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
        done = subprocess.run([tmp_path / "scripts" / "test_torch.sh", *words], capture_output=True, text=True, timeout=60, env=variables)
        return done, log.read_text()

    return run


def test_the_stated_version_is_installed_once_beside_what_else_is_pinned(run):
    done, noted = run("2.11.0")
    assert done.returncode == 0, done.stderr
    assert "torch==2.11.0\n" in noted and "transformers==" in noted and "pytest==" in noted
    pinned = (SOURCE / "requirements.txt").read_text()
    for name in ("setuptools==", "nvidia-cuda-runtime==", "torch==2.13"):
        assert name in pinned and name not in noted
    assert noted.splitlines()[-1].endswith("--dist loadfile tests/python/torch")
    done, noted = run("2.11.0", "tests/python/torch/test_gpu.py", "-x")
    assert done.returncode == 0 and "pip install" not in noted
    assert noted.splitlines()[-1] == "-m pytest -q -p no:cacheprovider tests/python/torch/test_gpu.py -x"
    assert "torch==2.12.0" in run("2.12.0")[1] and "pip install" in run("2.11.0", release="3.12.1")[1]


def test_what_is_missing_is_said(run, tmp_path):
    done, noted = run("tests/python/torch")
    assert done.returncode == 2 and "name the version of PyTorch" in done.stderr and noted == ""
    (tmp_path / "build" / "lib" / "libsluice_c.so").unlink()
    done, noted = run("2.11.0")
    assert done.returncode == 1 and "scripts/build.sh makes it" in done.stderr and noted == ""
