"""Processes that are ranks: they call functions of support.over_ranks, or of another module there, together, as often as a test asks, so that PyTorch is loaded
once. Each has the variables that torchrun would set."""

import contextlib
import faulthandler
import importlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback

from support import warm_python
from support.sluice_process import PACKAGE, TESTS

LIMIT = 120  # seconds after which ranks that have not answered hang


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def variables_of(rank, size, port):
    """The environment of a rank."""
    return os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, TESTS, TESTS / "torch"))),
    }  # fmt: skip


def start(rank, size, port, arguments, **variables):
    """Starts Python as a rank."""
    return subprocess.Popen(
        [warm_python.executable(), *arguments], env=variables_of(rank, size, port) | variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run_program(program, size=2, limit=LIMIT, **variables):
    """Runs a program on every rank. Returns (status, output, errors) of each."""
    port = free_port()
    ranks = [start(rank, size, port, ["-c", program], **variables) for rank in range(size)]
    try:
        outputs = [None] * size

        def take(rank):
            outputs[rank] = ranks[rank].communicate()

        threads = [threading.Thread(target=take, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit)
        assert all(outputs), f"a rank hangs; others said {outputs}"
        return [(each.returncode, *out) for each, out in zip(ranks, outputs, strict=True)]
    finally:
        for each in ranks:
            each.kill()


class Pool:
    """So many ranks, until its `with` ends."""

    def __init__(self, size, module):
        port = free_port()
        self._known = {}
        self._ranks = [start(rank, size, port, ["-m", "support.rank_pool", module]) for rank in range(size)]
        self._answers = [queue.Queue() for _ in range(size)]
        self._errors = [[] for _ in range(size)]
        for rank, answers, errors in zip(self._ranks, self._answers, self._errors, strict=True):
            for stream, take in ((rank.stdout, answers.put), (rank.stderr, errors.append)):
                threading.Thread(target=lambda s=stream, t=take: [t(line) for line in s], daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def call(self, function, **given):
        """Calls a function of the module on every rank. Returns what each returns. Raises AssertionError with what a
        rank raised, or where one hangs. What others are compared with is computed once: trainings on the CPU that neither
        write nor read files."""
        words = json.dumps([function, given], sort_keys=True)
        if function not in ("train", "whole") or given.keys() & {"save", "load"}:
            return self._call(function, given)
        if words not in self._known:
            self._known[words] = json.dumps(self._call(function, given))
        return json.loads(self._known[words])

    def _call(self, function, given):
        for rank in self._ranks:
            print(json.dumps([function, given]), file=rank.stdin, flush=True)
        answers = [self._answer(rank, f"{function}({given})") for rank in range(len(self._ranks))]
        wrong = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        assert not wrong, f"{function}({given}): " + "\n".join(wrong)
        return [answer["result"] for answer in answers]

    def _answer(self, rank, what):
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self._ranks[rank].poll() is None:
            with contextlib.suppress(queue.Empty):
                return json.loads(self._answers[rank].get(timeout=0.5))
        state = "hangs" if self._ranks[rank].poll() is None else f"has ended ({self._ranks[rank].returncode})"
        return {"error": f"it {state} in {what}: {''.join(self._errors[rank][-30:])}"}


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    functions = importlib.import_module(f"support.{sys.argv[1]}")
    for line in sys.stdin:
        function, given = json.loads(line)
        faulthandler.dump_traceback_later(LIMIT / 2)  # says where a rank hangs
        try:
            answer = {"result": getattr(functions, function)(**given)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
