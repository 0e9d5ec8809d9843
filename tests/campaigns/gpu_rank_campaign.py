"""Kills (SIGKILL) or stops (SIGSTOP) a random rank of a wrapped model at a random moment, also during saves, where ranks compute on fake
GPUs. All others must end in time with an error that names that rank. Then the run resumes at another stage, in another place, and in
every fourth round on CPUs. At the end its losses, norms, parameters and checkpoint must be those of an undisturbed run on CPUs."""
import collections
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

from kill_campaign import PATIENCE, Campaign, final_files, leftovers

from rank_campaign import SILENCE
from support import rank_pool

RANK = pathlib.Path(__file__).resolve().parent / "gpu_rank.py"
STEPS = 6
SETTINGS = {  # a run may resume with any of them
    "stage": [0, 1, 2, 3],
    "place": ["memory", "disk", {"parameters": "memory", "gradients": "device", "state": "memory"}],
}


class GpuRankCampaign(Campaign):
    def __init__(self, folder, ranks, seed=0, within=2, steps=STEPS):
        self.folder, self.ranks, self.within, self.steps = pathlib.Path(folder), ranks, within, steps
        self.random, self.kills, self.rounds, self.slowest = random.Random(seed), collections.Counter(), 0, 0.0
        self.told = {}  # of the present round: by rank and step, the loss and the norm
        self.finish("reference", {"gpu": None, "stage": 0, "place": "memory"})
        self.reference = self.result("reference")

    def options(self):
        """The options of a run, drawn anew."""
        gpu = {"schedule": self.random.choice(["early", "late", "random"]), "seed": self.random.randrange(1000)}
        joined_by = self.random.choice(["peers", "nccl", "host"])
        gpu |= {"has_peers": joined_by == "peers", "has_nccl": joined_by == "nccl"}
        chosen = {name: self.random.choice(values) for name, values in SETTINGS.items()}
        if chosen["stage"] == 3 and chosen["place"] == SETTINGS["place"][-1]:
            chosen["place"] = "memory"
        on_cpu = self.random.randrange(4) == 0
        if on_cpu and chosen["place"] not in SETTINGS["place"][:2]:
            chosen["place"] = "memory"
        updates = self.random.choice([None, "cpu"])  # with which shards are in host memory
        if on_cpu:
            return {"gpu": None, "updates": None} | chosen
        return {"gpu": gpu, "updates": updates} | chosen | ({"gpu_links": "nccl"} if joined_by == "nccl" else {})

    def start(self, name, options):
        """Starts the processes of all ranks."""
        port, self.outputs = rank_pool.free_port(), []
        words = [str(self.folder / name), str(self.steps), json.dumps({**options, "silence": SILENCE})]
        processes = []
        for rank in range(self.ranks):
            output = self.folder / f"{name}.{rank}.log"
            self.outputs.append(output)
            with open(output, "wb") as log:
                variables = rank_pool.variables_of(rank, self.ranks, port) | {"TMPDIR": str(self.folder)}
                processes.append(subprocess.Popen([sys.executable, str(RANK), *words], env=variables, stdout=log, stderr=log))
        return processes

    def lines(self, rank):
        """The lines that a rank has printed."""
        text = self.outputs[rank].read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("[") and line.endswith("]")]

    def note(self):
        """Records the ranks' results of steps. A step that is computed again must have the same result."""
        for rank in range(self.ranks):
            for first, *seen in self.lines(rank):
                if first != "ready":
                    assert self.told.setdefault((rank, first), seen) == seen, f"rank {rank} computed step {first} again, to {seen}"

    def log(self, options):
        return f"{options}\n" + "\n".join(output.read_text(errors="replace") for output in self.outputs)

    def wait_for(self, processes, ready):
        """Waits until ready(). Returns False where a process ended before."""
        end = time.monotonic() + PATIENCE
        while not ready():
            if any(process.poll() is not None for process in processes):
                return False
            assert time.monotonic() < end, "the run stands still"
            time.sleep(0.002)
        return True

    def aimed(self, processes, out, before):
        """Waits for a moment. Returns False where a rank ended before."""
        if not self.wait_for(processes, lambda: all(["ready"] in self.lines(rank) for rank in range(self.ranks))):
            return False
        if self.random.randrange(2) == 0:
            end = time.monotonic() + self.random.random() * 2
            return self.wait_for(processes, lambda: time.monotonic() > end)
        if not self.wait_for(processes, lambda: bool(leftovers(out) - before)):
            return False
        time.sleep(self.random.random() * 0.02)
        return True

    def kill_once(self, name):
        out, options = self.folder / name, self.options()
        before = leftovers(out)
        processes = self.start(name, options)
        try:
            if not self.aimed(processes, out, before):
                self.end(processes, options)
                return False
            victim = self.random.randrange(self.ranks)
            number = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
            begin = time.monotonic()
            os.kill(processes[victim].pid, number)
            where = self.interrupted(out, before)
            ended = self.wait_for_others(processes, victim, number, begin)
            assert ended, f"rank {victim} got {number.name} ({where}), and others live on: {self.log(options)}"
            processes[victim].kill()
            if ["ended"] in [line[:1] for rank in range(self.ranks) for line in self.lines(rank)]:
                return False  # no rank notices a loss after the last step
            self.check_names(victim, number, options)
            self.note()
            self.kills[f"{'killed' if number == signal.SIGKILL else 'stopped'} {where}"] += 1
            return True
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def wait_for_others(self, processes, victim, number, begin):
        others = [process for rank, process in enumerate(processes) if rank != victim]
        allowed = self.within + (0 if number == signal.SIGKILL else SILENCE)
        while any(process.poll() is None for process in others):
            if time.monotonic() > begin + allowed:
                return False
            time.sleep(0.01)
        self.slowest = max(self.slowest, time.monotonic() - begin - (allowed - self.within))
        return True

    def check_names(self, victim, number, options):
        how = "is gone" if number == signal.SIGKILL else "has given no sign of life"
        of_gpu = rf" \(GPU {victim}, [0-9a-f:.]+\)" if options["gpu"] else ""
        reason = f"rank {victim}{of_gpu} {how}"
        for rank, output in enumerate(self.outputs):
            text = output.read_text(errors="replace")
            assert rank == victim or re.search(reason, text), f"rank {rank} does not say '{reason}': {self.log(options)}"

    def end(self, processes, options):
        for process in processes:
            assert process.wait(PATIENCE) == 0, self.log(options)
        self.note()

    def finish(self, name, options=None):
        options = self.options() if options is None else options
        self.end(self.start(name, options), options)

    def result(self, name):
        told, self.told = self.told, {}
        return told, final_files(self.folder / name, self.steps)

    def check(self, name):
        told, files = self.result(name)
        expected, expected_files = self.reference
        assert told == {key: expected[key] for key in told}, f"{name}: losses, norms or parameters differ"
        assert files == expected_files and files, f"{name}: the checkpoint differs"
        left = sorted(entry for entry in os.listdir(self.folder / name) if not entry.startswith("step-"))
        assert left in ([], [".run"]), f"{name}: {left} are left"
