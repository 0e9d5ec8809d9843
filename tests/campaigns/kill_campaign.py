"""Kills a training run at random moments, also during saves, resumes it each time, and compares the result with that of a run that
was never stopped."""
import collections
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import time

SOURCE = pathlib.Path(__file__).resolve().parents[2]
SLUICE = pathlib.Path(os.environ.get("SLUICE_BUILD", SOURCE / "build")) / "bin" / "sluice"
LEFTOVER = re.compile(r"\.step-\d+\.(partial|removed)-[0-9a-f]{16}")
STEPS = 12
PATIENCE = 120  # seconds for one process, which needs far less
PLACES = {  # a run may be resumed with any of them, since placement never changes a bit
    "memory": ["--place-parameters", "memory", "--place-gradients", "memory", "--place-state", "memory"],
    "disk": ["--place-parameters", "disk", "--place-gradients", "disk", "--place-state", "disk"],
    "chosen": [],
}


def lesson(bytes_wanted=30000):
    """Makes a text with regularities that a model can learn."""
    sentences, size = [], 0
    while size < bytes_wanted:
        number = len(sentences) * 7919 % 1000
        sentences.append(f"the river runs to the sea, and the sea to the {number} winds. ")
        size += len(sentences[-1])
    return "".join(sentences)


def written(file):
    """Returns the file's bytes, or none where it is missing: a starting run creates it as a test, and removes it."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def losses(metrics):
    """Returns the bits of each step's loss. The steps must be 1, 2, 3, ..."""
    rows = [json.loads(line) for line in pathlib.Path(metrics).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), metrics
    return [struct.pack("<d", row["loss"]) for row in rows]


def final_files(out, step):
    """Returns the bytes of a checkpoint's tensor files by name."""
    folder = pathlib.Path(out) / f"step-{step:08}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def short_training(program, folder, name, steps, *settings):
    """Trains on the lesson in a folder. Returns the finished process, with the losses and the files of its last checkpoint, or
    None where it failed."""
    out, metrics, text, disk = folder / name, folder / f"{name}.jsonl", folder / "text.txt", folder / "disk"
    disk.mkdir(exist_ok=True)
    text.write_text(lesson())
    # fmt: off
    done = subprocess.run(
        [program, "train", "--data", text, "--seq", "32", "--batch", "2", "--steps", str(steps), "--lr", "1e-3", "--memory",
         "600MiB", "--disk", f"{disk}:1GiB", "--progress", "none", "--out", out, "--metrics", metrics, *settings],
        capture_output=True, text=True, timeout=PATIENCE)
    # fmt: on
    return done, (losses(metrics), final_files(out, steps)) if done.returncode == 0 else None


def best_of(out):
    """Returns step and validation loss of the best checkpoint in the folder, as the program reports them."""
    told = subprocess.run([str(SLUICE), "inspect", "--json", str(out)], check=True, timeout=PATIENCE, capture_output=True)
    best = json.loads(told.stdout)["best"]
    return best["step"], best["validation_loss"]


def leftovers(out):
    """The folders of checkpoints that are being written or removed, or that a killed run left incomplete."""
    return {name for name in os.listdir(out) if LEFTOVER.fullmatch(name)} if os.path.isdir(out) else set()


