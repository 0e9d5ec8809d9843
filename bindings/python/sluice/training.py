"""Training of the native models: `sluice train` as a function.

The program runs as a child process: its matrix library has an OpenMP of its own, which must not be loaded into a process
that may have torch, and the `memory` budget is for the run alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from ._handle import text_of
from ._library import find_program
from .errors import InternalError, InvalidArgumentError, SystemIOError, error_named, unexpected
from .model import Folder, Path, Size, folders_of, size_of
from .optimizers import table


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    steps: the number of completed steps, including those of runs that it resumed.
    last_loss: the last step's; None where no step was left to do, or where it was not finite (a skipped step).
    checkpoint: the newest in `out`, or None.
    best: the checkpoint in `out` with the least validation loss (`eval_every`), or None; `best_loss`: that loss.
    metrics: the lines of metrics.jsonl (docs/formats/metrics.md): all of the file that `metrics` names, else this run's.
    """

    steps: int
    last_loss: float | None
    checkpoint: pathlib.Path | None
    best: pathlib.Path | None
    best_loss: float | None
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)


def train(
    *,
    model: Path | None = None,
    data: Path | Sequence[Path] | None = None,
    tokens: str | None = None,
    valid: Path | None = None,
    held_out: float | None = None,
    dtype: str | None = None,
    seq: int | None = None,
    seed: int | None = None,
    batch: int | None = None,
    accumulate: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    warmup: int | None = None,
    schedule: str | None = None,
    final_lr: float | None = None,
    clip: float | None = None,
    clip_value: float | None = None,
    loss_scale: str | float | None = None,
    initial_scale: float | None = None,
    scale_growth_interval: int | None = None,
    weight_decay: float | None = None,
    optimizer: str | None = None,
    adamw_lr: float | None = None,
    state: str | None = None,
    master: str | None = None,
    memory: Size | None = None,
    disk: Path | Folder | Sequence[Path | Folder] | None = None,
    recompute: str | None = None,
    threads: int | None = None,
    ranks: int | None = None,
    stage: int | None = None,
    mesh: str | None = None,
    pipeline: str | None = None,
    chunks: int | None = None,
    stages: str | None = None,
    reproducible: bool = False,
    grain: int | None = None,
    sequence_grain: int | None = None,
    silence: int | None = None,
    patience: int | None = None,
    out: Path | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    resume: bool = False,
    eval_every: int | None = None,
    eval_batches: int | None = None,
    metrics: Path | None = None,
    trace: Path | None = None,
    profile: Path | None = None,
    progress: str | None = None,
    config: Path | None = None,
    group: int | None = None,
    prefetch: int | None = None,
    chunk_elements: int | None = None,
    place_parameters: str | None = None,
    place_gradients: str | None = None,
    place_state: str | None = None,
    log_level: str | None = None,
    **settings: Any,
) -> TrainResult:
    """Trains a native model from a preset or a Hugging Face folder, as `sluice train` does, within the stated memory. The
    options are the command line's (`python -m sluice train --help` explains them), and None is its default. `disk` takes
    "FOLDER", "FOLDER:SIZE" or sluice.Folder, one or several. `settings` are the optimizer's, by the names of
    docs/optimizers.md; of a switch True and False (`nesterov=False` is the command line's --no-nesterov).

    Progress goes to this process's standard output, as the command line shows it (`progress`: "auto", "bar", "lines"
    or "none"). Errors are exceptions of sluice.Error with the engine's own text. A KeyboardInterrupt saves at the end
    of the step and is then raised; a second one ends the run at once.
    """
    options = dict(locals())
    options.update(_known(options.pop("settings")))
    given = {name: value for name, value in options.items() if value is not None}
    with contextlib.ExitStack() as stack:
        lines = _setting("metrics", given)
        if lines is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-"))
            lines = given["metrics"] = os.path.join(folder, "metrics.jsonl")
        _run(list(_words(given)))
        return _result(pathlib.Path(lines), _setting("out", given))


