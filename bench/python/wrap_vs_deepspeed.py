#!/usr/bin/env python3
"""Compares the seconds of a step and the peak memory of a GPT-2 of transformers in f32, wrapped with everything on disk, with those
of DeepSpeed ZeRO stage 3 with parameters and optimizer state in files.

Both train the same model from the same values on the same data, with the same batch, clipping, threads and disk, each in a
process of its own, and take turns. The losses of the first steps must equal plain PyTorch's, so that both do the same work.
Figures are medians over the steps of all rounds but the first. Memory is the resident peak (VmHWM) of the steps; that of the whole
process, including reading the values, is printed, too. --json prints JSON.

    .venv/bin/python bench/python/wrap_vs_deepspeed.py --disk FOLDER --deepspeed-python VENV/bin/python

DeepSpeed is installed into an environment of its own, with the other packages in the versions of requirements.txt. It builds
its kernels when it first runs (some minutes; libaio-dev, ninja-build and g++ are needed):

    apt-get install libaio-dev ninja-build g++
    python3 -m venv VENV
    VENV/bin/pip install setuptools wheel torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    DS_ACCELERATOR=cpu VENV/bin/pip install --no-build-isolation deepspeed==0.19.8

--set changes DeepSpeed's configuration, by path: --set aio.block_size=8388608. --tune tries one setting after another
before the rounds and keeps the fastest value of each.
"""
import argparse
import copy
import json
import sys

from gpt2_sides import CLIP, LR, WEIGHT_DECAY
from side_by_side import CORES, gpt2_config, parser_of, temporary_folder
from turns import Side, plain_losses, take_turns, turns_of

OPTIMIZER = "zero_optimization.offload_optimizer."
# The choices that --tune tries, in this order, each with the best of the previous ones. A choice is a group of
# settings.
TUNED = [
    [{"aio.block_size": size} for size in (1 << 20, 1 << 18, 1 << 22, 1 << 23)],
    [{"aio.queue_depth": depth} for depth in (32, 8, 128)],
    [{"aio.intra_op_parallelism": threads} for threads in (1, 2, 4)],
    [{"aio.overlap_events": True}, {"aio.overlap_events": False}],
    [{"aio.single_submit": False}, {"aio.single_submit": True}],
    [
        {OPTIMIZER + "pipeline_read": read, OPTIMIZER + "pipeline_write": write, OPTIMIZER + "buffer_count": buffers}
        for read, write, buffers in ((False, False, 4), (True, False, 8), (False, True, 8), (True, True, 12))
    ],
    [{"zero_optimization.stage3_prefetch_bucket_size": elements} for elements in (5_000_000, 0)],
]


def setting(text):
    path, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"'{text}' has no value; write PATH=VALUE, such as aio.queue_depth=32")
    return path, json.loads(value)


def arguments():
    parser = parser_of(__doc__, disk="a folder on the disk that both use", shapes=True, model="gpt2-124m", memory="3400MiB",
                       batch=4, seq=256, threads=CORES, rounds=4, steps=3)
    parser.add_argument("--deepspeed-python", required=True, help="the Python of an environment with DeepSpeed (see above)")
    parser.add_argument("--reserve", help="the part of --memory that Sluice leaves to PyTorch; by default an estimate with a margin")
    parser.add_argument("--held-units", type=int, default=3, help="how many units Sluice holds at once")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="PATH=VALUE", help="change DeepSpeed's configuration")
    parser.add_argument("--tune", action="store_true")
    return turns_of(parser.parse_args(), parser)


def put(config, path, value):
    *folders, name = path.split(".")
    for folder in folders:
        config = config[folder]
    config[name] = value


def deepspeed_config(a, disk):
    """The configuration has the fewest buffers that work, each as large as the embedding, which DeepSpeed does not
    divide."""
    shape = gpt2_config(a.model)
    largest = shape.vocab_size * shape.n_embd
    aligned = -(-largest // (1 << 20)) << 20
    config = {
        "train_micro_batch_size_per_gpu": a.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": aligned,
            "stage3_prefetch_bucket_size": 5_000_000,
            "stage3_max_live_parameters": aligned,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": 5_000_000,
            "offload_param": {"device": "nvme", "nvme_path": str(disk), "pin_memory": False, "buffer_count": 5,
                              "buffer_size": aligned},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(disk), "pin_memory": False, "buffer_count": 4,
                                  "pipeline_read": False, "pipeline_write": False},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False,
                "overlap_events": True},
    }
    for path, value in a.set:
        put(config, path, value)
    return config


def tune(a, folder, config):
    """Finds the best of each choice in turn, by the fastest of 3 steps. A setting that cannot run is reported and left
    out."""
    for choices in TUNED:
        best, chosen = None, None
        for choice in choices:
            tried = copy.deepcopy(config)
            for path, value in choice.items():
                put(tried, path, value)
            try:
                with Side(a, "deepspeed", folder, python=a.deepspeed_python, config=tried) as side:
                    taken = min(side.steps(3)["seconds"])
            except RuntimeError as error:
                print(f"tune: {choice}: left out: {str(error).splitlines()[-1]}", file=sys.stderr)
                continue
            print(f"tune: {choice}: {taken:.2f} s", file=sys.stderr)
            if best is None or taken < best:
                best, chosen = taken, tried
        if chosen is None:
            raise RuntimeError(f"DeepSpeed ran with none of {choices}; run it without --tune to see all of the error")
        config = chosen
    return config


def measure(a, folder):
    expected = plain_losses(a, folder)
    config = deepspeed_config(a, folder / "deepspeed")
    if a.tune:
        config = tune(a, folder, config)
    with Side(a, "sluice", folder, place="disk", memory=a.memory, reserve=a.reserve, held_units=a.held_units) as ours, \
            Side(a, "deepspeed", folder, python=a.deepspeed_python, config=config) as theirs:
        result = take_turns(a, [ours, theirs], expected)
    result["deepspeed"]["config"] = config
    for ratio, what in (("speed", "seconds"), ("memory", "peak_of_steps")):
        result[ratio] = result["deepspeed"][what] / result["sluice"][what]
    return result


def main():
    a = arguments()
    with temporary_folder(a.disk) as folder:
        result = measure(a, folder)
    if a.json:
        print(json.dumps(result))
        return
    for name in ("sluice", "deepspeed"):
        side = result[name]
        print(f"{name}: {side['seconds']:.2f} s a step, {side['peak_of_steps'] >> 20} MiB at most in the steps "
              f"({side['peak'] >> 20} MiB with the start), losses within {side['loss_error']:.1e} of PyTorch's")
    print(f"Sluice is {result['speed']:.2f}x as fast, in {1 / result['memory']:.2f}x of the memory")
    print("DeepSpeed's configuration: " + json.dumps(result["deepspeed"]["config"]))


if __name__ == "__main__":
    main()
