#!/usr/bin/env python3
"""Measures how fast a checkpoint is saved and loaded, and how fast fio writes (with fsync) and reads files of the same lengths on
the same disk. Rounds alternate, and the figures are medians. --json prints JSON.

Loading allocates memory that the process never used. On a virtual machine the hypervisor may first have to provide it,
more slowly than the disk reads. So the memory is written once before (--warm, in MiB), which gives the speed of bare
metal.

    python3 bench/python/checkpoint_vs_disk.py --disk FOLDER --model gpt2-124m
"""
import mmap
import re
import statistics
import sys
import time

from side_by_side import fio, make_tokens, options_of, parser_of, sluice, tell, temporary_folder


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to measure", model="gpt2-124m", dtype="f32", memory="4GiB", batch=4,
                       seq=256, rounds=3)
    parser.add_argument("--warm", type=int, default=4096, help="MiB of memory to use once before each run")
    return parser.parse_args()


def warm(mebibytes):
    with mmap.mmap(-1, max(1, mebibytes) << 20) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, len(memory), 4096):
            memory[page] = 1


def seconds_of(event, output):
    return float(re.search(event + r" \S+ \(.*? in ([0-9.]+) s", output).group(1))


def run(a, tokens, out, steps):
    warm(a.warm)
    return sluice("train", *options_of(a, "model", "dtype", "memory", "batch", "seq"), "--data", tokens, "--steps", steps, "--out", out, "--keep", 1,
                  "--eval-every", 0, "--progress", "lines", *(["--resume"] if steps > 1 else []))


def fio_seconds(folder, way, sizes):
    """Runs fio on all files at once, as a checkpoint's files are written and read side by side."""
    jobs = [word for i, size in enumerate(sizes) for word in (f"--name=f{i}", f"--rw={way}", f"--size={size}")]
    return max(job[way]["runtime"] for job in fio(folder, "--end_fsync=1", *jobs)) / 1000


def main():
    a = arguments()
    with temporary_folder(a.disk) as folder:
        tokens = make_tokens(folder / "tokens.bin", 100_000)
        seconds = {"save": [], "load": [], "fio_write": [], "fio_read": []}
        for number in range(a.rounds):
            out = folder / f"run{number}"
            seconds["save"].append(seconds_of("saved", run(a, tokens, out, 1)))
            sizes = [file.stat().st_size >> 20 << 20 for file in out.glob("*/*.safetensors")]
            seconds["fio_write"].append(fio_seconds(folder, "write", sizes))
            seconds["fio_read"].append(fio_seconds(folder, "read", sizes))
            seconds["load"].append(seconds_of("resumed from", run(a, tokens, out, 2)))
            for file in out.glob("*/*"):
                file.unlink()
            time.sleep(1)
            print(f"round {number + 1}/{a.rounds}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in seconds.items()), file=sys.stderr)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    result = {"model": a.model, "dtype": a.dtype, "bytes": sum(sizes), "seconds": median,
              "save_ratio": median["fio_write"] / median["save"], "load_ratio": median["fio_read"] / median["load"]}
    tell(a, result, lambda result: print(
        f"{a.model} {a.dtype}, {sum(sizes) / 1e9:.2f} GB: saved in {median['save']:.2f} s (fio {median['fio_write']:.2f}, ratio "
        f"{result['save_ratio']:.2f}), loaded in {median['load']:.2f} s (fio {median['fio_read']:.2f}, ratio {result['load_ratio']:.2f})"))


if __name__ == "__main__":
    main()
