#!/usr/bin/env python3
"""Trains every combination of optimizer, state type, precision, clipping and accumulation, in memory and on disk.

    scripts/matrix.py [--jobs N] [--json FILE]

Each cell trains a small model twice (`sluice train`, preset tiny): with everything in memory, and with everything on disk.
Losses, norms and every file of the checkpoint must be the same to the last bit; or both runs must be refused with the reason
that refused() states. The exit status is 1 where a cell did neither.

The program is build/bin/sluice, or bin/sluice of the folder that SLUICE_BUILD names."""
import argparse
import concurrent.futures
import itertools
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
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
    """Few cells, always in the same order, that have every pair of values of two axes; wherever possible, in a cell that runs."""

    def pairs(cell):
        return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}

    everything, chosen, seen = list(itertools.product(*AXES)), [], set()
    for cells in ([cell for cell in everything if refused(cell) is None], everything):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="how many cells run at a time")
    parser.add_argument("--json", type=pathlib.Path, help="write all results to this file")
    a = parser.parse_args()
    cells, results = list(itertools.product(*AXES)), {}
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for number, (cell, result) in enumerate(zip(cells, pool.map(try_cell, cells), strict=True), 1):
            results[", ".join(cell[:4]) + f", accumulate {cell[4]}"] = result
            if result.startswith("WRONG") or number % 24 == 0:
                print(f"{number}/{len(cells)}: {', '.join(cell)}: {result}", flush=True)
    if a.json:
        a.json.write_text(json.dumps(results, indent=1))
    count = {kind: sum(r.startswith(kind) for r in results.values()) for kind in ("same bits", "refused", "WRONG")}
    print(f"{len(cells)} cells: {count['same bits']} with the same bits in memory and on disk, {count['refused']} refused with "
          f"the reason, {count['WRONG']} wrong")
    return 1 if count["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
