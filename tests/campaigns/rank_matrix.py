"""Twin runs of several ranks.

Each cell trains GPT-2 or Llama (presets tiny and tiny-llama) with 24 micro-batches a step, at a stage, in a place, with an
optimizer, started by Sluice itself (shared memory) or by mpirun, of 1 to 4 ranks, with clipping by norm or with updates in the
backward pass, whole or cut into the stages of a pipeline and along tensor or sequence, each part of which so many ranks have. Losses, norms and
every file of the checkpoint must have the bits of as many ranks of Sluice's own that have everything in memory (stage 0), and are
cut along tensor or sequence, too; with --reproducible those of one rank.
Then checkpoints that 4 ranks have written go on at 1, 3 and 8 ranks, and at 4, as if these had trained from the first step.
(Ranks that are threads of one process are no program's; tests/comm and tests/engine hold them to the same sums.)"""
import itertools
import json
import math
import os
import pathlib
import shutil
import subprocess
import tempfile

from kill_campaign import PATIENCE, PLACES, SLUICE, final_files, lesson, losses

STEPS, SAVED_AFTER = 3, 1
MODELS = ["tiny", "tiny-llama"]
STAGES = ["0", "1", "2", "3"]
OPTIMIZERS = {
    "adamw": [],
    "8-bit adamw": ["--state", "8bit"],
    "adafactor": ["--optimizer", "adafactor"],
    "muon": ["--optimizer", "muon"],
}
STARTS = ["shared memory", "mpirun"]
RANKS = ["1", "2", "3", "4"]
ORDERS = ["folded", "reproducible"]
CLIPS = {"clip": ["--clip", "1"], "no clip": ["--clip", "0"]}
CUTS = {
    "whole": ({}, []),
    "2 stages": ({"pipeline": 2}, []),
    "2 stages, gpipe": ({"pipeline": 2}, ["--pipeline", "gpipe"]),
    "2 stages, zb-h1": ({"pipeline": 2}, ["--pipeline", "zb-h1"]),
    "2 stages of 2 chunks": ({"pipeline": 2}, ["--chunks", "2"]),
    "3 stages": ({"pipeline": 3}, []),
    "3 stages, zb-h1": ({"pipeline": 3}, ["--pipeline", "zb-h1"]),
    "4 stages": ({"pipeline": 4}, []),
    "tensor": ({"tensor": 2}, []),
    "2 stages, tensor": ({"pipeline": 2, "tensor": 2}, []),
    "sequence": ({"sequence": 2}, []),
    "2 stages, sequence": ({"pipeline": 2, "sequence": 2}, []),
}
MOST_PROCESSES = 6
AXES = [MODELS, STAGES, ["memory", "disk"], list(OPTIMIZERS), STARTS, RANKS, ORDERS, list(CLIPS), list(CUTS)]
LOADED_AT = ["1", "3", "4", "8"]


def parts_of(cut):
    return math.prod(CUTS[cut][0].values())


def possible(cell):
    """One rank partitions nothing, so that it has no stage but 0; and a fourth start would be needed where mpirun is missing."""
    few = int(cell[5]) * parts_of(cell[8]) <= MOST_PROCESSES
    has_order = cell[6] != "reproducible" or "sequence" not in CUTS[cell[8]][0]  # gradients of weights are sums over rows
    return few and has_order and (cell[5] != "1" or cell[1] == "0") and (cell[4] != "mpirun" or mpirun_is_there())


def mpirun_is_there():
    return shutil.which("mpirun") is not None and (SLUICE.parents[1] / "lib" / "libsluice_mpi.so").exists()


def all_cells():
    return [cell for cell in itertools.product(*AXES) if possible(cell)]


def started(start, ranks, *words):
    if start == "mpirun":
        words = ["mpirun", "-n", ranks, "--oversubscribe", "--bind-to", "none", SLUICE, "train", *words]
    else:
        words = [SLUICE, "train", *words, "--ranks", ranks]
    return [str(word) for word in words]


