#!/usr/bin/env python3
"""Compares the seconds of a step of a wrapped GPT-2 (transformers) with those of the plain one with PyTorch's fused AdamW.

Three processes train the same model from the same values on the same data, with the same batch, clipping, threads and type
(f32, or by autocast bf16), and take turns: plain, wrapped with everything in memory, and wrapped with everything on disk; and fio
replays the bytes that a step on disk reads and writes. Losses must equal the plain one's. Seconds are medians over the steps of all
rounds but the first.
The figures are plain / in memory, and on disk / max(in memory, fio). --json prints JSON.

    .venv/bin/python bench/python/wrap_vs_pytorch.py --disk FOLDER --batch 4 --seq 256
"""
import contextlib
import statistics

from side_by_side import CORES, parser_of, replay, tell, temporary_folder
from turns import Side, plain_losses, take_turns, turns_of


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk to measure", shapes=True, model="gpt2-124m", memory="20GiB",
                       reserve="4GiB", held_units=3, batch=4, seq=256, threads=CORES, rounds=5,
                       steps=3)
    parser.add_argument("--autocast", action="store_true", help="compute in bf16 by autocast, without --reserve")
    a = parser.parse_args()
    a.reserve = None if a.autocast else a.reserve
    return turns_of(a, parser)


def measure(a, folder):
    expected = plain_losses(a, folder)
    with contextlib.ExitStack() as stack:
        def side(kind, **settings):
            made = stack.enter_context(Side(a, kind, folder, **settings))
            return made, made.steps(0)  # waits until it is ready, so that no two begin at once

        def wrapped(place):
            return side("sluice", name=place, place=place, memory=a.memory, reserve=a.reserve, held_units=a.held_units)

        plain, memory, (disk, told) = side("plain")[0], wrapped("memory")[0], wrapped("disk")
        times, step = [], told["step"]
        sides = take_turns(a, [plain, memory, disk], expected,
                           lambda: times.append(replay(folder, step["bytes_read"], step["bytes_written"])[0]))
    return {name: side["seconds"] for name, side in sides.items()} | {
        "fio": statistics.median(times), "touches": sides["disk"]["touches"]}


def main():
    a = arguments()
    with temporary_folder(a.disk) as folder:
        result = measure(a, folder)
    result |= {"speed_in_memory": result["plain"] / result["memory"],
               "disk_ratio": result["disk"] / max(result["memory"], result["fio"])}
    tell(a, result, lambda result: print(
        "{plain:.2f} s plain, {memory:.2f} s in memory ({speed_in_memory:.3f}x), {disk:.2f} s on disk, fio {fio:.2f} s "
        "(ratio {disk_ratio:.3f}); {touches} touches".format(**result)))


if __name__ == "__main__":
    main()
