"""Twin runs of several ranks.

Each cell trains GPT-2 or Llama with 24 micro-batches a step (12 of long sequences), at a stage, in a place, with an optimizer, in
a type, started by Sluice itself (shared memory) or by mpirun, of 1 to 4 ranks along data, with clipping by norm or with updates in
the backward pass, whole or cut into the stages of a pipeline and along tensor and sequence. Losses, norms and every file of the
checkpoint must have the bits of as many ranks of Sluice's own that have everything in memory (stage 0), have no pipeline, and are
cut along tensor and sequence, too; with --reproducible those of one rank.
Then checkpoints go on at other meshes than those that wrote them: as if one rank had trained from the first step, with
--reproducible, and otherwise as if the twin of the one mesh had written them, and that of the other had gone on.
(Ranks that are threads of one process are no program's; tests/comm and tests/engine hold them to the same sums.)"""
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import tempfile

from kill_campaign import PATIENCE, PLACES, SLUICE, final_files, lesson, losses

STEPS, SAVED_AFTER = 3, 2
# Folders with a config.json alone, which is trained from first values. Their blocks have more than 512 KiB in 16 bits, since less is
# whole at every stage. The presets tiny and tiny-llama have 4 blocks, a context of 256, and 4 and 2 key/value heads.
FOLDERS = {
    "gpt2 folder": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 256, "n_embd": 160, "n_layer": 8, "n_head": 4,
        "n_positions": 512,
    },
    "llama folder": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 160, "head_dim": 32,
        "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    },
}  # fmt: skip
MODELS = ["tiny", "tiny-llama", *FOLDERS]
STAGES = ["0", "1", "2", "3"]
OPTIMIZERS = {
    "adamw": [],
    "8-bit adamw": ["--state", "8bit"],
    "adafactor": ["--optimizer", "adafactor"],
    "muon": ["--optimizer", "muon"],
}
STARTS = ["shared memory", "mpirun"]
RANKS = ["1", "2", "3", "4"]  # along data
ORDERS = ["folded", "reproducible"]
CLIPS = {"clip": ["--clip", "1"], "no clip": ["--clip", "0"]}
CUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "whole": ({}, []),
    "2 stages": ({"pipeline": 2}, []),
    "2 stages gpipe": ({"pipeline": 2}, ["--pipeline", "gpipe"]),
    "2 stages zb-h1": ({"pipeline": 2}, ["--pipeline", "zb-h1"]),
    "2 stages of 2 chunks": ({"pipeline": 2}, ["--chunks", "2"]),
    "3 stages": ({"pipeline": 3}, []),
    "3 stages gpipe": ({"pipeline": 3}, ["--pipeline", "gpipe"]),
    "3 stages zb-h1": ({"pipeline": 3}, ["--pipeline", "zb-h1"]),
    "3 stages of 2 chunks": ({"pipeline": 3}, ["--chunks", "2"]),
    "4 stages": ({"pipeline": 4}, []),
    "4 stages gpipe": ({"pipeline": 4}, ["--pipeline", "gpipe"]),
    "4 stages zb-h1": ({"pipeline": 4}, ["--pipeline", "zb-h1"]),
    "4 stages of 2 chunks": ({"pipeline": 4}, ["--chunks", "2"]),
    "tensor 2": ({"tensor": 2}, []),
    "tensor 4": ({"tensor": 4}, []),
    "2 stages and tensor 2": ({"pipeline": 2, "tensor": 2}, []),
    "2 stages and tensor 4": ({"pipeline": 2, "tensor": 4}, []),
    "sequence 2": ({"sequence": 2}, []),
    "sequence 4": ({"sequence": 4}, []),
    "2 stages and sequence 2": ({"pipeline": 2, "sequence": 2}, []),
    "tensor 2 and sequence 2": ({"tensor": 2, "sequence": 2}, []),
    "all axes": ({"pipeline": 2, "tensor": 2, "sequence": 2}, []),
    "all axes zb-h1": ({"pipeline": 2, "tensor": 2, "sequence": 2}, ["--pipeline", "zb-h1"]),
}
# With these a step is skipped: the first, or the one after two at whose end the scale grows.
SCALED = ["--loss-scale", "dynamic", "--initial-scale", "131072", "--scale-growth-interval", "2"]
TYPES = {
    "f32": [],
    "bf16": ["--dtype", "bf16"],
    "bf16 without masters": ["--dtype", "bf16", "--master", "none"],
    "f16": ["--dtype", "f16", *SCALED],
}
MOST_PROCESSES, MOST_OF_ALL_AXES = 8, 16
AXES = [MODELS, STAGES, ["memory", "disk"], list(OPTIMIZERS), STARTS, RANKS, ORDERS, list(CLIPS), list(CUTS), list(TYPES)]
FREE = (2, 3, 7, 9)  # axes whose values are possible with all others

