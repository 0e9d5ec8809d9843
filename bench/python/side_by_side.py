"""The benches' common parts: models, memory, running the command line and fio, and files."""
import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile

CORES = os.cpu_count()
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Layers, width, heads.
SHAPES = {"gpt2-124m": (12, 768, 12), "gpt2-355m": (24, 1024, 16), "gpt2-774m": (36, 1280, 20), "gpt2-1.5b": (48, 1600, 25)}


def parser_of(doc, disk=None, shapes=False, **defaults):
    """Makes the parser of a bench's options: --json; --disk, where `disk` says what the folder is for; and one for each of
    `defaults`, of its type. With `shapes` the model must be one of SHAPES."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    if disk:
        parser.add_argument("--disk", required=True, help=disk)
    for name, value in defaults.items():
        choices = SHAPES if shapes and name == "model" else None
        parser.add_argument(f"--{name}", type=type(value), default=value, choices=choices, help=f"by default {value}")
    return parser


def gpt2_config(model):
    """Returns the configuration of transformers for a name of SHAPES, without dropout."""
    from transformers import GPT2Config

    layers, width, heads = SHAPES[model]
    return GPT2Config(n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def peak_bytes():
    """Returns the most memory that this process held since it began, or since forget_peak()."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def temporary_folder(disk):
    """Makes a folder that is removed when the block ends, also where SIGTERM ends it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(dir=disk) as name:
        yield pathlib.Path(name)


def free_port():
    """Returns a port of this machine, as text, on which nobody listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def make_tokens(path, count):
    """Writes a file of tokens (2 bytes each) of pseudo-random bytes, which every vocabulary has."""
    path.write_bytes(bytes(byte for value in random.Random(1).randbytes(count) for byte in (value, 0)))


def sluice(*arguments, build=ROOT / "build", launcher=()):
    """Runs a command of a build to its end, after the launcher's words, and returns what it printed."""
    command = [*launcher, pathlib.Path(build, "bin/sluice"), *arguments]
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def sluice_steps(folder, *arguments, build=ROOT / "build", launcher=()):
    """Returns the metrics of the steps after the first."""
    metrics = folder / "metrics.jsonl"
    for earlier in folder.glob("metrics*.jsonl"):  # each rank has one
        earlier.unlink()
    sluice("train", "--eval-every", 0, "--metrics", metrics, "--progress", "none", *arguments, build=build, launcher=launcher)
    return [json.loads(line) for line in metrics.read_text().splitlines()][1:]


def fio(folder, *jobs):
    """Runs jobs at once (io_uring, O_DIRECT, 1 MiB blocks, huge-page buffers), and returns fio's record of each."""
    common = ["--ioengine=io_uring", "--direct=1", "--bs=1M", "--iodepth=32", f"--directory={folder}", "--mem=malloc",
              "--output-format=json"]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    out = subprocess.run(["fio", *common, *jobs], check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(out[out.index("{"):])["jobs"]


def replay(folder, read, written):
    """Returns the seconds that fio takes to read and write a step's bytes at once, and the processor's seconds for that."""
    jobs = []
    for name, way, size in (("in", "read", read), ("out", "write", written)):
        mebibytes = max(1, size >> 20)
        fio(folder, "--name=" + name, "--rw=write", f"--size={mebibytes}M", "--end_fsync=1")
        jobs += ["--name=" + name, "--rw=" + way, f"--size={mebibytes}M"]
    results = fio(folder, *jobs)
    for name in ("in", "out"):
        (folder / f"{name}.0.0").unlink(missing_ok=True)
    seconds = max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in results) / 1000
    return seconds, sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in results)
