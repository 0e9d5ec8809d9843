"""Each rank is a host of its own (scripts/hosts.sh), and the wire of a random one is cut at a random moment after the first step, also
during saves. (Earlier, MPI itself may wait for the other hosts.) All ranks must end in time, and those that still reach each other must
name the lost rank. Then the run resumes as in rank_campaign.py."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

from kill_campaign import PATIENCE, SOURCE, leftovers, written
from rank_campaign import SILENCE, RankCampaign, processes_of

FAREWELL = 2  # seconds for which a rank whose work has failed waits for a silent one before it ends
HOSTS = SOURCE / "scripts" / "hosts.sh"


def ranks_of_hosts(word):
    """The processes of a run's ranks, by rank, without those of mpirun and of shells, which have the same arguments."""
    ranks = {}
    for pid in processes_of(word):
        try:
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            program = pathlib.Path(f"/proc/{pid}/comm").read_text()
        except OSError:  # it has ended
            continue
        own = [int(v.removeprefix(b"OMPI_COMM_WORLD_RANK=")) for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
        if own and program == "sluice\n":
            ranks[own[0]] = pid
    return ranks


class HostCampaign(RankCampaign):
    def on_ranks(self, name, words):
        # mpirun may end before it has forwarded the ranks' last output.
        aside = ["sh", "-c", 'exec "$@" 2> "$0.$OMPI_COMM_WORLD_RANK"', str(self.errors(name))]
        return [str(HOSTS), "--hosts", str(self.ranks), *aside, *words]

    def start(self, name):
        for file in self.folder.glob(f"{name}.error.*"):
            file.unlink()
        return super().start(name)

    def errors(self, name):
        return self.folder / f"{name}.error"

    def log(self, name, words):
        own = sorted(self.folder.glob(f"{name}.error.*"))
        return super().log(name, words) + "".join(f"rank {file.suffix[1:]}: {file.read_text(errors='replace')}\n" for file in own)

    def kill_once(self, name):
        """Starts or resumes the run. Returns True where a wire was cut, and False where the run ended before."""
        out, metrics = self.folder / name, self.folder / f"{name}.jsonl"
        before, steps = leftovers(out), len(written(metrics))
        process = self.start(name)
        try:
            begun = self.wait_until(process, lambda: len(written(metrics)) > steps)
            if not begun or not self.aim(process, out, metrics, before):
                assert process.wait(PATIENCE) == 0, self.log(name, process.args)
                return False
            victim = self.random.randrange(self.ranks)
            begin = time.monotonic()
            self.set_wire(process, victim, "down")
            where = self.interrupted(out, before)
            ended = self.wait_for_ranks(str(out), begin)
            self.set_wire(process, victim, "up")  # mpirun ends the processes that it has started there
            log = self.log(name, process.args)
            assert ended, f"{name}: the wire of rank {victim} was cut ({where}), and {ranks_of_hosts(str(out))} live on: {log}"
            if process.wait(PATIENCE) == 0:
                return False
            assert not processes_of(str(out)), f"{name}: {processes_of(str(out))} are left: {log}"
            if not (out / f"step-{self.steps:08}").exists():
                self.check_names(name, victim)
            self.kills[f"cut {where}"] += 1
            return True
        finally:
            self.end_hosts(process)  # after a failed assertion
            process.terminate()
            process.wait(PATIENCE)

    def end_hosts(self, process):
        """Ends all processes of the hosts, including mpirun's daemons."""
        for host in range(1, self.ranks + 1):
            found = subprocess.run(["ip", "netns", "pids", f"sluice{process.pid}-{host}"], capture_output=True, text=True)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(int(pid), signal.SIGKILL)

    def set_wire(self, process, victim, state):
        subprocess.run(["ip", "-n", f"sluice{process.pid}-{victim + 1}", "link", "set", "wire", state], capture_output=True)

    def wait_for_ranks(self, word, begin):
        """Waits until no rank is left. Returns False where some remain."""
        expected = SILENCE + FAREWELL
        while (spent := time.monotonic() - begin - expected) < self.within:
            if not ranks_of_hosts(word):
                self.slowest = max(self.slowest, spent)  # 0 where they end sooner than they may
                return True
            time.sleep(0.01)
        return False

    def check_names(self, name, victim):
        """Each other rank must have named the one whose wire was cut, which must have ended with an error, too."""
        for rank in range(self.ranks):
            text = pathlib.Path(f"{self.errors(name)}.{rank}").read_text(errors="replace")
            errors = [line for line in text.splitlines() if line.startswith("sluice: ") and "error: " in line]
            reason = rf"rank {victim}( \([^)]+\))? (has given no sign of life|is gone)" if rank != victim else ""
            assert any(re.search(reason, line) for line in errors), (
                f"{name}: the wire of rank {victim} was cut, and rank {rank} says: {text}"
            )
