"""Every combination of optimizer, state type, precision, clipping and accumulation, in memory and on disk.

Each cell trains a small model twice (`sluice train`, preset tiny): with everything in memory, and with everything on disk.
Losses, norms and every file of the checkpoint must be the same to the last bit; or both runs must be refused with the reason
that refused() states. The cells of several ranks are those of rank_matrix.py.

Each result is written to a file of results at once; cells with a result there are not tried again, unless it was wrong, and
results of another build are refused. So a matrix can be run in slices."""
import concurrent.futures
import functools
import hashlib
import itertools
import json
import operator
import pathlib
import tempfile
import time

import rank_matrix
from kill_campaign import PLACES, SLUICE, short_training

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
    """Returns the words with which the program refuses the cell, or None where it must run."""
    optimizer, state = cell[:2]
    if optimizer in ("sgd", "adafactor") and state != "f32":
        return "but without momentum there is no array"  # of state by elements, which could have the type
    return None


def sample():
    """Few cells that have every pair; wherever possible, in a cell that runs."""
    everything = list(itertools.product(*AXES))
    return pairs_of([cell for cell in everything if refused(cell) is None], everything)


def pairs_of(*sets, together=2):
    """Few cells, always in the same order, that have every pair of values of two axes, or every value (together=1); from the first sets,
    wherever possible."""
    numbers = {}

    def values(cell):  # as the bits of a number
        return sum(1 << numbers.setdefault(some, len(numbers)) for some in itertools.combinations(enumerate(cell), together))

    chosen, seen = [], 0
    for cells in sets:
        values_of = {cell: values(cell) for cell in cells}
        missing = functools.reduce(operator.or_, values_of.values()) & ~seen
        while missing:
            chosen.append(max(values_of, key=lambda cell: (values_of[cell] & missing).bit_count()))
            missing &= ~values_of[chosen[-1]]
            seen |= values_of[chosen[-1]]
    return chosen


def run(folder, cell, place):
    """Returns the result of short_training()."""
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


def checksum_of_build():
    """Returns the checksum of the program and the libraries that it loads."""
    sums = hashlib.sha256()
    for file in [SLUICE, *sorted((SLUICE.parents[1] / "lib").glob("*.so"))]:
        sums.update(file.read_bytes())
    return sums.hexdigest()


class Results:
    """Results by the names of cells, including those of an earlier slice, and their number. Thread rule: one thread."""

    def __init__(self, names, file=None, resume=False):
        self.names, self.file, self.build, self.all = names, file, checksum_of_build(), {}
        if resume and file.exists():
            earlier = json.loads(file.read_text())
            if earlier["build"] != self.build:
                raise SystemExit(f"--resume: {file} has results of another build than that of {SLUICE}; remove it to begin anew")
            found = earlier["results"]
            self.all = {name: found[name] for name in names if not found.get(name, "WRONG").startswith("WRONG")}
        self.began, self.before, self.told = time.monotonic(), len(self.all), len(self.all)

    def add(self, some):
        self.all |= some
        if self.file:  # if this process is killed meanwhile, the file with the previous results remains
            new = self.file.with_name(self.file.name + ".new")
            new.write_text(json.dumps({"build": self.build, "results": self.all}, indent=1))
            new.rename(self.file)

    def tell(self, some, each):
        """Prints wrong results, and the progress after each `each` further results."""
        for name, result in some.items():
            if result.startswith("WRONG"):
                print(f"{name}: {result}", flush=True)
        if len(self.all) < self.told + each:
            return
        self.told = len(self.all)
        minutes = (time.monotonic() - self.began) / 60 / (self.told - self.before) * (len(self.names) - self.told)
        print(f"{self.told}/{len(self.names)}, about {minutes:.0f} minutes to go: {name}: {result}", flush=True)

    def finish(self, cells, kinds):
        """Prints the number of results of each kind. Returns the exit status."""
        count = {kind: sum(result.startswith(kind) for result in self.all.values()) for kind in kinds}
        print(f"{len(self.all)} of {len(self.names)} {cells}: " + ", ".join(f"{count[kind]} {words}" for kind, words in kinds.items()))
        return 1 if count["WRONG"] else 0


def try_all(tasks, a, each):
    """tasks: names of cells, and a function that returns their results, by name. Returns all results."""
    results = Results([name for names, _ in tasks for name in names], a.json, a.resume)
    left = [task for names, task in tasks if not results.all.keys() >= set(names)][: a.most]
    pool = concurrent.futures.ThreadPoolExecutor(a.jobs)
    try:
        for done in concurrent.futures.as_completed([pool.submit(task) for task in left]):
            results.add(done.result())
            results.tell(done.result(), each)
    finally:  # Ctrl-C waits for the running cells
        pool.shutdown(cancel_futures=True)
    return results


def try_ranks(a):
    cells, loads = pairs_of(rank_matrix.candidates()), pairs_of(rank_matrix.loads())
    if a.count:
        cells += [cell for cell in rank_matrix.drawn(a.count, a.seed) if cell not in set(cells)]
    if a.all:
        cells += [cell for cell in rank_matrix.all_cells() if cell not in set(cells)]
    only = {value.strip() for value in a.only.split(",")} if a.only else set()
    if unknown := only - {value for axis in (*rank_matrix.AXES, *rank_matrix.AXES_OF_LOADS) for value in axis}:
        raise SystemExit(f"--only: no cell has {' or '.join(sorted(unknown))}; values are {rank_matrix.AXES}")
    matrix = rank_matrix.Matrix()
    tasks = []
    for chosen, words, try_one in ((cells, "", matrix.try_cell), (loads, "loaded: ", matrix.try_load)):
        for cell in chosen:
            if only <= set(cell):
                name = words + ", ".join(cell)
                tasks.append(([name], lambda cell=cell, name=name, try_one=try_one: {name: try_one(cell)}))
    results = try_all(tasks, a, 8)
    if not rank_matrix.mpirun_is_there():
        print("mpirun, or lib/libsluice_mpi.so, is missing, so that no cell was started by it")
    return results.finish("cells of ranks", {"same bits": "with the same bits", "WRONG": "wrong"})


def try_optimizers(a):
    tasks = []
    for cell in itertools.product(*AXES):
        name = ", ".join(cell[:4]) + f", accumulate {cell[4]}"
        tasks.append(([name], lambda cell=cell, name=name: {name: try_cell(cell)}))
    kinds = {"same bits": "with the same bits in memory and on disk", "refused": "refused with the reason", "WRONG": "wrong"}
    return try_all(tasks, a, 24).finish("cells", kinds)