class Campaign:
    accumulate, threads = "2", "2"

    def __init__(self, folder, seed=0, steps=STEPS):
        self.folder, self.steps, self.random = pathlib.Path(folder), steps, random.Random(seed)
        self.text, self.disk = self.folder / "text.txt", self.folder / "disk"
        self.other_text = self.folder / "other.txt"  # unlike the lesson, so that the best checkpoint is not the newest
        self.text.write_text(lesson())
        self.other_text.write_text("".join(sorted(lesson(9000))))
        self.disk.mkdir()
        self.kills = collections.Counter()  # by what they interrupted
        self.rounds = 0
        self.reference = self.run_reference()

    def command(self, name, place, *more):
        # fmt: off
        return [str(SLUICE), "train", "--model", "tiny", "--data", str(self.text), "--seq", "32", "--batch", "2",
                "--accumulate", self.accumulate, "--steps", str(self.steps), "--lr", "1e-3", "--threads", self.threads, "--memory", "600MiB",
                "--disk", f"{self.disk}:1GiB", "--save-every", "1", "--keep", "2", "--eval-every", "3", "--eval-batches", "1",
                "--valid", str(self.other_text), "--progress", "none",
                "--out", str(self.folder / name), "--metrics", str(self.folder / f"{name}.jsonl"),
                *PLACES[place], *more]
        # fmt: on

    def run_reference(self):
        return self.straight("reference", self.command("reference", "memory"))

    def straight(self, name, words):
        """Trains without interruption. Returns the result, including its best checkpoint."""
        subprocess.run(words, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
        self.best = best_of(self.folder / name)
        assert self.best[0] < self.steps - 2, "the best checkpoint is among the newest, so the test cannot tell that it is kept"
        return self.result(name)

    def result(self, name):
        return losses(self.folder / f"{name}.jsonl"), final_files(self.folder / name, self.steps)

    def start(self, name):
        place = self.random.choice(list(PLACES))
        log = open(self.folder / f"{name}.log", "wb")
        return subprocess.Popen(self.command(name, place, "--resume"), stdout=log, stderr=log)

    def wait_until(self, process, ready):
        """Waits until ready() is true. Returns False where the process ended before."""
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            if ready():
                return True
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"the run stands still: {process.args}")
            time.sleep(0.0005)
        return False

    def aim(self, process, out, metrics, before):
        """Waits for a moment to kill. Returns False where the run ended before. before: the leftovers when it was started."""
        size = len(written(metrics))
        target = self.random.choice(["start", "step", "save", "save", "removal"])
        if target == "start":
            moment = time.monotonic() + self.random.random() / 2
            return self.wait_until(process, lambda: time.monotonic() > moment)
        grown = self.wait_until(process, lambda: len(written(metrics)) > size)
        if not grown:
            return False
        own = lambda kind: any(f".{kind}-" in name for name in leftovers(out) - before)
        # Before its first step a run has locked its folder and removed what the killed one left.
        assert not leftovers(out) & before, f"{leftovers(out) & before} were left after the next start"
        if target == "save" and not self.wait_until(process, lambda: own("partial")):
            return False
        if target == "removal" and not self.wait_until(process, lambda: own("removed")):
            return False
        time.sleep(self.random.random() * 0.02)
        return True

    def kill_once(self, name):
        """Starts or resumes the run. Returns True where it was killed, and False where it ended before."""
        out, metrics = self.folder / name, self.folder / f"{name}.jsonl"
        before = leftovers(out)
        process = self.start(name)
        try:
            aimed = self.aim(process, out, metrics, before)
        finally:
            process.kill()
            process.wait()
        if process.returncode == -9:
            self.kills[self.interrupted(out, before)] += 1
            return True
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        assert process.returncode == 0, f"exit status {process.returncode} (aimed: {aimed}): {log}"
        return False

    def interrupted(self, out, before):
        """Names the phase of a killed run by the files that it left, without those that earlier runs left."""
        kinds = {LEFTOVER.fullmatch(name)[1] for name in leftovers(out) - before}
        return "inside a save" if "partial" in kinds else "inside a removal" if kinds else "elsewhere"

    def check(self, name):
        expected_losses, expected_files = self.reference
        found_losses, found_files = self.result(name)
        assert found_losses == expected_losses, f"{name}: the losses differ"
        assert found_files.keys() == expected_files.keys() and len(found_files) >= 3, sorted(found_files)
        for file, content in expected_files.items():
            assert found_files[file] == content, f"{name}: {file} differs"
        assert best_of(self.folder / name) == self.best, f"{name}: the best checkpoint is another"
        left = sorted(entry for entry in os.listdir(self.folder / name) if not entry.startswith("step-"))
        assert left == [".run"], f"{name}: {left} are left"
        assert os.listdir(self.disk) == [], f"{os.listdir(self.disk)} are left of swap files"

    def run(self, kills, tell=lambda text: None):
        """Runs rounds until it has killed so many runs. Each round is resumed to its end. Raises AssertionError where bits
        differ."""
        while self.killed < kills:
            name = f"round{self.rounds}"
            while self.killed < kills and self.kill_once(name):
                tell(f"\r{self.killed}/{kills} kills, {self.rounds} rounds compared ")
            self.finish(name)
            self.check(name)
            shutil.rmtree(self.folder / name)
            self.rounds += 1

    def finish(self, name):
        words = self.command(name, self.random.choice(list(PLACES)), "--resume")
        subprocess.run(words, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)

    @property
    def killed(self):
        return sum(self.kills.values())
