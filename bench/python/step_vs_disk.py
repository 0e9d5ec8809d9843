#!/usr/bin/env python3
"""Measures the cost of the disk tier for a step. It compares a step with everything on disk (with --only-state the optimizer's
state alone) with a step in memory, and with the time that fio takes to replay the step's reads and writes (io_uring, O_DIRECT,
1 MiB blocks, depth 32, huge-page buffers).

The figure is step on disk / max(step in memory, fio's replay). Beside it is the goal for a step on disk, at most 1.05 times the
larger of the two, plus the processor's seconds of fio's replay, which the cores share. Rounds alternate, and figures are medians.
--json prints JSON.

    python3 bench/python/step_vs_disk.py --disk FOLDER --model gpt2-124m --batch 4 --seq 256
"""
import statistics
import sys

from side_by_side import CORES, make_tokens, options_of, parser_of, replay, sluice_steps, tell, temporary_folder


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to measure", model="gpt2-124m", batch=4, seq=256, dtype="f32",
                       threads=CORES, rounds=3, steps=4, memory="12GiB", swap="24GiB")
    parser.add_argument("--only-state", action="store_true", help="keep parameters and gradients in memory")
    return parser.parse_args()


def main():
    a = arguments()
    elsewhere = "memory" if a.only_state else "disk"
    on_disk = ["--disk", f"{a.disk}:{a.swap}", "--place-parameters", elsewhere, "--place-gradients", elsewhere, "--place-state", "disk"]
    with temporary_folder(a.disk) as folder:
        tokens = make_tokens(folder / "tokens.bin", 64 * a.batch * a.seq)
        words = [*options_of(a, "model", "memory", "batch", "seq", "dtype", "steps", "threads"), "--data", tokens]
        memory, disk, fio, processor, wait = [], [], [], [], []
        for number in range(a.rounds):
            memory += [row["seconds"] for row in sluice_steps(folder, *words)]
            rows = sluice_steps(folder, *words, *on_disk)
            disk += [row["seconds"] for row in rows]
            wait += [row["read_wait_seconds"] + row["write_wait_seconds"] for row in rows]
            read, written = rows[-1]["disk_read"], rows[-1]["disk_written"]
            seconds, processor_seconds = replay(folder, read, written)
            fio.append(seconds)
            processor.append(processor_seconds)
            print(f"round {number + 1}/{a.rounds}: memory {statistics.median(memory):.2f} s, disk {statistics.median(disk):.2f} s, "
                  f"fio {statistics.median(fio):.2f} s", file=sys.stderr)
    result = {"model": a.model, "dtype": a.dtype, "memory_seconds": statistics.median(memory), "disk_seconds": statistics.median(disk),
              "fio_seconds": statistics.median(fio), "fio_processor_seconds": statistics.median(processor),
              "wait_seconds": statistics.median(wait), "bytes_read": read, "bytes_written": written}
    larger = max(result["memory_seconds"], result["fio_seconds"])
    result["ratio"] = result["disk_seconds"] / larger
    result["goal_seconds"] = 1.05 * larger + result["fio_processor_seconds"] / CORES
    tell(a, result, lambda result: print(
        "{model} {dtype}: in memory {memory_seconds:.2f} s a step, on disk {disk_seconds:.2f} s (waited {wait_seconds:.2f} s), fio "
        "{fio_seconds:.2f} s ({fio_processor_seconds:.2f} s of a processor) for {bytes_read} bytes read and {bytes_written} written; ratio "
        "{ratio:.3f}, goal {goal_seconds:.2f} s".format(**result)))


if __name__ == "__main__":
    main()
