"""A project in C uses what `cmake --install` has installed, by CMake and by pkg-config."""

import os
import subprocess
from pathlib import Path

import pytest

from support.sluice_process import BUILD, SLUICE, SOURCE

PROGRAM = """
#include <sluice.h>
#include <stdio.h>
int main(void) { return puts(sluice_version()) < 0 || sluice_abi_version() != SLUICE_ABI_VERSION; }
"""
NO_CXX = {"CXX": "/bin/false"}  # a C compiler must be enough


def run(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, **more)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An installation that was moved."""
    if not SLUICE.exists():
        pytest.skip(f"{SLUICE} is not built")
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--prefix", folder / "first", "--strip")
    return (folder / "first").rename(folder / "moved")


def only(folder, name):
    found = list(Path(folder).rglob(name))
    assert len(found) == 1, found
    return found[0]


def flags_of(prefix, *asked):
    return run("pkg-config", *asked, "sluice", env=os.environ | {"PKG_CONFIG_PATH": only(prefix, "sluice.pc").parent}).split()


def build_by_cmake(prefix, source, build):
    run(
        "cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror",
        env=os.environ | NO_CXX,
    )  # fmt: skip
    run("cmake", "--build", build)


def build_by_pkg_config(prefix, source, program, *more):
    run("cc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", source, *flags_of(prefix, "--cflags", "--libs"), *more, "-o", program)
    return os.environ | {"LD_LIBRARY_PATH": str(only(prefix, "libsluice_c.so").parent)}


def version_of(prefix):
    return run(prefix / "bin" / "sluice", "--version").split()[1]


def test_three_lines_of_cmake_build_a_program(prefix, tmp_path):
    (tmp_path / "program.c").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(program LANGUAGES C)\n"
        f"find_package(sluice {version_of(prefix)} REQUIRED)\n"
        "add_executable(program program.c)\ntarget_link_libraries(program PRIVATE sluice::sluice)\n"
    )
    build_by_cmake(prefix, tmp_path, tmp_path / "build")
    assert run(tmp_path / "build" / "program").strip() == version_of(prefix)


def test_the_installed_example_builds_and_runs_by_both(prefix, tmp_path):
    source = only(prefix, "network.c")
    build_by_cmake(prefix, source.parent, tmp_path / "build")
    assert "the same after loading" in run(tmp_path / "build" / "network", tmp_path)
    found = build_by_pkg_config(prefix, source, tmp_path / "by-pkg-config", "-lm")
    assert "the same after loading" in run(tmp_path / "by-pkg-config", tmp_path, env=found)


def test_what_is_installed_to_build_on_is_c_alone(prefix):
    headers = [path.relative_to(prefix) for path in prefix.rglob("*") if path.suffix in {".h", ".hpp"}]
    names = ("sluice", "sluice_arrays", "sluice_device", "sluice_files", "sluice_pipeline", "sluice_ranks")
    assert sorted(headers) == [Path("include") / f"{name}.h" for name in names]
    assert not any(word.startswith("-std") for word in flags_of(prefix, "--cflags", "--libs"))
    for header in headers:
        assert (prefix / header).read_bytes() == (SOURCE / "bindings" / "c" / header.name).read_bytes()


def test_a_moved_installation_names_its_place(prefix):
    flags = " ".join(flags_of(prefix, "--cflags", "--libs"))
    assert str(prefix) in flags and str(prefix.with_name("first")) not in flags