def train(folder, name, cell, *more, steps=STEPS):
    """Trains in a folder. Returns losses and files of the last checkpoint. Raises AssertionError where the run fails."""
    model, stage, place, optimizer, start, ranks, order, clip, cut = cell
    axes, pipeline = CUTS[cut]
    out, metrics, disk = folder / name, folder / f"{name}.jsonl", folder / "disk"
    disk.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(lesson())
    # fmt: off
    words = started(
        start, str(int(ranks) * parts_of(cut)), "--model", model, "--data", folder / "text.txt", "--seq", "256" if "sequence" in axes else "16",
        "--batch", "1", "--accumulate", "24", "--steps", str(steps), "--schedule", "constant", "--lr", "1e-3", "--threads", "1",
        "--memory", "600MiB", "--disk", f"{disk}:1GiB", "--progress", "none", "--out", out, "--metrics", metrics,
        *OPTIMIZERS[optimizer], *PLACES[place], *CLIPS[clip],
        *(["--mesh", ",".join([f"data={ranks}", *(f"{axis}={size}" for axis, size in axes.items())]), *pipeline] if axes else []),
        *(["--stage", stage] if ranks != "1" else []), *(["--reproducible"] if order == "reproducible" else []), *more)
    # fmt: on
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, f"{' '.join(words)}: exit status {done.returncode}: {done.stderr.strip()}"
    norms = [json.loads(line)["gradient_norm"] for line in metrics.read_text().splitlines()]
    assert len(norms) == steps, f"{metrics} has {len(norms)} lines"
    return losses(metrics), norms, final_files(out, steps)


def twin_of(cell):
    """The cell whose bits this one must have."""
    model, _, _, optimizer, _, ranks, order, clip, cut = cell
    reproducible = order == "reproducible"
    alike = "whole" if reproducible else next((axis for axis in ("tensor", "sequence") if axis in CUTS[cut][0]), "whole")
    return (model, "0", "memory", optimizer, "shared memory", "1" if reproducible else ranks, order, clip, alike)


class Matrix:
    """Tries cells. Thread rule: any; a twin that two threads need at once is trained twice."""

    def __init__(self):
        self.twins = {}

    def twin(self, cell):
        if cell not in self.twins:
            with tempfile.TemporaryDirectory() as name:
                self.twins[cell] = train(pathlib.Path(name), "run", cell)
        return self.twins[cell]

    def try_cell(self, cell):
        """Returns "same bits" or "WRONG: ..."."""
        try:
            expected = self.twin(twin_of(cell))
            with tempfile.TemporaryDirectory() as name:
                found = train(pathlib.Path(name), "run", cell)
        except AssertionError as error:
            return f"WRONG: {error}"
        return compare(found, expected)

    def try_loads(self, model, optimizer, at=LOADED_AT):
        """Saves at 4 ranks, and goes on at other numbers of ranks. Returns results by name."""
        results = {}
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            cell = lambda stage, ranks: (model, stage, "memory", optimizer, "shared memory", ranks, "reproducible", "clip", "whole")
            loads, saved = loads_of(model, optimizer, at), saved_at(model, optimizer)
            try:
                expected = self.twin(cell("0", "1"))
                train(folder, "saved", cell(saved, "4"), steps=SAVED_AFTER)
            except AssertionError as error:
                return dict.fromkeys(loads, f"WRONG: before loading: {error}")
            for key, (stage, ranks) in loads.items():
                shutil.copytree(folder / "saved", folder / f"at{ranks}")
                shutil.copy(folder / "saved.jsonl", folder / f"at{ranks}.jsonl")
                try:
                    results[key] = compare(train(folder, f"at{ranks}", cell(stage, ranks), "--resume"), expected)
                except AssertionError as error:
                    results[key] = f"WRONG: {error}"
        return results


def saved_at(model, optimizer):
    """The stage at which 4 ranks save. Every stage saves, and every stage loads."""
    return STAGES[(MODELS.index(model) * 2 + list(OPTIMIZERS).index(optimizer)) % 4]


def loads_of(model, optimizer, at=LOADED_AT):
    """Stages and numbers of ranks that go on from what 4 ranks have saved, by the name of the result."""
    saved = STAGES.index(saved_at(model, optimizer))
    key = f"{model}, {optimizer}, saved at 4 ranks (stage {saved}), loaded at "
    return {key + ranks: (STAGES[(saved + i) % 4], ranks) for i, ranks in enumerate(at)}


def compare(found, expected):
    for what, one, other in zip(("losses", "norms"), found, expected):
        if one != other:
            return f"WRONG: other {what}"
    if len(expected[2]) < 2 or found[2].keys() != expected[2].keys():
        return f"WRONG: files {sorted(found[2])} instead of {sorted(expected[2])}"
    differing = [file for file, content in expected[2].items() if found[2][file] != content]
    return f"WRONG: {', '.join(differing)} differ" if differing else "same bits"
