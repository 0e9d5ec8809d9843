"""Compares Sluice's AdamW with its peers on the CPU, on the same elements with the same threads; the sides take turns.

    python bench/python/optimizers_vs_peers.py [--only f32 bf16-8bit ...]     # any Python 3.10; torch is not needed for it

For each kind of work it prints Sluice's rate, its share of the lower of two limits, and the peers' rates. `sluice bench optimizer`
measures all of Sluice's figures in turn. One limit is a loop with the same streams of memory, in place where the update is in place;
the other is the same arithmetic in the caches. The limit of memory is measured in two ways: with 4 KiB of each stream in turn, and
(by lines) with the same 64 elements of all streams, as an update must do. Figures are medians over the rounds. --json prints JSON.

Peers run in processes of their own, from environments that have them. Missing ones are named and left out:

    --torch-python       torch.optim.AdamW(fused=True), with one tensor, and with as many as a model has (.venv/bin/python)
    --deepspeed-python   DeepSpeedCPUAdam, compiled here; wrap_vs_deepspeed.py says how its environment is made, and
                         DS_ACCELERATOR=cpu is set
    --quantized-python   torchao's and bitsandbytes' AdamW8bit; torchao's is compiled by torch at its first step:
                         python3 -m venv VENV
                         VENV/bin/pip install setuptools torch==2.13.0 torchao==0.18.0 bitsandbytes==0.50.2

No peer keeps masters beside bf16 parameters in its optimizer. Without masters, torch's and DeepSpeed's round to nearest (the least
work that is possible), and torchao's rounds stochastically, as Sluice does.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from side_by_side import ROOT, Worker, parser_of, sluice

ROUND_SECONDS = 0.4  # the least duration of a peer's turn
# The sizes of a GPT-2 124M's tensors, which are repeated.
MODEL = [768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768, 768, 768]

# By name: the types of parameters and of state, whether masters are kept, and the peers that do the same.
WORKS: dict[str, tuple[str, str, bool, list[str]]] = {
    "f32": ("f32", "f32", True, ["torch one", "torch many", "deepspeed"]),
    "f32-bf16": ("f32", "bf16", True, []),
    "bf16-masters": ("bf16", "f32", True, []),
    "bf16-masters-bf16": ("bf16", "bf16", True, []),
    "bf16-f32": ("bf16", "f32", False, ["deepspeed"]),
    "bf16-bf16": ("bf16", "bf16", False, ["torch one", "torch many", "deepspeed"]),
    "f32-8bit": ("f32", "8bit", True, ["torchao", "bitsandbytes"]),
    "bf16-masters-8bit": ("bf16", "8bit", True, []),
    "bf16-8bit": ("bf16", "8bit", False, ["torchao", "bitsandbytes"]),
    "f16-masters": ("f16", "f32", True, []),
    "f16-masters-bf16": ("f16", "bf16", True, []),
    "f16-masters-8bit": ("f16", "8bit", True, []),
}


def sizes(elements: int, many: bool) -> list[int]:
    if not many:
        return [elements]
    found: list[int] = []
    while (left := elements - sum(found)) > 0:
        found.append(min(MODEL[len(found) % len(MODEL)], left))
    return found


def make_optimizer(peer: str, state: str, parameters: list[Any]) -> Any:
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    if peer.startswith("torch "):
        import torch

        return torch.optim.AdamW(parameters, fused=True, **settings)
    if peer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, adamw_mode=True, fp32_optimizer_states=state == "f32", **settings)
    if peer == "torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, bf16_stochastic_round=True, **settings)
    from bitsandbytes.optim import AdamW8bit as Quantized

    return Quantized(parameters, **settings)


def serve(peer: str, dtype: str, state: str, elements: int, threads: int) -> None:
    """Runs in a peer's process. For each line of input it prints the seconds of a step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries out of the answers
    import torch

    torch.set_num_threads(threads)
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    parameters = []
    for size in sizes(elements, peer == "torch many"):
        parameter = torch.nn.Parameter((torch.randn(size) * 0.02).to(kind))
        parameter.grad = (torch.randn(size) * 0.01).to(kind)
        parameters.append(parameter)
    optimizer = make_optimizer(peer, state, parameters)
    for _ in range(2):
        optimizer.step()
    print(json.dumps("ready"), file=answers, flush=True)
    for _ in sys.stdin:
        steps, begin = 0, time.perf_counter()
        while (passed := time.perf_counter() - begin) < ROUND_SECONDS:
            optimizer.step()
            steps += 1
        print(passed / steps, file=answers, flush=True)


