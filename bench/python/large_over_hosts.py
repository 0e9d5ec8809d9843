#!/usr/bin/env python3
"""Trains a model that is larger than two hosts' memory together, cut by its layers over them (`--mesh pipeline=2`), with bf16 parameters without
masters and 8-bit state of AdamW; beside the plan it prints each rank's peak memory, the seconds of a step, and the bytes received from the other
host. Then one rank trains the same steps with twice the memory and the disk of both, and its losses must be the same bits, else the exit status
is 1.

    6b    a Llama of 128 layers of 2048, 6.0G parameters: 24.3 GB of parameters and state, and 24 GB of gradients that are added up
    tiny  4 layers of 64: it shows that the bench works

Hosts are network namespaces of this machine (scripts/hosts.sh; needs root), with one rank of one thread each, which share its cores and its
disk. Data is pseudo-random, and a token is a byte. No checkpoint is written. --around gives words that come before each rank's program, such as
those of a program that limits its memory. --alone-steps 0 leaves the one rank out. --json prints JSON, whose "run" is for
docs/benchmarks/runs.json.

    python3 bench/python/large_over_hosts.py --disk FOLDER
"""
import json
import shlex
import subprocess
import sys

from side_by_side import ROOT, make_text, options_of, parser_of, rows_of, run_entry, tell, temporary_folder

HOSTS = 2
# Layers, width, heads, width of the hidden layers.
CASES = {"6b": (128, 2048, 16, 4928), "tiny": (4, 64, 4, 176)}


def arguments():
    parser = parser_of(__doc__, disk="a folder for what does not fit in memory", batch=1, seq=32, accumulate=2, steps=3, memory="3GiB", rate="1gbit",
                       around="")
    parser.add_argument("--case", choices=CASES, default="6b", help="by default 6b")
    parser.add_argument("--disk-size", default="24GiB", help="of each host, by default 24GiB")
    parser.add_argument("--stages", help="the blocks of each, by default those that the plan chooses")
    parser.add_argument("--memory-alone", default="6GiB", help="of the one rank, by default 6GiB")
    parser.add_argument("--disk-size-alone", default="48GiB", help="of the one rank, by default 48GiB")
    parser.add_argument("--alone-steps", type=int, help="how many of the steps the one rank trains, by default all")
    return parser.parse_args()


def write_model(case, folder):
    layers, width, heads, hidden = CASES[case]
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": width,
              "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": hidden, "vocab_size": 256,
              "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def words_of(a, command, folder, memory, disk, *more):
    given = ["--model", folder / "model", "--data", folder / "text.txt", "--tokens", "bytes", "--dtype", "bf16", "--master", "none",
             "--state", "8bit", *options_of(a, "batch", "seq", "accumulate", "steps"), "--threads", 1, "--memory", memory,
             "--disk", f"{folder}:{disk}", *more]
    return [str(word) for word in (ROOT / "build/bin/sluice", command, *given)]


def mesh_of(a):
    return ("--mesh", f"pipeline={HOSTS}", *(("--stages", a.stages) if a.stages else ()))


def planned(a, folder):
    link = a.rate.removesuffix("bit").replace("g", "Gbit/s,50us").replace("m", "Mbit/s,50us")
    words = words_of(a, "plan", folder, a.memory, a.disk_size, *mesh_of(a), "--hosts", HOSTS, "--link", link, "--json")
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def trained(words, folder, name):
    """Runs a command, and returns the lines of metrics, by rank."""
    more = ["--eval-every", "0", "--progress", "lines", "--metrics", str(folder / f"{name}.jsonl")]
    subprocess.run([*words, *more], check=True, stdout=sys.stderr)
    paths = [folder / f"{name}.jsonl", *sorted(folder.glob(f"{name}.rank*.jsonl"))]
    return list(map(rows_of, paths))