def _switches() -> set[str]:
    return {setting["name"] for settings in table().values() for setting in settings if setting["type"] == "switch"}


def _known(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises a TypeError for a keyword argument that train() does not have."""
    names = {setting["name"] for settings in table().values() for setting in settings}
    for name in settings:
        if name not in names:
            raise unexpected("train", name, names | inspect.signature(train).parameters.keys() - {"settings"})
    return settings


def _setting(name: str, given: Mapping[str, Any]) -> str | None:
    """The path of this name; it may be in the `config` file instead. The program reports errors of that file."""
    if name in given:
        return str(os.fspath(given[name]))
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads(pathlib.Path(given["config"]).read_bytes())[name])
    return None


def _words(given: Mapping[str, Any]) -> Iterator[str]:
    """Returns the program's arguments for the given options."""
    switches = _switches()
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("resume", "reproducible") or name in switches:
            if not isinstance(value, bool):
                raise InvalidArgumentError(f"{name} is {value!r}; it may be True or False")
            if value or name in switches:
                yield flag if value else f"--no-{flag[2:]}"
            continue
        value = folders_of(value) if name == "disk" else value
        for item in value if isinstance(value, (list, tuple)) else [value]:
            word = _word(item)
            if "\0" in word:
                raise InvalidArgumentError(f"{name} is {word!r}; a text without NUL is needed")
            yield f"{flag}={word}"


def _word(value: Any) -> str:
    if isinstance(value, Folder):
        # With a slash at its end, no part of the path can be parsed as a size.
        path = os.path.join(os.fspath(value.path), "")
        return path if value.limit is None else f"{path}:{size_of(value.limit, f'the limit of {path!r}')}"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


class _Errors(threading.Thread):
    """Copies the program's standard error, except for the line with the reason of a failure."""

    def __init__(self, pipe: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self.found: dict[str, str] = {}
        self.start()

    def run(self) -> None:
        with self._pipe:
            for line in self._pipe:
                if line.startswith(b'{"error":'):
                    self.found = json.loads(line)
                else:
                    sys.stderr.write(line.decode("utf-8", "replace"))
                    sys.stderr.flush()


def _run(words: Sequence[str]) -> None:
    """Runs `sluice train` to its end; raises the exception for the error that it reports."""
    command = [str(find_program()), "train", "--errors=json", f"--stop-with={os.getpid()}", *words]
    sys.stdout.flush()
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        raise SystemIOError(f"'{command[0]}' could not be run: {error}") from error
    assert process.stderr is not None
    errors = _Errors(process.stderr)
    interrupts = _wait(process)
    errors.join()
    status = process.returncode
    if errors.found:
        raise error_named(errors.found["error"], errors.found["text"])
    if interrupts:
        raise KeyboardInterrupt
    if status < 0:
        raise SystemIOError(
            f"the run was ended by {signal.Signals(-status).name}; what was saved before stands, and resume=True goes "
            "on from it"
        )
    if status != 0:
        raise InternalError(f"the run ended with status {status} and no reason")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of the run. Returns the number of keyboard interrupts."""
    interrupts = 0
    try:
        while True:
            try:
                process.wait()
                return interrupts
            except KeyboardInterrupt:
                interrupts += 1
                # In a terminal Ctrl-C reaches the run as well, and a second SIGINT would make it stop at once.
                process.send_signal(signal.SIGUSR1 if interrupts == 1 else signal.SIGINT)
    finally:
        process.send_signal(signal.SIGTERM)  # no child process must remain


def _result(metrics: pathlib.Path, out: str | None) -> TrainResult:
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    found = json.loads(text_of("sluice_checkpoints", os.fsencode(out))) if out else {"steps": [], "best": None}
    saved = {step: pathlib.Path(str(out), f"step-{step:08}") for step in found["steps"]}
    newest, best = max(saved, default=0), found["best"] or {}
    last = lines[-1] if lines else {"step": newest}
    return TrainResult(
        last["step"], last.get("loss"), saved.get(newest), saved.get(best.get("step")), best.get("validation_loss"), lines
    )
