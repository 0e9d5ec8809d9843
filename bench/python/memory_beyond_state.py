#!/usr/bin/env python3
"""Shows the host memory that a run takes beyond its resident state, with the optimizer's state on disk: staging, workspace,
activations and the process itself, as the plan states them, and the measured peak beside the predicted one.

It runs three steps for each requested optimizer and type of state. The resident state is the memory of parameters and
gradients. --json prints JSON.

    python3 bench/python/memory_beyond_state.py --disk FOLDER --model gpt2-124m --batch 1 --seq 256
"""
import json
import sys

from side_by_side import CORES, make_tokens, options_of, parser_of, sluice, sluice_steps, temporary_folder

RESIDENT = ("parameter", "gradient", "optimizer state")
BEYOND = ("staging", "workspace", "activation", "base")


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk for the state", model="gpt2-124m", batch=1, seq=256, dtype="f32",
                       threads=CORES, memory="12GiB", swap="24GiB")
    parser.add_argument("--optimizers", nargs="+", default=["adamw:f32", "adamw:8bit", "lion:f32"], help="NAME:STATE")
    return parser.parse_args()


def measure(a, folder, optimizer):
    name, state = optimizer.split(":")
    words = [*options_of(a, "model", "memory", "batch", "seq", "dtype", "threads"), "--data", folder / "tokens.bin",
             "--disk", f"{a.disk}:{a.swap}", "--optimizer", name, "--state", state, "--place-parameters", "memory",
             "--place-gradients", "memory", "--place-state", "disk", "--steps", 3]
    host = json.loads(sluice("plan", "--json", *words))["bytes"]["host"]
    last = sluice_steps(folder, *words)[-1]
    parts = {purpose: host[purpose] for purpose in BEYOND}
    return {"optimizer": optimizer, "resident": sum(host[purpose] for purpose in RESIDENT), "beyond": sum(parts.values()), **parts,
            "predicted_peak": last["predicted_peak"], "peak": last["peak_memory"]}


def main():
    a = arguments()
    rows = []
    with temporary_folder(a.disk) as folder:
        make_tokens(folder / "tokens.bin", 64 * a.batch * a.seq)
        for optimizer in a.optimizers:
            rows.append(measure(a, folder, optimizer))
            row = {key: value / 2**20 if isinstance(value, int) else value for key, value in rows[-1].items()}
            difference = 100 * (row["peak"] / row["predicted_peak"] - 1)
            print("{optimizer}: {resident:.0f} MiB resident, {beyond:.0f} beyond (staging {staging:.0f}, workspace {workspace:.0f}, "
                  "activations {activation:.0f}, process {base:.0f}); peak {peak:.0f} measured, {predicted_peak:.0f} predicted "
                  "({difference:+.1f}%)".format(**row, difference=difference), file=sys.stderr if a.json else sys.stdout)
    if a.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
