#!/usr/bin/env python3
"""Compares the seconds of a step that `sluice plan` predicts with measured steps, for runs in memory and on disk, in f32 and bf16,
from GPT-2 to a Llama of 8B, with AdamW state in f32 and in 8 bits, with one micro-batch and several, by one rank and by several,
in the memory of one machine and over a wire. One run follows the other; figures are medians of the steps after the first. --json
prints JSON.

For both sides it prints where a step's seconds go: products and loops, updates, and waiting for the disk.

Hosts with a wire between them are made of this machine, and plans are for hosts that have a machine each. So for these runs it also measures
the ranks on one host, planned as they are run, alone and beside bare TCP streams that carry as many bytes (bare_wire.py). For the ratio the
planned step is lengthened by the slowdown from ranks sharing cores, and by that from the streams.

    python3 bench/python/planned_vs_taken.py --disk FOLDER [RUN ...]
"""
import dataclasses
import json
import statistics
import sys

from bare_wire import hosts, streams
from side_by_side import CORES, ROOT, make_text, make_tokens, parser_of, sluice, sluice_steps, temporary_folder

ON_DISK = ["--place-parameters", "disk", "--place-gradients", "disk", "--place-state", "disk"]
NARROW = ["--dtype", "bf16", "--master", "none", "--state", "8bit", "--clip", 0]


@dataclasses.dataclass
class Run:
    tokens: int  # of a micro-batch
    steps: int
    options: list
    disk: str | None = None  # the most bytes of it
    ranks: int = 1
    rate: str | None = None  # of the wire, where each rank has a host of its own (scripts/hosts.sh, which needs root)

    def link(self):
        """The link that is stated to the plan: a wire's latency is that of two polling programs, and memory's bandwidth is that of
        sums."""
        return "1Gbit/s,100us" if self.rate else "20Gbit/s,20us"


def of_ranks(ranks, *options, rate=None):
    """Eight micro-batches for each rank, which has one thread."""
    return Run(256, 4, ["--model", "gpt2-124m", "--tokens", "bytes", "--memory", "2GiB", "--threads", 1, "--batch", 1, "--seq", 256,
                        "--accumulate", 8 * ranks, *options], ranks=ranks, rate=rate)


RUNS = {
    "mini": Run(1024, 20, ["--model", "mini", "--memory", "176MiB", "--batch", 8, "--seq", 128], "512MiB"),
    "gpt2-124m": Run(1024, 5, ["--model", "gpt2-124m", "--memory", "6GiB", "--batch", 4, "--seq", 256]),
    "gpt2-124m, on disk": Run(1024, 5, ["--model", "gpt2-124m", "--memory", "3GiB", "--batch", 4, "--seq", 256, *ON_DISK], "8GiB"),
    "gpt2-355m, bf16, 4 micro-batches": Run(
        256, 4, ["--model", "gpt2-355m", "--memory", "8GiB", "--batch", 1, "--seq", 256, "--accumulate", 4, "--dtype", "bf16"]),
    "gpt2-355m, narrow, on disk": Run(
        128, 6, ["--model", "gpt2-355m", "--memory", "1536MiB", "--batch", 1, "--seq", 128, *NARROW, *ON_DISK], "12GiB"),
    "gpt2-1.5b, on disk": Run(128, 3, ["--model", "gpt2-1.5b", "--memory", "4GiB", "--batch", 1, "--seq", 128, "--clip", 0], "30GiB"),
    "llama-1b, bf16, on disk": Run(
        512, 4, ["--model", "llama-1b", "--tokens", "bytes", "--memory", "3GiB", "--batch", 1, "--seq", 512, "--dtype", "bf16",
                 *ON_DISK], "20GiB"),
    "llama-8b, narrow, on disk": Run(
        128, 3, ["--model", "llama-8b", "--tokens", "bytes", "--memory", "4GiB", "--batch", 1, "--seq", 128, *NARROW], "40GiB"),
    "ranks: 1": of_ranks(1),
    "ranks: 2": of_ranks(2),
    "ranks: 2, stage 3": of_ranks(2, "--stage", 3),
    "ranks: 2 hosts, 1 Gbit/s": of_ranks(2, rate="1gbit"),
    "ranks: 2 hosts, 1 Gbit/s, stage 3": of_ranks(2, "--stage", 3, rate="1gbit"),
    "ranks: 4": of_ranks(4),
    "ranks: 4 hosts, 1 Gbit/s": of_ranks(4, rate="1gbit"),
}


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to use", build=str(ROOT / "build"))
    parser.add_argument("runs", nargs="*", metavar="RUN", help="how the names of the wanted runs begin; the runs are " + "; ".join(RUNS))
    a = parser.parse_args()
    a.runs = [name for name in RUNS if not a.runs or any(name.startswith(word) for word in a.runs)]
    return a