# Cut and ranks along data of meshes that save and load. Each is loaded on every other.
MESHES = {
    "1 rank": ("whole", "1"),
    "data 3": ("whole", "3"),
    "data 4": ("whole", "4"),
    "data 8": ("whole", "8"),
    "data 2 and 2 stages": ("2 stages", "2"),
    "4 stages of 2 chunks": ("4 stages of 2 chunks", "1"),
    "data 2 and 2 stages and tensor 2": ("2 stages and tensor 2", "2"),
    "tensor 4": ("tensor 4", "1"),
    "data 2 and sequence 2": ("sequence 2", "2"),
    "sequence 4": ("sequence 4", "1"),
    "all axes": ("all axes", "1"),
}
# Of those that save and of those that go on: stages, places and meshes.
AXES_OF_LOADS = [MODELS, list(OPTIMIZERS), ORDERS, list(CLIPS), list(TYPES), *[STAGES] * 2, *[list(PLACES)] * 2, *[list(MESHES)] * 2]


def ranks_along(cut, *axes):
    return math.prod(CUTS[cut][0].get(axis, 1) for axis in axes)


def ranks_with_a_unit(cell):
    """Over how many ranks ZeRO partitions a unit: those along data, and those that compute parts of one layer."""
    return int(cell[5]) * ranks_along(cell[8], "tensor", "sequence")


def context_of(model):
    return 512 if model in FOLDERS else 256


def possible(cell):
    """Whether the program takes the cell, and the machine is large enough for it."""
    model, stage, _, _, start, ranks, order, _, cut, _ = cell
    axes, words = CUTS[cut]
    if int(ranks) * math.prod(axes.values()) > (MOST_OF_ALL_AXES if len(axes) == 3 else MOST_PROCESSES):
        return False
    if stage != "0" and ranks_with_a_unit(cell) == 1:  # one rank partitions nothing
        return False
    if start == "mpirun" and not mpirun_is_there():
        return False
    if context_of(model) < 128 * axes.get("sequence", 1):  # of 64 queries is a tile, and a rank has two parts of a sequence
        return False
    if (8 if model in FOLDERS else 4) < axes.get("pipeline", 1) * (2 if "--chunks" in words else 1):  # each chunk needs a block
        return False
    # There are as many pieces as key/value heads, which ranks share out evenly.
    return not (order == "reproducible" and model == "tiny-llama" and axes.get("tensor", 1) > 2)


def mpirun_is_there():
    return shutil.which("mpirun") is not None and (SLUICE.parents[1] / "lib" / "libsluice_mpi.so").exists()


def all_cells():
    return [cell for cell in itertools.product(*AXES) if possible(cell)]


def candidates(seed=0):
    """Some of all cells, two for each combination of values that is possible with some others only. They have every pair."""
    draw, some = random.Random(seed), []
    for cell in itertools.product(*[axis[:1] if i in FREE else axis for i, axis in enumerate(AXES)]):
        if possible(cell):
            some += [tuple(draw.choice(AXES[i]) if i in FREE else value for i, value in enumerate(cell)) for _ in range(2)]
    return some


def drawn(count, seed):
    """So many other cells at random, each of which has any value of any axis as likely as the others, wherever it is possible."""
    draw, chosen = random.Random(seed), set()
    while len(chosen) < count:
        cell = tuple(map(draw.choice, AXES))
        if possible(cell):
            chosen.add(cell)
    return sorted(chosen)


def loads(seed=0, of_each=24):
    """Some of all loads, with every pair of values of two axes: so many of each two meshes."""
    draw, some = random.Random(seed), []
    for number, meshes in enumerate(itertools.permutations(MESHES, 2), 1):
        while len(some) < of_each * number:
            load = (*map(draw.choice, AXES_OF_LOADS[:-2]), *meshes)
            if all(map(possible, cells_of(load))):
                some.append(load)
    return some


def cells_of(load):
    """The cell that saves, and the one that goes on."""
    model, optimizer, order, clip, number, *each = load
    cells = []
    for stage, place, mesh in zip(each[0:2], each[2:4], each[4:6]):
        cut, ranks = MESHES[mesh]
        cells.append((model, stage, place, optimizer, "shared memory", ranks, order, clip, cut, number))
    return cells


def started(start, ranks, *words):
    if start == "mpirun":
        words = ["mpirun", "-n", ranks, "--oversubscribe", "--bind-to", "none", SLUICE, "train", *words]
    else:
        words = [SLUICE, "train", *words, "--ranks", ranks]
    return [str(word) for word in words]


def model_in(folder, model):
    """Returns what --model is given."""
    if model not in FOLDERS:
        return model
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(FOLDERS[model]))
    return folder / "model"


