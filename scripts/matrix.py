#!/usr/bin/env python3
"""Trains every combination of optimizer, state type, precision, clipping and accumulation, in memory and on disk.

    scripts/matrix.py [--jobs N] [--json FILE] [--ranks [--all]]

Each cell trains a small model twice (`sluice train`, preset tiny): with everything in memory, and with everything on disk.
Losses, norms and every file of the checkpoint must be the same to the last bit; or both runs must be refused with the reason
that refused() states. The exit status is 1 where a cell did neither.

With --ranks the cells are those of scripts/rank_matrix.py: models, stages, places, optimizers, ways to start, numbers of ranks,
orders of sums and clipping; without --all as few of them as have every pair of values of two of these axes.

The program is build/bin/sluice, or bin/sluice of the folder that SLUICE_BUILD names."""
import argparse
import concurrent.futures
import itertools
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rank_matrix  # noqa: E402
from kill_campaign import PLACES, SLUICE, short_training  # noqa: E402

STEPS = 3
OPTIMIZERS = {
    "adamw": ["--optimizer", "adamw"],
    "adam": ["--optimizer", "adam"],
    "lion": ["--optimizer", "lion"],
    "sgd": ["--optimizer", "sgd"],
    "sgd momentum": ["--optimizer", "sgd", "--momentum", "0.9"],
    "sgd nesterov": ["--optimizer", "sgd", "--momentum", "0.9", "--nesterov"],
    "adafactor": ["--optimizer", "adafactor"],
    "adafactor momentum": ["--optimizer", "adafactor", "--beta1", "0.9"],
    "muon": ["--optimizer", "muon"],
}
STATES = ["f32", "bf16", "8bit"]
PRECISIONS = {
    "f32": ["--dtype", "f32"],
    "bf16": ["--dtype", "bf16"],
    "bf16 without masters": ["--dtype", "bf16", "--master", "none"],
    "f16": ["--dtype", "f16"],
}
CLIPS = {"clip": ["--clip", "0.5"], "no clip": ["--clip", "0"]}
ACCUMULATIONS = ["1", "4"]
AXES = [list(OPTIMIZERS), STATES, list(PRECISIONS), list(CLIPS), ACCUMULATIONS]


def refused(cell):
    """The words with which the program refuses the cell, or None where it must run."""
    optimizer, state = cell[:2]
    if optimizer in ("sgd", "adafactor") and state != "f32":
        return "but without momentum there is no array"  # of state by elements, which could have the type
    return None


def sample():
    """Few cells that have every pair; wherever possible, in a cell that runs."""
    everything = list(itertools.product(*AXES))
    return pairs_of([cell for cell in everything if refused(cell) is None], everything)


def pairs_of(*sets):
    """Few cells, always in the same order, that have every pair of values of two axes; from the first sets, wherever possible."""

    def pairs(cell):
        return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}

    chosen, seen = [], set()
    for cells in sets:
        missing = set().union(*map(pairs, cells)) - seen
        while missing:
            chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
            missing -= pairs(chosen[-1])
            seen |= pairs(chosen[-1])
    return chosen


def run(folder, cell, place):
    """Returns what short_training() does."""
    optimizer, state, precision, clip, accumulate = cell
    return short_training(SLUICE, folder, place, STEPS, "--model", "tiny", "--threads", "1", "--state", state, "--accumulate",
                          accumulate, *OPTIMIZERS[optimizer], *PRECISIONS[precision], *CLIPS[clip], *PLACES[place])


def try_cell(cell):
    """Returns the result of a cell: "same bits", "refused: ...", or "WRONG: ..."."""
    reason = refused(cell)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (memory, expected), (disk, found) = (run(folder, cell, place) for place in ("memory", "disk"))
        if reason is not None:
            for done in (memory, disk):
                if done.returncode == 0 or reason not in done.stderr:
                    return f"WRONG: not refused with '{reason}': {done.stderr.strip()}"
            return "refused: " + memory.stderr.strip().splitlines()[-1]
        for done in (memory, disk):
            if done.returncode != 0:
                return f"WRONG: {done.stderr.strip()}"
        return "same bits" if expected == found else "WRONG: other bits on disk than in memory"


def finish(results, file, cells, kinds):
    """Writes and tells how many results are of which kind. Returns the exit status."""
    if file:
        file.write_text(json.dumps(results, indent=1))
    count = {kind: sum(result.startswith(kind) for result in results.values()) for kind in kinds}
    print(f"{len(results)} {cells}: " + ", ".join(f"{count[kind]} {words}" for kind, words in kinds.items()))
    return 1 if count["WRONG"] else 0


def try_ranks(a):
    cells = rank_matrix.all_cells() if a.all else pairs_of(rank_matrix.all_cells())
    matrix, results = rank_matrix.Matrix(), {}
    loads = list(itertools.product(rank_matrix.MODELS, rank_matrix.OPTIMIZERS))
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        found = zip(cells, pool.map(matrix.try_cell, cells), strict=True)
        found = itertools.chain(({", ".join(cell): result} for cell, result in found),
                                pool.map(lambda load: matrix.try_loads(*load), loads))
        for number, some in enumerate(found, 1):
            results |= some
            for name, result in some.items():
                if result.startswith("WRONG") or number % 8 == 0:
                    print(f"{number}/{len(cells) + len(loads)}: {name}: {result}", flush=True)
    if not rank_matrix.mpirun_is_there():
        print("mpirun, or lib/libsluice_mpi.so, is missing, so that no cell was started by it")
    return finish(results, a.json, "cells of ranks", {"same bits": "with the same bits", "WRONG": "wrong"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="how many cells run at a time")
    parser.add_argument("--json", type=pathlib.Path, help="write all results to this file")
    parser.add_argument("--ranks", action="store_true", help="cells of several ranks")
    parser.add_argument("--all", action="store_true", help="with --ranks: every cell, which takes two hours")
    a = parser.parse_args()
    if a.ranks:
        return try_ranks(a)
    cells, results = list(itertools.product(*AXES)), {}
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for number, (cell, result) in enumerate(zip(cells, pool.map(try_cell, cells), strict=True), 1):
            results[", ".join(cell[:4]) + f", accumulate {cell[4]}"] = result
            if result.startswith("WRONG") or number % 24 == 0:
                print(f"{number}/{len(cells)}: {', '.join(cell)}: {result}", flush=True)
    kinds = {"same bits": "with the same bits in memory and on disk", "refused": "refused with the reason", "WRONG": "wrong"}
    return finish(results, a.json, "cells", kinds)


if __name__ == "__main__":
    sys.exit(main())