def price_of_hosts(r, rows, steps, folder):
    """The factor by which a step is longer because hosts share this machine's cores, whatever program uses the wire between
    them."""
    def seconds(rows):
        return statistics.median(row["seconds"] for row in rows)

    alone = seconds(steps())
    with hosts(r.ranks, r.rate, folder) as on, streams(on, r.ranks, rows[-1]["received"] / seconds(rows)):
        return seconds(steps()) / alone * max(1, r.ranks / CORES)


def run(a, name, folder):
    r = RUNS[name]
    is_text = "--tokens" in r.options
    data = make_text(folder / "text.txt", 64 * r.tokens) if is_text else make_tokens(folder / "tokens.bin", 64 * r.tokens)
    options = [*r.options, "--data", data, *(["--disk", f"{a.disk}:{r.disk}"] if r.disk else [])]
    ranks = ["--ranks", r.ranks] if r.ranks > 1 else []
    planned_for = [*ranks, "--link", r.link(), *(["--hosts", r.ranks] if r.rate else [])] if ranks else []
    plan = json.loads(sluice("plan", *options, *planned_for, "--json", build=a.build))["step"]
    launcher = [ROOT / "scripts/hosts.sh", "--hosts", r.ranks, "--rate", r.rate] if r.rate else []

    def steps(launcher=()):
        more = [] if launcher else ranks
        return sluice_steps(folder, *options, *more, "--steps", r.steps, build=a.build, launcher=launcher)

    rows = steps(launcher)
    price = price_of_hosts(r, rows, steps, folder) if r.rate else 1.0
    middle = {key: statistics.median(row[key] for row in rows)
              for key in ("seconds", "read_wait_seconds", "write_wait_seconds", "optimizer_seconds")}
    waited = middle["read_wait_seconds"] + middle["write_wait_seconds"]
    result = {"run": name, "planned": plan["seconds"], "taken": middle["seconds"], "price_of_hosts": price,
              "ratio": middle["seconds"] / plan["seconds"] / price,
              "least": min(row["seconds"] for row in rows), "most": max(row["seconds"] for row in rows),
              "bound": plan["bound"], "read": rows[-1]["disk_read"], "written": rows[-1]["disk_written"],
              "planned_parts": {key: plan[key] for key in plan if key.endswith("_seconds")},
              "received": rows[-1].get("received", 0),
              "taken_parts": {"compute_seconds": middle["seconds"] - waited - middle["optimizer_seconds"],
                              "optimizer_seconds": middle["optimizer_seconds"], "wait_seconds": waited}}
    return result


def parts(seconds):
    return ", ".join(f"{key.removesuffix('_seconds')} {value:.2f}" for key, value in seconds.items())


def main():
    a = arguments()
    results = []
    with temporary_folder(a.disk) as folder:
        for name in a.runs:
            results.append(r := run(a, name, folder))
            print(f"{name:34}planned {r['planned']:6.2f} s, taken {r['taken']:6.2f} s ({r['least']:.2f} to {r['most']:.2f}), "
                  f"{'price of hosts ' + format(r['price_of_hosts'], '.2f') + ', ' if r['price_of_hosts'] != 1 else ''}ratio {r['ratio']:.2f}; planned {parts(r['planned_parts'])}; taken {parts(r['taken_parts'])}",
                  file=sys.stderr if a.json else sys.stdout, flush=True)
    if a.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
