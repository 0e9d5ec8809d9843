"""Causes real faults at a random rank of a run of several, as fault_campaign.py does for a run of one. After any fault, no rank may hang, all others
must name the first failure, and --resume must lead to the bits of a run without faults, with other ranks, stages and places (rank_campaign.py)."""
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import time

from fault_campaign import RealFaults
from kill_campaign import PATIENCE
from rank_campaign import SILENCE, RankCampaign, processes_of, ranks_of


class OneRank:
    """A rank in place of a run's process."""

    def __init__(self, pid):
        self.pid = pid

    def send_signal(self, number):
        os.kill(self.pid, number)


class RankFaults(RealFaults):
    def __init__(self, folder, ranks, seed):
        self.random = random.Random(seed)
        self.campaign = RankCampaign(folder, ranks, seed)
        self.folder, self.disk = pathlib.Path(folder), self.campaign.disk
        self.number = 0
        self.survived = self.reported = self.missed = 0
        self.hit_rank = None

    def start(self, name, before=None):
        self.campaign.rounds, self.hit_rank = self.number, None  # every other run is reproducible
        words = self.campaign.resumed(name, "disk")
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=before)  # noqa: PLW1509 - no threads here

    def of_a_rank(self, hit):
        """Returns a fault that hits any rank instead of the started process, which is rank 0."""

        def hit_one(process, path):
            ranks = ranks_of(str(self.campaign.folder / self.name_of(process)))
            if len(ranks) < self.campaign.ranks:  # the run ends
                self.missed += 1
                return
            self.hit_rank = self.random.choice(sorted(ranks))
            rank = OneRank(ranks[self.hit_rank])
            try:
                hit(rank, self.swap_file(rank) or "/proc/none")
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                self.missed += 1

        return hit_one

    def name_of(self, process):
        return pathlib.Path(process.args[process.args.index("--out") + 1]).name

    def limit_file_size(self, rank, path):
        """From now on the rank cannot write beyond half a MiB of a file, which its part of the next checkpoint exceeds. (Its swap file
        has its size, but what it writes there counts, too.)"""
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    def stop(self, rank, path):
        rank.send_signal(signal.SIGSTOP)
        time.sleep(SILENCE / 4)
        rank.send_signal(signal.SIGCONT)

    def end(self, process, name, must_survive):
        word, ranks = str(self.folder / name), self.campaign.ranks
        try:
            process.wait(timeout=PATIENCE)
            until = time.monotonic() + PATIENCE / 4
            while processes_of(word) and time.monotonic() < until:
                time.sleep(0.01)
            assert not processes_of(word), f"{name}: a rank lives on: {(self.folder / f'{name}.log').read_text()}"
        finally:
            for pid in processes_of(word):
                os.kill(pid, signal.SIGKILL)
        if process.returncode != 0 and self.hit_rank is not None:
            self.check_names(name, ranks)
        super().end(process, name, must_survive)

    def check_names(self, name, ranks):
        """The rank with the fault reports it, and each other rank names that rank."""
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        for rank in range(ranks):
            begin = re.escape("sluice: error: " if rank == 0 else f"sluice: rank {rank}: error: ")
            names = "" if rank == self.hit_rank else rf".*\brank {self.hit_rank}\b"
            assert re.search(f"^{begin}{names}", log, re.MULTILINE), (
                f"{name}: rank {rank} does not tell of rank {self.hit_rank}: {log}")

    def kinds(self):
        return {
            "bits flipped in a rank's swap file": lambda: self.round("flip", hit=self.of_a_rank(self.flip_bits)),
            "a rank's swap file cut": lambda: self.round("cut", hit=self.of_a_rank(self.cut_file)),
            "a rank's files limited to half a MiB": lambda: self.round("limit", hit=self.of_a_rank(self.limit_file_size)),
            "a rank stopped and continued": lambda: self.round("pause", hit=self.of_a_rank(self.stop), must_survive=True),
            "a file system that others fill": self.full_file_system,
        }
