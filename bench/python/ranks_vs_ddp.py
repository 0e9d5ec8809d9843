#!/usr/bin/env python3
"""Compares several ranks of one machine that train a GPT-2 of transformers in f32: PyTorch's DistributedDataParallel and FSDP2 over
Gloo, sluice.torch.wrap(), and the native model of `sluice train --ranks`.

All begin with the same values, and have the same batch, clipping and threads a rank. The sides of PyTorch and the wrapped model train
on the same data, each rank in a process of its own; their first losses must equal DDP's, so that they do the same work. The native
model, which has an order of data of its own, trains in a process for each round, whose first step is not counted. Sides take turns.
Figures are medians over all rounds but the first; tokens are those of all ranks. Memory is the greatest peak of a rank in its steps
(VmHWM; of the native model, rank 0's), so the memory that ranks share counts for each. --json prints JSON. With --rate each rank is a
host of its own, whose wire has this bandwidth (scripts/hosts.sh, which needs root).

    .venv/bin/python bench/python/ranks_vs_ddp.py --rounds 4 --steps 4
"""
import contextlib
import json
import statistics
import sys

from bare_wire import ADDRESS, hosts
from gpt2_sides import CLIP, LR, WEIGHT_DECAY
from side_by_side import CORES, ROOT, free_port, make_tokens, parser_of, sluice_steps, temporary_folder
from turns import CHECKED_STEPS, Side, take_turns, turns_of

NAMES = {"ddp": "DDP", "fsdp": "FSDP2", "wrapped": "sluice.torch", "native": "sluice train"}


def arguments():
    parser = parser_of(__doc__, shapes=True, model="gpt2-124m", batch=2, seq=256, ranks=CORES, threads=1, rounds=4, steps=4,
                       accumulate=1, memory="6GiB")
    parser.add_argument("--rate", help="bandwidth of each host's wire, such as 1gbit; by default all ranks are on this machine")
    parser.add_argument("--stage", type=int, help="what Sluice partitions; by default it chooses")
    return turns_of(parser.parse_args(), parser)


class Ranks:
    """The ranks of one side, which train together on request."""

    def __init__(self, a, kind, folder, on=None):
        """`on` is the program that runs commands on hosts; None: all ranks run on this machine."""
        self.name = kind
        common = {"WORLD_SIZE": str(a.ranks), "MASTER_ADDR": "127.0.0.1" if on is None else ADDRESS.format(1), "MASTER_PORT": free_port()}
        if on is not None:
            common["GLOO_SOCKET_IFNAME"] = "wire"
        self.ranks = [
            Side(a, kind, folder, name=f"{kind}-{rank}",
                 variables=common | {"RANK": str(rank), "LOCAL_RANK": str(rank if on is None else 0)},
                 host=() if on is None else (on, ADDRESS.format(rank + 1)), rank=rank, ranks=a.ranks, memory=a.memory, stage=a.stage)
            for rank in range(a.ranks)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.process.stdin.close()
        for rank in self.ranks:
            rank.__exit__()

    def steps(self, count):
        for rank in self.ranks:
            rank.ask(count)
        answers = [rank.answer() for rank in self.ranks]
        return {
            "seconds": [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)],
            "losses": [statistics.fmean(each) for each in zip(*(answer["losses"] for answer in answers), strict=True)],
            "peak": max(answer["peak_of_steps"] for answer in answers),
        }


def native(a, weights, folder):
    """Returns the metrics of a run's steps after the first."""
    tokens = folder / "tokens.bin"
    if not tokens.exists():
        make_tokens(tokens, 64 * a.ranks * a.batch * a.seq)
    stage = [] if a.stage is None else ["--stage", a.stage]
    ranks = ["--ranks", a.ranks] if a.rate is None else []
    launcher = [] if a.rate is None else [ROOT / "scripts/hosts.sh", "--hosts", a.ranks, "--rate", a.rate]
    return sluice_steps(folder, "--model", weights, "--data", tokens, "--memory", a.memory, "--batch", a.batch, "--seq", a.seq,
                        "--accumulate", a.ranks * a.accumulate, "--threads", a.threads, "--dtype", "f32", "--steps", a.steps + 1,
                        "--lr", LR, "--weight-decay", WEIGHT_DECAY, "--clip", CLIP, *ranks, *stage, launcher=launcher)


def measure(a, folder):
    weights = folder / "weights"
    rows = []
    with hosts(a.ranks, a.rate, folder) if a.rate else contextlib.nullcontext() as on:
        with Ranks(a, "ddp", folder, on) as first:
            expected = first.steps(CHECKED_STEPS)["losses"]
        with Ranks(a, "ddp", folder, on) as ddp, Ranks(a, "fsdp", folder, on) as fsdp, Ranks(a, "wrapped", folder, on) as wrapped:
            result = take_turns(a, [ddp, fsdp, wrapped], expected, lambda: rows.append(native(a, weights, folder)))
    counted = [row for run in rows[1:] for row in run]
    result["native"] = {"seconds": statistics.median(row["seconds"] for row in counted),
                        "losses": [row["loss"] for row in rows[-1]],
                        "peak": max(row["peak_memory"] for row in counted)}
    for side in result.values():
        side["tokens_per_second"] = a.ranks * a.accumulate * a.batch * a.seq / side["seconds"]
        for other in ("ddp", "fsdp"):
            side[f"speed_of_{other}"] = result[other]["seconds"] / side["seconds"]
            side[f"memory_of_{other}"] = side["peak"] / result[other]["peak"]
    return result


def main():
    a = arguments()
    with temporary_folder() as folder:
        result = measure(a, folder)
    if a.json:
        print(json.dumps(result))
        return
    print(f"{a.model}, {a.ranks} ranks of {a.threads} threads, {a.accumulate} x {a.batch} x {a.seq} tokens a rank, "
          f"{'on one machine' if a.rate is None else 'hosts with wires of ' + a.rate}")
    for name, side in result.items():
        print(f"{NAMES[name]}: {side['tokens_per_second']:.0f} tokens/s ({side['speed_of_ddp']:.2f} of DDP's, "
              f"{side['speed_of_fsdp']:.2f} of FSDP2's), at most {side['peak'] >> 20} MiB a rank ({side['memory_of_ddp']:.2f}, "
              f"{side['memory_of_fsdp']:.2f}), losses {side['losses'][0]:.4f} to {side['losses'][-1]:.4f}")


if __name__ == "__main__":
    sys.exit(main())
