"""The wheel works outside of the checkout, installed into an empty environment without a network."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.sluice_process import SOURCE
from support.wheels import made_by, make_wheel

TINY_ENGINE = """
import array, sluice
unit = sluice.Unit("unit", [sluice.Parameter("weight", (8, 8))])
with sluice.Engine([unit], sluice.Options(memory="1GiB", threads=1)) as engine:
    engine.set_values("unit", {"weight": array.array("f", [1.0] * 64)})
    engine.begin_step()
    with engine.acquire("unit", gradient=True):
        engine.add_gradient("weight", array.array("f", [0.5] * 64))
    assert abs(engine.step().gradient_norm - 4.0) < 1e-6
    assert engine.get_values("unit")["weight"][0, 0] < 1.0
"""
SYSTEM = re.compile(r"(lib(c|m|dl|pthread|rt|gcc_s|stdc\+\+)\.so|ld-linux)")


def run(*words, cwd, **environment):
    """Runs a process outside of the checkout, without its variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE", "PYTHON", "LD_"))}
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=300, cwd=cwd, env=clean | environment
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel and nothing else."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd="/")
    interpreter = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", interpreter]
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd="/", PIP_CONFIG_FILE=os.devnull)
    return interpreter


def installed(python):
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return packages


def test_it_trains_an_engine(python, tmp_path):
    run(python, "-c", TINY_ENGINE, cwd=tmp_path)


def test_the_program_trains_a_native_model(python, tmp_path):
    (tmp_path / "book.txt").write_text("once upon a time " * 200)
    words = "--model tiny --data book.txt --steps 2 --seq 16 --batch 2 --memory 512MiB --out run".split()
    assert "2 steps done" in run(python, "-m", "sluice", "train", *words, cwd=tmp_path)
    code = "import sluice; r = sluice.train(model='tiny', data='book.txt', steps=1, seq=16, memory='512MiB'); print(r)"
    assert "TrainResult(steps=1, " in run(python, "-c", code, cwd=tmp_path)
    told = run(python.parent / "sluice", "--help", cwd=tmp_path)
    assert "doctor" in told and "tokenize" in told


def test_with_torch_beside_it_there_is_one_openmp(python, tmp_path):
    import torch

    code = (
        "import re, torch\ntorch.ones(300, 300) @ torch.ones(300, 300)\n" + TINY_ENGINE + "torch.ones(300, 300).exp()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(*sorted(set(re.findall(r'/\\S*lib(?:gomp|iomp|omp)\\S*', maps))), sep='\\n')\n"
        "assert 'libsluice_c' in maps and 'dnnl-' not in maps and 'sluice_dnnl' not in maps\n"
    )
    beside = Path(torch.__file__).resolve().parents[1]
    loaded = run(python, "-c", code, cwd=tmp_path, PYTHONPATH=str(beside)).split()
    assert len(loaded) == 1 and "torch" in loaded[0], loaded


def test_its_libraries_need_the_system_and_themselves_alone(python):
    packages = installed(python)
    natives = [*(packages / "sluice").glob("*.so"), packages / "sluice" / "sluice"]
    natives += (packages / "sluice_train.libs").glob("*.so*")
    names = {path.name for path in natives}
    for path in natives:
        dynamic = run("readelf", "-d", path, cwd="/")
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        outside = [name for name in needed if name not in names and not SYSTEM.match(name)]
        assert [name for name in outside if (path.name, name) != ("libsluice_mpi.so", "libmpi.so.40")] == [], path
        for rpath in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
            assert set(rpath.split(":")) <= {"$ORIGIN", "$ORIGIN/../sluice_train.libs"}, path
    symbols = run("nm", "-D", "--defined-only", packages / "sluice" / "libsluice_c.so", cwd="/").splitlines()
    exported = {line.split()[-1] for line in symbols}
    assert len(exported) > 20 and all(name.startswith("sluice_") for name in exported), exported


def test_what_it_needs_of_the_system_is_in_its_name(wheel):
    assert re.fullmatch(r"sluice_train-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name), wheel.name
    assert f"`{wheel.name.split('-')[4].removesuffix('.whl')}`" in (SOURCE / "docs/guide/first-run.md").read_text()


def test_the_licence_of_all_that_it_bundles_is_inside_and_listed(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    bundled = {re.match(r"lib(\w+?)-[0-9a-f]{8}\.so", f.split("/")[1])[1] for f in files if "train.libs/lib" in f}
    licences = [f.rsplit("/", 1)[1] for f in files if "/licenses/LICENSE" in f]
    listed = (SOURCE / "docs" / "dependencies.md").read_text().split("## In the wheel")[1]
    assert len(bundled) > 8 and "LICENSE" in licences
    for name in bundled:
        assert any(name.lower() in licence for licence in licences), name
    for licence in licences:
        package = licence.removeprefix("LICENSE.")
        assert licence == "LICENSE" or f"`{package}`" in listed or package[0].isupper(), package


def test_one_that_would_refuse_a_gpu_is_not_made(tmp_path):
    without, out = tmp_path / "build", tmp_path / "out"
    without.mkdir()
    (without / "cmake_install.cmake").touch()  # it installs nothing
    refused = make_wheel(out, SLUICE_BUILD=str(without))
    assert refused.returncode == 1 and not out.exists()
    for words in ("no libsluice_kernels.fatbin", "would refuse every GPU", "scripts/setup.sh --python --cuda", "--cpu"):
        assert words in refused.stderr
    misspelled = make_wheel(out, "--gpu")
    assert misspelled.returncode == 2 and "'--gpu' is not --built or --cpu" in misspelled.stderr


@pytest.mark.long
def test_one_for_the_cpu_alone_is_made_where_it_is_asked_for(tmp_path):
    names = zipfile.ZipFile(made_by(tmp_path / "out", "--cpu")).namelist()
    assert "sluice/libsluice_c.so" in names and not {"sluice/libsluice_cuda.so", "sluice/libsluice_kernels.fatbin"} & {*names}
