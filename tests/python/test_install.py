"""What `cmake --install` puts down serves a project that knows nothing of this one: by CMake and by pkg-config."""

import os
import subprocess
from pathlib import Path

import pytest

from sluice_process import BUILD, SLUICE

CMAKELISTS = """
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES CXX)
find_package(sluice {version} REQUIRED)
add_executable(consumer main.cc)
target_link_libraries(consumer PRIVATE sluice::sluice)
"""
MAIN = """
int main() {
  const sluice::models::ModelConfig config = sluice::models::preset("tiny");
  const sluice::models::Model model(config, sluice::Dtype::kF32, 1, 8);
  const auto library = sluice::kernels::load_matrix_library(1);  // a file of its own, beside the library
  fmt::print("{} units with {}\\n", model.units().size(), library->name());
  return model.units().size() == config.layers + 2 ? 0 : 1;
}
"""


def run(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, **more)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    if not SLUICE.exists():
        pytest.skip(f"{SLUICE} is not built")
    folder = tmp_path_factory.mktemp("installed") / "prefix"
    run("cmake", "--install", BUILD, "--prefix", folder, "--strip")
    return folder


@pytest.fixture(scope="module")
def consumer(prefix, tmp_path_factory):
    """A program that includes every header that was installed."""
    folder = tmp_path_factory.mktemp("consumer")
    headers = sorted((prefix / "include" / "sluice").rglob("*.h"))
    assert len(headers) > 50
    lines = [f'#include "{header.relative_to(prefix / "include" / "sluice")}"\n' for header in headers]
    (folder / "main.cc").write_text("".join(lines) + MAIN)
    version = run(prefix / "bin" / "sluice", "--version").split()[1]
    (folder / "CMakeLists.txt").write_text(CMAKELISTS.format(version=version))
    return folder


def only(folder, name):
    found = list(Path(folder).rglob(name))
    assert len(found) == 1, found
    return found[0]


def test_a_cmake_project_finds_it(prefix, consumer):
    build = consumer / "build"
    run("cmake", "-S", consumer, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Debug")
    run("cmake", "--build", build)
    assert "units with" in run(build / "consumer")


def test_pkg_config_finds_it(prefix, consumer):
    description = only(prefix, "sluice.pc")
    flags = run("pkg-config", "--cflags", "--libs", "sluice", env=os.environ | {"PKG_CONFIG_PATH": description.parent})
    program, source = consumer / "by-pkg-config", consumer / "few.cc"
    source.write_text('#include "kernels/matrix.h"\n#include "models/model.h"\n' + MAIN)
    run(os.environ.get("CXX", "c++"), source, "-o", program, *flags.split())
    folder = only(prefix, "libsluice.so").parent
    assert "units with" in run(program, env=os.environ | {"LD_LIBRARY_PATH": str(folder)})


def test_what_is_installed_runs_where_it_was_put(prefix):
    found = run(prefix / "bin" / "sluice", "doctor")
    assert "matrix library" in found and "missing" not in found.split("matrix library")[1].splitlines()[0]


def test_an_installation_can_be_moved(prefix, consumer, tmp_path):
    moved = tmp_path / "elsewhere"
    prefix.rename(moved)
    try:
        run("cmake", "-S", consumer, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={moved}")
        flags = run(
            "pkg-config", "--cflags", "--libs", "sluice",
            env=os.environ | {"PKG_CONFIG_PATH": only(moved, "sluice.pc").parent},
        )  # fmt: skip
        assert str(prefix) not in flags and str(moved) in flags
    finally:
        moved.rename(prefix)
