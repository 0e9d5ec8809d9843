"""Makes models train alternately, each in a process of its own (gpt2_sides.py), so that changes of the machine's speed affect
all of them."""
import json
import os
import pathlib
import shlex
import statistics
import sys

from side_by_side import Worker

# The losses of this number of first steps must equal plain PyTorch's, within the tolerance: then all sides do the same
# work.
CHECKED_STEPS, LOSS_TOLERANCE = 3, 1e-3


def turns_of(a, parser):
    """Checks a.rounds and a.steps, and returns a."""
    if a.rounds < 2:
        parser.error("--rounds: the first is not counted, so give at least 2")
    if a.rounds * a.steps < CHECKED_STEPS:
        parser.error(f"--rounds, --steps: the losses of {CHECKED_STEPS} steps are compared, so give at least as many")
    return a


class Side(Worker):
    """A process that trains on request.

    `a` has the bench's arguments (model, batch, seq, threads, and where they count, accumulate and autocast).
    `host` are words before the command, which a shell there reads. `kind` is one of gpt2_sides.py's; `settings` are the kind's own.
    """

    def __init__(self, a, kind, folder, name=None, python=sys.executable, variables=None, host=(), **settings):
        disk = folder / (name or kind)
        disk.mkdir(exist_ok=True)
        settings |= {"side": kind, "model": a.model, "batch": a.batch, "seq": a.seq, "threads": a.threads,
                     "accumulate": getattr(a, "accumulate", 1), "autocast": getattr(a, "autocast", False),
                     "weights": str(folder / "weights"), "disk": str(disk)}
        environment = os.environ | {"OMP_NUM_THREADS": str(a.threads)} | (variables or {})
        script = pathlib.Path(__file__).with_name("gpt2_sides.py")
        words = [str(python), str(script), json.dumps(settings)]
        super().__init__(disk.name, [*host, shlex.join(words)] if host else words, environment)

    def steps(self, count):
        """Trains so many steps and returns the answer. 0 steps wait until the process is ready."""
        return self.answer_to(count)


def plain_losses(a, folder):
    """Returns the losses of plain PyTorch's first steps. It leaves the values with which all sides begin in folder / "weights"."""
    with Side(a, "plain", folder) as plain:
        return plain.steps(CHECKED_STEPS)["losses"]


def take_turns(a, sides, expected, after_round=lambda: None):
    """Returns, by the side's name, its last answer, with the median of its seconds in all rounds but the first, and the error of
    its first losses."""
    seconds, losses, last = ({side.name: [] for side in sides} for _ in range(3))
    for number in range(a.rounds):
        for side in sides:
            last[side.name] = side.steps(a.steps)
            losses[side.name] += last[side.name]["losses"]
            seconds[side.name] += last[side.name]["seconds"] if number else []
        after_round()
        if number:
            found = ", ".join(f"{name} {statistics.median(taken):.2f} s" for name, taken in seconds.items())
            print(f"round {number}/{a.rounds - 1}: {found}", file=sys.stderr)
    return {
        name: last[name] | {"seconds": statistics.median(taken),
                            "loss_error": loss_error(name, losses[name][:CHECKED_STEPS], expected)}
        for name, taken in seconds.items()
    }


def loss_error(name, losses, expected):
    worst = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
    if worst > LOSS_TOLERANCE:
        raise RuntimeError(f"{name} does not train the same model: losses {losses}, plain PyTorch's {expected}")
    return worst
