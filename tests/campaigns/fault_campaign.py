"""Causes real faults, each of which a run of `sluice train` must survive with the same bits, or report: bits flipped in the swap file, or
its end truncated, during the run; a file-size limit; a file system that other processes fill; io_uring forbidden; no locked memory; a run
that is stopped and continued. After an error --resume must lead to the bits of a run without faults. Faults that the machine cannot
produce are listed. build/bin/engine_test injects thousands of other faults into the files of short runs: errors, a full disk, flipped bits,
lost writes, truncation, delays."""
import ctypes
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

from kill_campaign import PATIENCE, SLUICE, Campaign, written

STEPS = 12


class Unavailable(Exception):
    """This machine cannot produce the fault."""


def forbid_uring():
    """Makes io_uring_setup fail with EPERM, as Docker's default profile does. Runs in the child, before the program."""
    syscall = 425  # io_uring_setup, on every architecture
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = b"".join(
        struct.pack("HBBI", *step)
        for step in [(load, 0, 0, 0), (equal, 0, 1, syscall), (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)]
    )
    code = ctypes.create_string_buffer(program)
    filter_program = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, filter_program) != 0:
        os._exit(77)


def limit_files(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def no_locked_memory():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))


class RealFaults:
    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        self.campaign = Campaign(folder, seed, STEPS)
        self.folder, self.disk = pathlib.Path(folder), self.campaign.disk
        self.number = 0
        self.survived = self.reported = self.missed = 0

    def start(self, name, before=None):
        words = self.campaign.command(name, "disk", "--resume")
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=before)  # noqa: PLW1509 - no threads here

    def swap_file(self, process):
        """Returns the path under /proc of the run's swap file, which has no name. None where the run has ended, or has none yet."""
        try:
            for number in os.listdir(f"/proc/{process.pid}/fd"):
                path = f"/proc/{process.pid}/fd/{number}"
                if os.readlink(path).startswith(str(self.disk) + "/"):
                    return path
        except OSError:
            pass
        return None

    def in_the_middle(self, process, name):
        """Waits for a random step of the run. Returns its swap file, or None where the run ended before."""
        metrics = self.folder / f"{name}.jsonl"
        wanted = self.random.randint(1, STEPS - 4)
        lines = lambda: written(metrics).count(b"\n")
        if not self.campaign.wait_until(process, lambda: lines() >= wanted):
            return None
        return self.swap_file(process)

    def flip_bits(self, process, path):
        """Flips one bit in each MiB, so that the next read finds damage, unless a write precedes it."""
        with open(path, "r+b", buffering=0) as file:
            for offset in range(0, os.fstat(file.fileno()).st_size, 1 << 20):
                at = offset + self.random.randrange(4096)
                byte = os.pread(file.fileno(), 1, at)
                if byte:
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self.random.randrange(8)]), at)

    def cut_file(self, process, path):
        os.truncate(path, os.stat(path).st_size // 2 // 4096 * 4096)

    def pause(self, process, path):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)

    def end(self, process, name, must_survive):
        """Checks the end of the run. After an error, resumes the run and checks the result."""
        status = process.wait(timeout=PATIENCE)
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        if status == 0:
            self.campaign.check(name)
            self.survived += 1
            return
        assert not must_survive, f"{name}: exit status {status}: {log}"
        assert status in (1, 2, 3) and "sluice: error: " in log, f"{name}: exit status {status}: {log}"
        self.reported += 1
        again = self.start(name)
        assert again.wait(timeout=PATIENCE) == 0, (self.folder / f"{name}.log").read_text(errors="replace")
        self.campaign.check(name)

    def fill(self, mount):
        """Returns a fault that takes the space which the run's next checkpoint needs, and gives it back before the run is resumed."""

        def hit(process, path):
            with open(mount / "filler", "wb") as file:
                free = os.statvfs(mount)
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (1 << 20))
            process.wait(timeout=PATIENCE)
            (mount / "filler").unlink()

        return hit

    def round(self, kind, hit=None, before=None, must_survive=False, out=None):
        """Runs once with a fault. `hit` is called in the middle of the run, with its process and the path of its swap file. The
        checkpoints are in the folder `out`, where one is given."""
        self.number += 1
        name = f"{kind}{self.number}"
        if out is not None:
            (out / name).mkdir()
            (self.folder / name).symlink_to(out / name)
        process = self.start(name, before)
        try:
            if hit is not None:
                path = self.in_the_middle(process, name)
                if path is None:
                    self.missed += 1
                else:
                    hit(process, path)
            self.end(process, name, must_survive)
        finally:
            process.kill()
            process.wait()
        shutil.rmtree(out / name if out is not None else self.folder / name)

    def full_file_system(self):
        image, mount = self.folder / "small.img", self.folder / "small"
        mount.mkdir(exist_ok=True)
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        for words in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
            try:
                subprocess.run(words, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stderr", b"") or str(error).encode()
                raise Unavailable(reason.decode(errors="replace").strip()) from error
        try:
            self.round("full", hit=self.fill(mount), out=mount)
        finally:
            subprocess.run(["umount", str(mount)], check=True)

    def kinds(self):
        return {
            "bits flipped in the swap file": lambda: self.round("flip", hit=self.flip_bits),
            "the swap file cut": lambda: self.round("cut", hit=self.cut_file),
            "stopped and continued": lambda: self.round("pause", hit=self.pause, must_survive=True),
            "a file-size limit of 8 MiB": lambda: self.round("limit", before=limit_files(8 << 20)),
            "io_uring forbidden": lambda: self.round("seccomp", before=forbid_uring, must_survive=True),
            "no locked memory": lambda: self.round("memlock", before=no_locked_memory, must_survive=True),
            "a file system that others fill": self.full_file_system,
        }

    def all(self, rounds, tell, chosen=None):
        """Produces each kind of fault, or the kinds chosen by name, so many times."""
        kinds = self.kinds()
        for name in chosen or kinds:
            run = kinds[name]
            before = (self.survived, self.reported, self.missed)
            try:
                for _ in range(rounds):
                    run()
            except Unavailable as error:
                tell(f"  {name}: this machine cannot produce it: {error}")
                continue
            found = [after - then for after, then in zip((self.survived, self.reported, self.missed), before)]
            tell(f"  {name}: {found[0]} with the same bits, {found[1]} reported and resumed to them"
                 + (f" ({found[2]} came too late)" if found[2] else ""))


def injected(suite, count, seed):
    program = SLUICE.parent / "engine_test"
    if not program.exists():
        sys.exit(f"'{program}' is missing; scripts/build.sh builds it")
    asked = os.environ | {"SLUICE_CAMPAIGN_COUNT": str(count), "SLUICE_CAMPAIGN_SEED": str(seed)}
    return subprocess.run([str(program), f"--gtest_filter=Long/{suite}.*", "--gtest_brief=1"], env=asked, check=False).returncode == 0
