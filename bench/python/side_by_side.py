"""The benches' common parts: models, memory, running the command line and fio, and files."""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile

CORES = os.cpu_count()
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Layers, width, heads.
SHAPES = {"gpt2-124m": (12, 768, 12), "gpt2-355m": (24, 1024, 16), "gpt2-774m": (36, 1280, 20), "gpt2-1.5b": (48, 1600, 25)}


def parser_of(doc, disk=None, shapes=False, as_json=True, **defaults):
    """Makes the parser of a bench's options: --json, unless the bench has none; --disk, where `disk` describes the folder's purpose; and one
    for each of `defaults`, of its type. With `shapes` the model must be one of SHAPES."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if as_json:
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
    """Returns this process's peak memory since its start, or since forget_peak()."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def temporary_folder(disk=None):
    """Makes a folder, by default among the system's temporary ones, that is removed when the block ends, also where SIGTERM ends it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(dir=disk) as name:
        yield pathlib.Path(name)


def free_port():
    """Returns a port of this machine, as text, on which no process listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def write_tokens(path, text):
    """Writes a file of tokens (2 bytes each), which are the text's bytes, as every vocabulary has them, and returns its path."""
    path.write_bytes(bytes(byte for value in text for byte in (value, 0)))
    return path


def make_tokens(path, count):
    """Writes a file of pseudo-random tokens, and returns its path."""
    return write_tokens(path, random.Random(1).randbytes(count))


def make_text(path, count):
    """Writes a text of so many pseudo-random letters, and returns its path."""
    path.write_bytes(bytes(32 + byte % 95 for byte in random.Random(1).randbytes(count)))
    return path


def options_of(a, *names):
    """Returns the bench's options of these names as options of the program."""
    return [word for name in names for word in (f"--{name}", getattr(a, name))]


def rows_of(metrics):
    """Returns the lines of a file of metrics."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def tell(a, result, show):
    """Prints a result: as JSON, or by the function."""
    print(json.dumps(result)) if a.json else show(result)


def run_entry(bench, tables, notes):
    """Returns the entry of docs/benchmarks/runs.json for this call of a bench, without the machine, which the user adds."""
    words = [word for word in sys.argv[1:] if word != "--json"]
    command = shlex.join([".venv/bin/python", f"bench/python/{pathlib.Path(bench).name}", *words])
    return {"date": datetime.date.today().isoformat(), "commands": [command], "tables": tables, "notes": notes}


class Worker:
    """A process that answers each line of its input with a line of JSON, and ends with its input. Its other output goes to a file, whose end is
    told where the process fails."""

    def __init__(self, name, words, environment=None):
        self.name, self.log = name, tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([str(word) for word in words], stdin=subprocess.PIPE, text=True, stdout=subprocess.PIPE,
                                        stderr=self.log, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, question):
        """Lets the process begin."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)

    def answer(self):
        """Waits for the answer."""
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n" + "\n".join(self.log.read().splitlines()[-30:]))
        return json.loads(line)

    def answer_to(self, question):
        self.ask(question)
        return self.answer()


def sluice(*arguments, build=ROOT / "build", launcher=()):
    """Runs a command of a build to its end, after the launcher's words, and returns its output."""
    command = [*launcher, pathlib.Path(build, "bin/sluice"), *arguments]
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def sluice_steps(folder, *arguments, build=ROOT / "build", launcher=()):
    """Returns the metrics of the steps after the first."""
    metrics = folder / "metrics.jsonl"
    for earlier in folder.glob("metrics*.jsonl"):  # each rank has one
        earlier.unlink()
    sluice("train", "--eval-every", 0, "--metrics", metrics, "--progress", "none", *arguments, build=build, launcher=launcher)
    return rows_of(metrics)[1:]


def sluice_ranks(folder, *arguments):
    """Returns the combined report of a run's ranks: the seconds of the steps after the first, the losses of all steps, the greatest
    peak memory of a rank, and the seconds of a step in which a rank waited for others."""
    rows = sluice_steps(folder, *arguments)
    of_ranks = [rows_of(path) for path in folder.glob("metrics*.jsonl")]
    return {"seconds": [row["seconds"] for row in rows], "losses": [row["loss"] for row in of_ranks[0]],
            "peak": max(of_rank[-1]["peak_memory"] for of_rank in of_ranks),
            "rank_wait": statistics.fmean(row["rank_wait_seconds"] for of_rank in of_ranks for row in of_rank[1:])}


def torch_ranks(script, ranks, settings):
    """Runs ranks of PyTorch, of one thread each, and returns their combined report. Each is a process `script --rank SETTINGS` (JSON),
    which prints a line of JSON: its "seconds", its "peak", and, where they are compared, the "losses", which all ranks know."""
    common = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, script, "--rank", json.dumps(settings)], env=common | {"RANK": str(rank)},
                                  stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
    try:
        printed = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # no effect on a process that has ended
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of PyTorch failed with {json.dumps(settings)}")
    told = [json.loads(text) for text in printed]
    return told[0] | {"seconds": [max(each) for each in zip(*(one["seconds"] for one in told), strict=True)],
                      "peak": max(one["peak"] for one in told)}


def ran_by_turns(sides, rounds):
    """Calls each of the sides, which are functions by name, in each round, and returns their results by name."""
    found = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
        print(f"round {number + 1}/{rounds}", file=sys.stderr)
    return found


def add_half(sides, name, peer, side):
    """Adds a side that is called with half of the bytes that a rank of the peer, an earlier side, took in the same round."""
    given, peaks = sides[peer], []

    def remembered():
        found = given()
        peaks.append(found["peak"])
        return found

    sides |= {peer: remembered, name: lambda: side(peaks[-1] // 2)}


def medians(found, tokens):
    """Returns, by side, the median of a step's seconds over all rounds, the rate at which it trains on a step's tokens, the most memory
    of a rank and, where it is known, the mean wait for other ranks. `found` is the result of ran_by_turns()."""
    sides = {}
    for name, runs in found.items():
        seconds = statistics.median(second for run in runs for second in run["seconds"])
        sides[name] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak": max(run["peak"] for run in runs)}
        if "rank_wait" in runs[0]:
            sides[name]["rank_wait"] = statistics.fmean(run["rank_wait"] for run in runs)
    return sides


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
