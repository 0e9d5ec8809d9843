"""Kills (SIGKILL) or stops (SIGSTOP) a random rank of a run at a random moment, also during saves. All other ranks must end in time and name that
rank, and no process of the run may be left. Then the run resumes with another stage and another placement, and every other round, which is
--reproducible, with another number of ranks and another mesh of them. At the end its bits must be those of a run that was never stopped: of one rank
for --reproducible, otherwise of as many ranks. (host_campaign.py cuts wires of hosts.)"""
import os
import pathlib
import re
import signal
import subprocess
import time

from kill_campaign import PATIENCE, PLACES, STEPS, Campaign, leftovers

MESHES = {  # of so many ranks, for runs that are --reproducible
    2: ["data=2", "pipeline=2", "tensor=2"],
    3: ["data=3", "pipeline=3"],
    4: ["data=4", "pipeline=4", "tensor=4", "data=2,pipeline=2", "pipeline=2,tensor=2", "tensor=2,data=2"],
}
SILENCE = 3  # seconds: a machine that is busy with other work must not seem silent


def processes_of(word):
    """The ids of processes with this word among their arguments, except zombies."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(word) in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended
            pass
    return found


def ranks_of(word):
    """The processes of a run's ranks, by rank."""
    ranks = {}
    for pid in processes_of(word):
        try:
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        own = [int(v.removeprefix(b"SLUICE_RANK=")) for v in variables if v.startswith(b"SLUICE_RANK=")]
        ranks[own[0] if own else 0] = pid
    return ranks


class RankCampaign(Campaign):
    accumulate, threads = "12", "1"

    def __init__(self, folder, ranks, seed=0, within=2, steps=STEPS):
        self.counts = [n for n in range(2, ranks + 1) if 12 % n == 0]
        self.within, self.slowest = within, 0.0
        self.references = {}  # by the number of ranks; 1 is that of reproducible runs, whatever their number
        super().__init__(folder, seed, steps)
        self.rule = None

    def run_reference(self):
        return self.reference_of(1)

    def reference_of(self, ranks):
        """Returns the result of an uninterrupted run of so many ranks with everything in memory."""
        if ranks not in self.references:
            name = f"reference{ranks}"
            more = ["--reproducible"] if ranks == 1 else ["--ranks", str(ranks), "--stage", "0"]
            result = self.straight(name, self.command(name, "memory", *more))
            self.references[ranks] = result, self.best
        return self.references[ranks][0]

    def begin_round(self):
        """Draws whether the round's runs are reproducible, and else their number of ranks."""
        fixed = None if self.rounds % 2 == 0 else self.random.choice(self.counts)
        self.rule = (self.rounds, fixed)
        reference = self.reference_of(fixed or 1)
        self.reference, self.best = reference, self.references[fixed or 1][1]

    def resumed(self, name, place=None):
        """Returns the arguments of a run of this round, with another placement and stage than before."""
        if self.rule is None or self.rule[0] != self.rounds:
            self.begin_round()
        fixed = self.rule[1]
        self.ranks = fixed or self.random.choice(self.counts)
        more = ["--stage", str(self.random.randrange(4)), "--silence", str(SILENCE), "--resume"]
        place = place or self.random.choice(list(PLACES))
        self.mesh = f"data={self.ranks}" if fixed else self.random.choice(MESHES.get(self.ranks, [f"data={self.ranks}"]))
        if not fixed:
            more += ["--reproducible", "--mesh", self.mesh]
        return self.on_ranks(name, self.command(name, place, *more))

    def on_ranks(self, _name, words):
        return [*words, "--ranks", str(self.ranks)]

    def start(self, name):
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(self.resumed(name), stdout=log, stderr=log)

    def finish(self, name):
        with open(self.folder / f"{name}.log", "wb") as log:
            done = subprocess.run(self.resumed(name), timeout=PATIENCE, stdout=log, stderr=log)
        assert done.returncode == 0, self.log(name, done.args)

    def log(self, name, words):
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return f"{' '.join(map(str, words))}\n{text}"

    def kill_once(self, name):
        """Starts or resumes the run. Returns True where one of its ranks was killed or stopped, and False where the run ended
        before."""
        out = self.folder / name
        before = leftovers(out)
        process = self.start(name)
        try:
            aimed = self.aim(process, out, self.folder / f"{name}.jsonl", before)
            ranks = ranks_of(str(out)) if aimed else {}
            if not ranks:
                assert process.wait(PATIENCE) == 0, self.log(name, process.args)
                return False
            victim = self.random.choice(sorted(ranks))
            number = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
            all_there = len(ranks) == self.ranks
            if all_there:
                self.check_memory(ranks[victim])
            begin = time.monotonic()
            os.kill(ranks[victim], number)
            where = self.interrupted(out, before)
            ended = self.wait_for_others(process, victim, ranks[victim], number, str(out), begin)
            log = self.log(name, process.args)
            assert ended, f"{name}: rank {victim} got {number.name} ({where}), and {processes_of(str(out))} live on: {log}"
            if process.returncode == 0:
                return False
            # Earlier, the lost rank may not have been started; after the last checkpoint no rank may notice the loss.
            if all_there and not (out / f"step-{self.steps:08}").exists():
                self.check_names(name, victim, number, log)
            self.kills[f"{'killed' if number == signal.SIGKILL else 'stopped'} {where}"] += 1
            return True
        finally:
            for pid in processes_of(str(out)):  # after a failed assertion
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()

    def check_memory(self, pid):
        """The memory that ranks share must have no name, so that none can be left behind."""
        try:
            maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it has ended
            return
        assert "/dev/shm/" not in maps, maps

    def wait_for_others(self, process, victim, pid, number, word, begin):
        """Waits until no process of the run is left except a stopped rank 0, which is then killed. Returns False where others
        remain."""
        allowed = self.within + (0 if number == signal.SIGKILL else SILENCE + 2)  # rank 0 waits for a stopped rank for 2 s
        while time.monotonic() < begin + allowed:
            process.poll()
            left = processes_of(word)
            if not left or (number == signal.SIGSTOP and victim == 0 and left == [pid]):
                spent = time.monotonic() - begin - (allowed - self.within)
                self.slowest = max(self.slowest, spent)
                process.kill()
                process.wait()
                return processes_of(word) == []
            time.sleep(0.01)
        return False

    def check_names(self, name, victim, number, log):
        """Each other rank must have named the lost rank, and where the model is cut its place."""
        lines = log.splitlines()
        how = "is gone" if number == signal.SIGKILL else "has given no sign of life"
        place = r" \([^)]+\)" if self.mesh != f"data={self.ranks}" else ""
        reason = f"rank {victim}{place} {how}"
        for rank in range(self.ranks):
            begin = "sluice: error: " if rank == 0 else f"sluice: rank {rank}: error: "
            if rank != victim:
                assert any(line.startswith(begin) and re.search(reason, line) for line in lines), (
                    f"{name}: rank {rank} does not say '{reason}': {log}"
                )