def data_of(*cells):
    """What all of these can have: tokens of a sequence, micro-batches of a step, and pieces that a sequence is computed in."""
    model, order = cells[0][0], cells[0][6]
    parts = max(ranks_along(cell[8], "sequence") for cell in cells)
    if parts == 1:
        return 16, 24, 1
    if order == "reproducible":  # a rank has 3 micro-batches at least, which are added up with those of others
        length = context_of(model)
        return length, 3 * math.lcm(*(int(cell[5]) for cell in cells)), length // 128
    return 128 * parts, 24 if any(cell[5] == "8" for cell in cells) else 12, 1


def train(folder, name, cell, data, *more, steps=STEPS):
    """Trains in a folder, on what data_of() returns. Returns losses, norms and files of the last checkpoint. Raises AssertionError
    where the run fails."""
    model, stage, place, optimizer, start, ranks, order, clip, cut, number = cell
    axes, pipeline = CUTS[cut]
    out, metrics, disk = folder / name, folder / f"{name}.jsonl", folder / "disk"
    disk.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(lesson())
    length, accumulate, pieces = data
    # fmt: off
    words = started(
        start, str(int(ranks) * math.prod(axes.values())), "--model", model_in(folder, model), "--data", folder / "text.txt",
        "--seq", str(length), "--batch", "1", "--accumulate", str(accumulate), "--steps", str(steps),
        "--schedule", "constant", "--lr", "1e-3", "--threads", "1", "--memory", "600MiB", "--disk", f"{disk}:1GiB",
        "--progress", "none", "--out", out, "--metrics", metrics,
        *OPTIMIZERS[optimizer], *PLACES[place], *CLIPS[clip], *TYPES[number],
        *(["--mesh", ",".join([f"data={ranks}", *(f"{axis}={size}" for axis, size in axes.items())]), *pipeline] if axes else []),
        *(["--stage", stage] if ranks_with_a_unit(cell) > 1 else []), *(["--reproducible"] if order == "reproducible" else []),
        *(["--sequence-grain", str(pieces)] if pieces > 1 else []), *more)
    # fmt: on
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, f"{' '.join(words)}: exit status {done.returncode}: {done.stderr.strip()}"
    norms = [json.loads(line)["gradient_norm"] for line in metrics.read_text().splitlines()]
    assert len(norms) == steps, f"{metrics} has {len(norms)} lines"
    skipped = norms.count(None)
    assert skipped == 0 if number != "f16" else steps < STEPS or 0 < skipped < steps, f"{skipped} of {steps} steps are skipped"
    return losses(metrics), norms, final_files(out, steps)


def twin_of(cell):
    """The cell whose bits this one must have."""
    model, _, _, optimizer, _, ranks, order, clip, cut, number = cell
    if order == "reproducible":
        return (model, "0", "memory", optimizer, "shared memory", "1", order, clip, "whole", number)
    within = {axis: size for axis, size in CUTS[cut][0].items() if axis != "pipeline"}  # a pipeline changes no sum
    alike = next(name for name, (axes, _) in CUTS.items() if axes == within)
    return (model, "0", "memory", optimizer, "shared memory", ranks, order, clip, alike, number)


class Matrix:
    """Tries cells and loads. Thread rule: any; a twin that two threads need at once is trained twice."""

    def __init__(self):
        self.twins = {}

    def twin(self, data, cell, goes_on=None):
        """Returns the result of the cell's twin, or of the twin whose checkpoint goes on as another cell."""
        key = (data, cell, goes_on)
        if key not in self.twins:
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                self.twins[key] = gone_on(folder, data, cell, goes_on) if goes_on else train(folder, "run", cell, data)
        return self.twins[key]

    def try_cell(self, cell):
        """Returns "same bits" or "WRONG: ..."."""
        data = data_of(cell)
        return tried(lambda: self.twin(data, twin_of(cell)), lambda folder: train(folder, "run", cell, data))

    def try_load(self, load):
        """Returns what try_cell() does. The twins go on as the meshes do, unless they are the same."""
        data = data_of(*cells_of(load))
        saved, loaded = map(twin_of, cells_of(load))
        expected = (saved,) if saved == loaded else (saved, loaded)
        return tried(lambda: self.twin(data, *expected), lambda folder: gone_on(folder, data, *cells_of(load)))


def tried(twin, run):
    try:
        expected = twin()
        with tempfile.TemporaryDirectory() as name:
            found = run(pathlib.Path(name))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"WRONG: {error}"
    return compare(found, expected)


def gone_on(folder, data, saved, loaded):
    """Trains as one cell, and goes on as another one. Returns what train() does."""
    train(folder, "run", saved, data, steps=SAVED_AFTER)
    return train(folder, "run", loaded, data, "--resume")


def compare(found, expected):
    for what, one, other in zip(("losses", "norms"), found, expected):
        if one != other:
            return f"WRONG: other {what}"
    if len(expected[2]) < 2 or found[2].keys() != expected[2].keys():
        return f"WRONG: files {sorted(found[2])} instead of {sorted(expected[2])}"
    differing = [file for file, content in expected[2].items() if found[2][file] != content]
    return f"WRONG: {', '.join(differing)} differ" if differing else "same bits"