def rank_of(rows, stage):
    """Returns a rank's measurements, beside the plan of its stage."""
    return {"names": stage["names"], "peak": rows[-1]["peak_memory"], "predicted": rows[-1]["predicted_peak"], "planned": stage["predicted_peak"],
            "received": [row["received_from_hosts"] for row in rows], "received_planned": sum(stage["bytes_received"].values()),
            "waits": [row["rank_wait_seconds"] for row in rows], "read": rows[-1]["disk_read"], "written": rows[-1]["disk_written"]}


def measure(a, folder):
    write_model(a.case, folder / "model")
    make_text(folder / "text.txt", 1 << 18)
    plan = planned(a, folder)
    launcher = [str(ROOT / "scripts/hosts.sh"), "--hosts", str(HOSTS), "--rate", a.rate, *shlex.split(a.around)]
    rows = trained([*launcher, *words_of(a, "train", folder, a.memory, a.disk_size, *mesh_of(a))], folder, "hosts")
    result = {"case": a.case, "planned_step": plan["pipeline"]["step_seconds"], "seconds": [row["seconds"] for row in rows[0]],
              "losses": [row["loss"] for row in rows[0]],
              "ranks": [rank_of(of_rank, stage) for of_rank, stage in zip(rows, plan["pipeline"]["stages"], strict=True)]}
    print(json.dumps(result), file=sys.stderr)
    alone = a.steps if a.alone_steps is None else a.alone_steps
    if alone:
        words = words_of(a, "train", folder, a.memory_alone, a.disk_size_alone)
        words[words.index("--steps") + 1] = str(alone)
        row = trained(words, folder, "alone")[0]
        result["alone"] = {"seconds": [step["seconds"] for step in row], "losses": [step["loss"] for step in row], "peak": row[-1]["peak_memory"],
                           "predicted": row[-1]["predicted_peak"]}
        result["losses_equal"] = result["alone"]["losses"] == result["losses"][:alone]
    return result


def told(numbers, digits=1):
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def run_of(a, result):
    layers, width, heads, hidden = CASES[a.case]
    parameters = layers * (4 * width * width + 3 * width * hidden + 2 * width) + 513 * width
    rows = [[f"rank {rank}: {each['names']}", str(each["peak"]), str(each["predicted"]), ", ".join(map(str, each["received"])),
             str(each["received_planned"]), told(each["waits"])] for rank, each in enumerate(result["ranks"])]
    notes = [f"{parameters:,} parameters: a Llama of {layers} layers of {width} ({heads} heads, hidden layers of {hidden}, bytes); {a.accumulate} "
             f"micro-batches of {a.batch} x {a.seq} tokens; {HOSTS} hosts of one rank of one thread, with {a.memory} of memory and {a.disk_size} of "
             f"disk each, joined by {a.rate}. Steps took {told(result['seconds'])} s, where the plan says {result['planned_step']:.1f} s. The losses "
             f"are {told(result['losses'], 6)}."]
    if alone := result.get("alone"):
        rows.append(["one rank", str(alone["peak"]), str(alone["predicted"]), "", "", ""])
        equal = "the same bits" if result["losses_equal"] else "OTHERS"
        notes.append(f"One rank of one thread with {a.memory_alone} of memory and {a.disk_size_alone} of disk took {told(alone['seconds'])} s a "
                     f"step; its losses ({len(alone['losses'])} of {a.steps} steps) are {equal}.")
    columns = ["", "most memory, bytes", "predicted", "bytes from the other host, by step", "planned", "seconds of waiting, by step"]
    return run_entry(__file__, [{"columns": columns, "rows": rows}], notes)


def show(result):
    for note in result["run"]["notes"]:
        print(note)
    for name, peak, predicted, received, planned_bytes, waits in result["run"]["tables"][0]["rows"]:
        print(f"{name}: {peak} bytes of memory, {predicted} predicted" +
              (f"; {received} bytes from the other host in each step, {planned_bytes} planned; waits {waits} s" if received else ""))


def main():
    a = arguments()
    with temporary_folder(a.disk) as folder:
        result = measure(a, folder)
    result["run"] = run_of(a, result)
    tell(a, result, show)
    return 0 if result.get("losses_equal", True) else "ranks on hosts have other losses than one rank"


if __name__ == "__main__":
    sys.exit(main())