class Peer(Worker):
    def __init__(self, python: str, peer: str, dtype: str, state: str, a: argparse.Namespace) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "DS_ACCELERATOR": "cpu"}
        environment["PATH"] = f"{pathlib.Path(python).parent}:{environment['PATH']}"
        super().__init__(peer, [python, __file__, "--serve", peer, dtype, state, a.elements, a.threads], environment)
        self.rates: list[float] = []
        self.elements = a.elements

    def take_turn(self) -> None:
        self.rates.append(self.elements / self.answer_to(None))


def started(work: str, a: argparse.Namespace) -> tuple[dict[str, Peer], list[str]]:
    pythons = {"torch one": a.torch_python, "torch many": a.torch_python, "deepspeed": a.deepspeed_python}
    pythons |= {"torchao": a.quantized_python, "bitsandbytes": a.quantized_python}
    dtype, state, _, names = WORKS[work]
    peers: dict[str, Peer] = {}
    notes: list[str] = []
    for name in names:
        if not pythons[name]:
            notes.append(f"{work}: {name} is left out, since no Python with it was named")
            continue
        if shutil.which(pythons[name]) is None:
            notes.append(f"{work}: {name} is left out, since there is no program '{pythons[name]}'")
            continue
        peer = Peer(pythons[name], name, dtype, state, a)
        try:
            peer.answer()
            peers[name] = peer
        except RuntimeError as error:
            notes.append(f"{work}: {name} is left out, since it does not run here: {str(error).splitlines()[-1]}")
    return peers, notes


def sluice_row(options: list[str], a: argparse.Namespace) -> dict[str, Any]:
    words = ["bench", "optimizer", "--json", "--seconds", a.seconds, "--threads", a.threads, *options]
    row: dict[str, Any] = json.loads(sluice(*words, build=a.build))["rows"][0]
    return row


def measure(work: str, a: argparse.Namespace) -> dict[str, Any]:
    dtype, state, master, _ = WORKS[work]
    options = ["--elements", str(a.elements), "--dtype", dtype, "--state", state]
    options += ["--master", "f32" if master else "none"]
    peers, notes = started(work, a)
    rows = []
    for _ in range(a.rounds):
        rows.append(sluice_row(options, a))
        for peer in peers.values():
            peer.take_turn()
    for peer in peers.values():
        peer.__exit__()

    def median(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(row) for row in rows)

    return {
        "work": work,
        "name": rows[0]["name"],
        "bytes_per_element": rows[0]["bytes_per_element"],
        "elements_per_second": median(lambda row: row["elements_per_second"]),
        "bytes_per_second": median(lambda row: row["reached"]),
        "limit_memory": median(lambda row: row["limit_memory"]),
        "limit_memory_by_lines": median(lambda row: row["limit_memory_by_lines"]),
        "limit_arithmetic": median(lambda row: row["limit_arithmetic"]),
        "ratio": median(lambda row: row["ratio"]),
        "ratio_by_lines": median(
            lambda row: row["reached"] / min(row["limit_memory_by_lines"], row["limit_arithmetic"])
        ),
        "peers": {name: statistics.median(peer.rates) for name, peer in peers.items()},
        "notes": notes,
    }


def show(found: dict[str, Any]) -> None:
    limits = {"memory": found["limit_memory"], "arithmetic": found["limit_arithmetic"]}
    bound = min(limits, key=lambda name: limits[name])
    rate = found["elements_per_second"]
    print(
        f"{found['name']}: {rate / 1e9:.2f} G/s, {found['bytes_per_second'] / 1e9:.1f} GB/s "
        f"({found['bytes_per_element']:.0f} bytes each); limits: memory {limits['memory'] / 1e9:.1f}, "
        f"by lines {found['limit_memory_by_lines'] / 1e9:.1f}, arithmetic {limits['arithmetic'] / 1e9:.1f} GB/s; "
        f"{found['ratio']:.2f} of {bound}, {found['ratio_by_lines']:.2f} with memory by lines",
        flush=True,
    )
    for name, peer in found["peers"].items():
        print(f"    {name}: {peer / 1e9:.3f} G/s, {peer / rate:.2f} of Sluice's")
    for note in found["notes"]:
        print("    " + note)


def arguments() -> argparse.Namespace:
    # A few hundred MB of elements exceed large caches. The seconds are those of Sluice's turn in a round, with its limits.
    parser = parser_of(__doc__, elements=64 << 20, threads=len(os.sched_getaffinity(0)), rounds=5, seconds=1.0, build=str(ROOT / "build"))
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS), help="limit the run to these")
    parser.add_argument("--torch-python", default=str(ROOT / ".venv/bin/python"))
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--quantized-python")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        peer, dtype, state, elements, threads = sys.argv[2:]
        return serve(peer, dtype, state, int(elements), int(threads))
    a = arguments()
    found = []
    for work in a.only:
        found.append(measure(work, a))
        if not a.json:
            show(found[-1])
    if a.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
