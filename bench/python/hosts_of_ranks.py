#!/usr/bin/env python3
"""Measures steps of several hosts with several ranks of one thread each, at each stage, beside as many ranks of one host, alone and
with bare TCP streams of as many bytes beside them, and beside the plan: seconds, and the bytes that a host receives from others.

Hosts are network namespaces of this machine (scripts/hosts.sh; needs root), which share its cores: so the bench measures the cost of the
wire, and no speed-up. The time that a step takes beyond one beside bare streams is Sluice's; the rest is the price of making hosts
(bare_wire.py). The model has a vocabulary of bytes. Sides take turns, and figures are medians over the rounds and over a run's steps but its
first. Bytes are those of the first host's ranks. --json prints JSON.

    python3 bench/python/hosts_of_ranks.py --model gpt2-124m --batch 1 --seq 256 --accumulate 8
    python3 bench/python/hosts_of_ranks.py --ranks 1 --accumulate 16 --delay 1ms --stages 0   # two ranks, eight micro-batches each
"""
import json
import statistics
import sys

from bare_wire import hosts, streams
from side_by_side import ROOT, make_text, options_of, parser_of, rows_of, sluice, sluice_steps, temporary_folder


def arguments():
    parser = parser_of(__doc__, model="gpt2-124m", batch=1, seq=256, accumulate=8, dtype="f32", ranks=2, rounds=2, steps=3)
    parser.add_argument("--hosts", type=int, default=2, help="--ranks counts those of each")
    parser.add_argument("--rate", default="1gbit", help="what a host sends at most, in words of tc")
    parser.add_argument("--delay", default="0ms", help="of each packet")
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 3])
    parser.add_argument("--memory", default="2GiB", help="of each rank")
    return parser.parse_args()


def words_of(a, text, stage):
    return [*options_of(a, "model", "batch", "seq", "accumulate", "dtype", "memory"), "--data", text, "--tokens", "bytes", "--steps", a.steps + 1,
            "--threads", 1, "--stage", stage]


def side(a, text, folder, stage, between_hosts):
    launcher = [ROOT / "scripts/hosts.sh", "--hosts", a.hosts, "--ranks", a.ranks, "--rate", a.rate, "--delay", a.delay]
    words = words_of(a, text, stage)
    sluice_steps(folder, *words, launcher=launcher) if between_hosts else sluice_steps(folder, *words, "--ranks", a.hosts * a.ranks)
    files = ["metrics.jsonl", *(f"metrics.rank{rank}.jsonl" for rank in range(1, a.ranks))]
    rows = [rows_of(folder / name)[1:] for name in files]
    return {"seconds": statistics.median(row["seconds"] for row in rows[0]),
            "bytes": statistics.median(sum(row["received_from_hosts"] for row in step) for step in zip(*rows, strict=True))}


def take_turns(a, text, folder, stage):
    """Runs one round: on hosts, on one host, and there beside streams that carry as many bytes as the hosts' wires
    did."""
    sides = {"hosts": side(a, text, folder, stage, True), "one_host": side(a, text, folder, stage, False)}
    with hosts(a.hosts, a.rate, folder, a.delay) as on, streams(on, a.hosts, sides["hosts"]["bytes"] / sides["hosts"]["seconds"]):
        sides["beside_streams"] = side(a, text, folder, stage, False)
    return sides


def planned(a, text, stage, link):
    more = ["--ranks", a.hosts * a.ranks, "--hosts", a.hosts, "--link", link, "--json"]
    step = json.loads(sluice("plan", *words_of(a, text, stage), *more))["step"]
    return {"seconds": step["seconds"], "bytes": step["bytes_received_from_hosts"]}


def main():
    a = arguments()
    link = a.rate.removesuffix("bit").replace("g", "Gbit/s").replace("m", "Mbit/s")
    found = {stage: [] for stage in a.stages}
    with temporary_folder() as folder:
        text = make_text(folder / "text.txt", 64 * a.accumulate * a.batch * a.seq)
        plans = {stage: planned(a, text, stage, link) for stage in a.stages}
        for number in range(a.rounds):
            for stage in a.stages:
                found[stage].append(take_turns(a, text, folder, stage))
            print(f"round {number + 1}/{a.rounds}", file=sys.stderr)
    result = {stage: {"plan": plans[stage], **{name: {key: statistics.median(sides[name][key] for sides in rounds) for key in one}
                                               for name, one in rounds[0].items()}} for stage, rounds in found.items()}
    if a.json:
        print(json.dumps(result))
        return
    for stage, row in result.items():
        seconds = {name: of["seconds"] for name, of in row.items()}
        print(f"stage {stage}: {seconds['hosts']:.2f} s a step on {a.hosts} hosts of {a.ranks} ranks at {a.rate}, {a.delay}; "
              f"{seconds['one_host']:.2f} s on one host, {seconds['beside_streams']:.2f} s beside bare streams "
              f"({seconds['hosts'] / seconds['beside_streams']:.2f}), {seconds['plan']:.2f} s planned; "
              f"{row['hosts']['bytes'] / 1e6:.1f} MB to a host, {row['plan']['bytes'] / 1e6:.1f} planned")


if __name__ == "__main__":
    main()
