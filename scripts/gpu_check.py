#!/usr/bin/env python3
"""Checks a machine's GPU in at most 8 minutes: the rates of its link, whether its driver behaves as the tests' fake driver,
whether kernels and engine have the bits of the CPU's, the time of a step, and the findings of compute-sanitizer.

    scripts/gpu_check.sh [--driver PATH] [--only PART...] [--out FOLDER]

Each part is a process with a time limit of its own, to which the unused time of earlier parts is added, and every part runs whether
or not others fail. FOLDER (build/gpu_check) gets report.json, report.txt and log.txt, which are rewritten after each part.
scripts/gpu_report.py makes the table of docs/gpu.md from such reports. Where no GPU can be opened, each part reports why it was
skipped. With --driver build/lib/libsluice_fake_cuda.so the script runs on the tests' fake driver, with small sizes, and the report
states that it proves nothing about a GPU.

The exit status is 0 where every part that ran has passed, 1 where one has failed, and 3 where nothing was seen."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import gpu_parts  # noqa: E402
from gpu_parts import BUILD, PARTS, PROBE_LIMIT_S, ROOT, WHOLE_LIMIT_S, Done, Failure, Skip  # noqa: E402

NOTHING_SEEN = 3
FAKE = "This was the fake driver of the tests, which proves nothing about a GPU."


def ended(process, limit_s):
    """Waits for a process, and at the time limit kills it and all its descendants. Returns whether it ended by itself."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass  # the process hangs in the driver, and no signal ends it


def run(command, limit_s, environment):
    """Runs a command. Returns None after a timeout, else Done; and its output."""
    with tempfile.TemporaryDirectory() as folder:
        tests, log = pathlib.Path(folder, "tests.json"), pathlib.Path(folder, "log")
        variables = environment | {"GTEST_OUTPUT": f"json:{tests}"}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=variables,
                                       start_new_session=True)
            in_time = ended(process, limit_s)
        output = log.read_text(errors="replace")
        written = tests.read_text() if tests.exists() else ""
        return Done(process.returncode, output, written) if in_time else None, output


def look(part, unusable, is_fake, limit_s, environment, log):
    """Returns the report's entry of a part. `unusable` says why no GPU can be opened, or is None."""
    entry = {"part": part.name, "command": part.shown, "outcome": "skipped", "why": unusable, "seconds": 0.0, "figures": {}}
    if unusable:
        return entry
    begin = time.monotonic()
    try:
        if limit_s <= 0:
            raise Skip(f"the parts before it took all of the {WHOLE_LIMIT_S} s")
        command = part.command(is_fake, limit_s)
        done, output = run(command, limit_s, environment)
        log.write(f"==== {part.name}: {' '.join(command)}\n{output}\n")
        if done is None:
            entry |= {"outcome": "timed out", "why": f"it took more than {limit_s:.0f} s and was killed, in or after: "
                                                     f"{(output.strip().splitlines() or ['nothing was printed'])[-1][:300]}"}
        else:
            entry |= {"outcome": "passed", "figures": part.read(done)}
    except Skip as skip:
        entry |= {"outcome": "skipped", "why": str(skip)}
    except Failure as failure:
        entry |= {"outcome": "failed", "why": str(failure)}
    except Exception as error:  # a defect in this script must not stop the other parts
        entry |= {"outcome": "failed", "why": f"it cannot be judged: {type(error).__name__}: {error}"}
    return entry | {"seconds": round(time.monotonic() - begin, 1)}


def probe(environment, log):
    """Returns the GPU's description, whether it is the fake, and None; or nothing, and the reason why no GPU can be
    opened."""
    try:
        whole = environment | {"GTEST_TOTAL_SHARDS": "1", "GTEST_SHARD_INDEX": "0"}  # it is one test, which a share may not have
        done, output = run(gpu_parts.probe_command(), PROBE_LIMIT_S, whole)
        log.write(f"==== which GPU it is\n{output}\n")
        if done is None:
            raise Skip(f"no GPU can be opened: the driver did not answer in {PROBE_LIMIT_S} s")
        return *gpu_parts.read_probe(done), None
    except Skip as skip:
        return None, False, str(skip)


def driver_version():
    """The version of NVIDIA's driver, as in 580.95.05, or "unknown"."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    file = pathlib.Path("/proc/driver/nvidia/version")
    for text in (told, file.read_text() if file.exists() else ""):
        if found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
            return found[0]
    return "unknown"


def commit():
    """The commit that scripts/bundle.sh packed, or that of the source tree, whose build may be older."""
    packed = ROOT / "COMMIT"
    if packed.exists():
        return packed.read_text().strip()
    try:
        told = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"


def machine():
    return {"cores": len(os.sched_getaffinity(0)), "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(), "glibc": platform.libc_ver()[1]}


def to_text(report):
    """Returns the report as text."""
    gpu = report["gpu"]
    lines = [f"GPU check of {report['date']}, sources {report['commit']}"]
    if gpu:
        lines.append(f"{gpu['name']}, {gpu['memory'] / 2**30:.2f} GiB, compute capability {gpu['capability']}, driver "
                     f"{report['driver']}, CUDA {gpu['cuda_of_driver'] // 1000}.{gpu['cuda_of_driver'] % 1000 // 10}")
    if report["is_fake"]:
        lines.append(FAKE)
    titles = {name: title for part in PARTS for name, title in part.lines.items()}
    for part in report["parts"]:
        lines += ["", f"{part['part']}: {part['outcome']} ({part['seconds']} s)" + (f": {part['why']}" if part["why"] else "")]
        lines += [f"  {titles[name]}: {figure}" for name, figure in part["figures"].items()]
    return "\n".join(lines) + "\n"


def write(report, folder):
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.txt").write_text(to_text(report))


def check(parts, driver, folder):
    """Runs all parts, and returns the report."""
    begin = time.monotonic()
    environment = os.environ | {"SLUICE_CUDA_DRIVER": str(pathlib.Path(driver).resolve()) if pathlib.Path(driver).exists() else driver}
    with (folder / "log.txt").open("w") as log, tempfile.TemporaryDirectory() as libraries:
        environment |= gpu_parts.packed_libraries(libraries)
        gpu, is_fake, unusable = probe(environment, log)
        report = {"version": 1, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(),
                  "gpu": gpu, "driver": "fake" if is_fake else driver_version(), "is_fake": is_fake, "machine": machine(), "parts": []}
        later = sum(part.limit_s for part in parts)
        for part in parts:
            later -= part.limit_s
            limit_s = WHOLE_LIMIT_S - (time.monotonic() - begin) - later
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            report["parts"].append(look(part, unusable, is_fake, limit_s, environment, log))
            write(report, folder)
    return report


def status_of(report):
    outcomes = {part["outcome"] for part in report["parts"]}
    if outcomes & {"failed", "timed out"}:
        return 1
    return 0 if "passed" in outcomes else NOTHING_SEEN


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", default=os.environ.get("SLUICE_CUDA_DRIVER", "libcuda.so.1"), help="by default libcuda.so.1")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART",
                        help="one or more of " + ", ".join(part.name for part in PARTS))
    parser.add_argument("--out", type=pathlib.Path, default=BUILD / "gpu_check", help="the report's folder")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the running part is killed, too
    a.out.mkdir(parents=True, exist_ok=True)
    report = check([part for part in PARTS if not a.only or part.name in a.only], a.driver, a.out)
    print(to_text(report), end="")
    return status_of(report)


if __name__ == "__main__":
    sys.exit(main())
