"""The file of the GPU's kernels, and the compiler that is taken for it (scripts/kernels.sh, scripts/setup.sh --cuda)."""

import shutil
import struct
import subprocess

import pytest
from support.sluice_process import BUILD, SOURCE

KERNELS = BUILD / "lib" / "libsluice_kernels.fatbin"
ID_BYTES = 64  # a digest in hexadecimal digits, before the fat binary
PTX, MACHINE_CODE = 1, 2


def code_in(fat_binary):
    """The kind and the architecture of each entry, as CUDA's fatbinary_section.h and its tools write them."""
    magic, _, header_bytes, entries_bytes = struct.unpack_from("<IHHQ", fat_binary)
    assert magic == 0xBA55ED50 and header_bytes + entries_bytes == len(fat_binary)
    found, at = [], header_bytes
    while at < len(fat_binary):
        kind, _, entry_header_bytes, code_bytes = struct.unpack_from("<HHIQ", fat_binary, at)
        found.append((kind, *struct.unpack_from("<I", fat_binary, at + 28)))
        at += entry_header_bytes + code_bytes
    assert at == len(fat_binary)
    return found


@pytest.mark.skipif(not KERNELS.exists(), reason=f"{KERNELS.name} is not built")
def test_the_kernels_have_code_for_each_architecture_and_for_later_ones():
    assert sorted(code_in(KERNELS.read_bytes()[ID_BYTES:])) == [(PTX, 100), (MACHINE_CODE, 80), (MACHINE_CODE, 90), (MACHINE_CODE, 100)]


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def write_nvcc(path, release):
    return write_program(path, f'echo "Cuda compilation tools, release {release}, V{release}.99"')


@pytest.fixture
def elsewhere(tmp_path):
    """The scripts in another folder, whose .venv notes what is installed, on a system without nvcc."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup.sh", "kernels.sh"):
        shutil.copy(SOURCE / "scripts" / name, tmp_path / "scripts" / name)
    write_program(tmp_path / "bin" / "dpkg-query", "echo installed")
    write_program(tmp_path / ".venv" / "bin" / "python", f'echo "$@" >> {tmp_path}/asked')
    return tmp_path


def run(folder, script, *words):
    variables = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "CUDA_HOME": str(folder / "cuda")}
    return subprocess.run([folder / "scripts" / script, *words], capture_output=True, text=True, env=variables, timeout=60)


@pytest.mark.parametrize("release, is_enough", [(None, False), ("12.4", False), ("13.0", True), ("14.1", True)])
def test_the_compiler_is_installed_where_the_systems_is_too_old(elsewhere, release, is_enough):
    if release is not None:
        write_nvcc(elsewhere / "bin" / "nvcc", release)
    done = run(elsewhere, "setup.sh", "--cuda")
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "asked").exists() is not is_enough
    if not is_enough:
        assert "nvidia-cuda-nvcc==13" in (elsewhere / "asked").read_text()
    found = run(elsewhere, "kernels.sh", "--nvcc")
    if is_enough:
        assert found.stdout.strip() == str(elsewhere / "bin" / "nvcc")
    else:
        assert found.returncode == 1 and "scripts/setup.sh --cuda" in found.stderr
        assert release is None or f"{elsewhere / 'bin' / 'nvcc'} is of CUDA 12" in found.stderr
