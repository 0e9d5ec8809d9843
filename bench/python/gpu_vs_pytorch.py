#!/usr/bin/env python3
"""Compares steps of a Llama's shape in bf16 on one GPU, wrapped by Sluice, with those of its peers.

    on-device   everything is on the GPU: beside PyTorch's fused AdamW (goal: 1.02 of its seconds)
    offload     3.0G parameters, f32 masters and state, in 16 GiB of the GPU's memory, updated in backward: beside forward and backward
                alone, the longest of that and of what the plan says that the link and the updates take (goal: 1.07 of it), FSDP2 with
                CPU offload (goal: 1.7x as fast), and DeepSpeed ZeRO-3 with offload where it is installed (goal: 1.4x as fast); it is
                made ready in 8 s (goal)
    at-step     the same, clipped and updated at step(): beside forward and backward alone (goal: 1.15 of its seconds)
    8b          7.5G parameters, f32 masters and bf16 state, in 24 GiB of the GPU's memory and 96 GiB of the host's: beside forward and
                backward alone, which need some 22 GiB of the GPU's (goal: 1.07 of the longest, as for offload)
    llama       1.1G parameters by transformers, clipped, all on the GPU: beside PyTorch's fused AdamW with the same state (goal: 1.15)
    two-gpus    1.1G parameters, f32 masters and state, in 8 GiB of each GPU's memory, updated in backward, on two GPUs: beside the same
                step on one of them (goal: 1.9x as fast) and FSDP2 with CPU offload on two (goal: 1.7x as fast), and how fast they gather
                parameters and sum gradients, beside NCCL (goal: 0.90 of its rate by NVLink, and above it without peer access)

Each side is a process of its own, and they run one after the other, Sluice first. The model, its first values and the data are the
same, and a peer whose first loss is another one counts as failed. Seconds are medians of --steps steps, after two that are not
counted, or of fewer where --limit leaves no time for more. The output names missing peers. --json prints JSON.

    python3 bench/python/gpu_vs_pytorch.py --case offload

It needs a PyTorch that sees a GPU, or two (exit status 4 where it does not), and takes Sluice from a wheel in wheels/ or from the checkout.
Peers are imported from this Python, else from wheels/. --fake runs a tiny model on the tests' fake driver, which $SLUICE_CUDA_DRIVER
names: this tests the bench, and measures nothing."""
import argparse
import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.machinery import PathFinder

from side_by_side import ROOT, free_port

NO_GPU = 4
BY_CUDA = "run this bench by a Python whose PyTorch is for CUDA"
ENDING_S = 3  # of a side's time, for the report of its measurements
LOSS_TOLERANCE = 0.02  # of the first loss: sums of bf16 products in other orders, and of 8 bits each
IN_BACKWARD = {"update_in_backward": True}
CASES = {
    "on-device": {"model": "llama-3b", "batch": 4, "recompute": False, "memory": "32GiB", "device_memory": "76GiB",
                  "options": {"state": "bf16", "master": "none", "place": "device"}, "sides": ["sluice", "fused"]},
    "offload": {"model": "llama-3b", "batch": 8, "recompute": True, "memory": "96GiB", "device_memory": "16GiB",
                "options": IN_BACKWARD, "sides": ["sluice", "compute", "fsdp2", "deepspeed"]},
    "at-step": {"model": "llama-3b", "batch": 8, "recompute": True, "clip": 1.0, "memory": "96GiB", "device_memory": "16GiB",
                "options": {}, "sides": ["sluice", "compute"]},
    "8b": {"model": "llama-8b", "batch": 8, "recompute": True, "memory": "96GiB", "device_memory": "24GiB",
           "options": IN_BACKWARD | {"state": "bf16"}, "sides": ["sluice", "compute"]},
    "llama": {"of": "transformers", "model": "llama-1b", "batch": 4, "seq": 1024, "recompute": False, "clip": 1.0, "memory": "48GiB",
              "device_memory": "60GiB", "options": {"state": "bf16", "master": "none", "place": "device"}, "sides": ["sluice", "fused"]},
    "two-gpus": {"ranks": 2, "model": "llama-1b", "batch": 8, "recompute": True, "memory": "24GiB", "device_memory": "8GiB",
                 "options": IN_BACKWARD, "sides": ["sluice", "alone", "fsdp2", "between"]},
}
ALONE = ("alone",)  # the sides of one rank
FAKE = {"device": "cpu", "model": "tiny", "batch": 2, "seq": 16, "memory": "8GiB", "device_memory": "800MiB", "warm": 1, "steps": 1}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="only these")
    parser.add_argument("--seq", type=int, help="tokens of a sample, by default 2048, and of llama 1024")
    parser.add_argument("--steps", type=int, default=3, help="by default 3")
    parser.add_argument("--trace", metavar="FOLDER", help="keep there what the GPU does in two more steps of each side")
    parser.add_argument("--device", default="cuda:0", help="PyTorch's name of the GPU, by default cuda:0")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all sides, by default 3600; the last ones are left out")
    parser.add_argument("--fake", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    unknown = set(a.sides or []) - set(CASES[a.case]["sides"])
    if unknown:
        parser.error(f"--sides: {', '.join(sorted(unknown))} is not of {a.case}, which has {', '.join(CASES[a.case]['sides'])}")
    return a


def refuse_without_gpu(why):
    print(why, file=sys.stderr)
    sys.exit(NO_GPU)


def check_transformers(is_fake):
    """Ends the process where this Python has no transformers, or its PyTorch sees no GPU."""
    if not is_installed("transformers"):
        refuse_without_gpu(f"this Python has no transformers; {BY_CUDA}")
    import torch

    if not is_fake and not torch.cuda.is_available():
        refuse_without_gpu(f"PyTorch {torch.__version__} sees no GPU (torch.cuda.is_available() is false); {BY_CUDA}")


@contextlib.contextmanager
def packages():
    """The folders from which to import Sluice's package, and the peers' packages that this Python lacks."""
    with tempfile.TemporaryDirectory() as folder:
        own, peers = pathlib.Path(folder, "sluice"), pathlib.Path(folder, "peers")
        for wheel in (ROOT / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(own if wheel.name.startswith("sluice_train-") else peers)
        yield {"package": str(own if own.exists() else ROOT / "bindings" / "python"), "peers": str(peers)}


def is_installed(name, folder=None):
    """Whether this Python can import it, also from that folder."""
    return PathFinder.find_spec(name, sys.path + [folder] * (folder is not None)) is not None


def settings(a, where):
    case = {"seq": 2048} | CASES[a.case]
    general = {"device": a.device, "seq": a.seq or case["seq"], "warm": 2, "steps": a.steps, "fake": a.fake, "trace": a.trace}
    return case | general | where | (FAKE if a.fake else {})


def environments(ranks):
    """Returns the environment of each rank's process."""
    variables = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if ranks == 1:
        return [variables]
    variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    return [variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run(side, chosen, limit_s):
    """Returns a side's report, or {"failed": reason, such as the last line of its output}. Ends the process where PyTorch sees no
    GPU."""
    if limit_s <= ENDING_S:
        return {"failed": "the sides before it took all of the time"}
    script = pathlib.Path(__file__).with_name("gpu_sides.py")
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as others:
        words = [sys.executable, str(script), json.dumps(chosen | {"side": side, "until": time.time() + limit_s - ENDING_S})]
        first, *rest = environments(1 if side in ALONE else chosen.get("ranks", 1))
        for variables in rest:
            other = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, env=variables)
            others.callback(other.wait)
            others.callback(other.kill)  # before that
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, text=True, timeout=limit_s, env=first)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than the {limit_s:.0f} s that were left"}
        log.seek(0)
        printed = log.read()
    sys.stderr.write(printed)
    last = (printed.strip().splitlines() or ["it printed nothing"])[-1]
    if done.returncode == NO_GPU:
        refuse_without_gpu(last)
    if done.returncode != 0 or not done.stdout:
        return {"failed": f"status {done.returncode}: {last}"}
    told = json.loads(done.stdout)
    if "rates" in told:
        return told
    seconds = told.pop("seconds")
    return told | {"step": statistics.median(seconds), "steps": len(seconds)}


def measure(a):
    end = time.monotonic() + a.limit
    with packages() as where:
        chosen = settings(a, where)
        sides = [side for side in chosen.pop("sides") if side in (a.sides or CASES[a.case]["sides"])]
        found = {}
        for side in sides:
            if side == "deepspeed" and not is_installed("deepspeed", where["peers"]):
                found[side] = {"failed": "DeepSpeed is not installed, and not in wheels/"}
            else:
                found[side] = run(side, chosen, end - time.monotonic())
    ours = found.get("sluice", {})
    if ours.get("losses") and not math.isfinite(ours["losses"][0]):
        ours = found["sluice"] = {"failed": f"its first loss is {ours['losses'][0]}"}
    ran = {side: told for side, told in found.items() if "step" in told}
    for side, told in list(ran.items()):
        if ours.get("losses") and not abs(told["losses"][0] / ours["losses"][0] - 1) <= LOSS_TOLERANCE:
            found[side] = {"failed": f"it trains another model: its first loss is {told['losses'][0]}, Sluice's {ours['losses'][0]}"}
            del ran[side]
    seconds = {side: told["step"] for side, told in ran.items() if side != "sluice"}
    if "compute" in seconds and "plan" in ours:
        seconds["limit"] = max(seconds["compute"], ours["plan"]["least_seconds"])
    return {"case": a.case, "tokens": chosen["batch"] * chosen["seq"], "sides": found,
            "ratios": {side: ours["step"] / taken for side, taken in seconds.items() if "step" in ours}}


def line(side, told, tokens, ratio):
    if "failed" in told:
        return f"{side}: not measured: {told['failed']}"
    if "rates" in told:
        both = [f"{name} {rate / 1e9:.1f} GB/s, the peer {told['peer'][name] / 1e9:.1f}" for name, rate in told["rates"].items()]
        return f"{side} ({told['links']}): {'; '.join(both)}"
    text = (f"{side}: {told['step']:.3f} s a step (of {told['steps']}), {tokens / told['step']:.0f} tokens/s, PyTorch held "
            f"{told['pytorch_peak'] / 2**30:.2f} GiB")
    return text + (f"; Sluice takes {ratio:.3f} of its time" if ratio else "")


def main():
    a = arguments()
    if not is_installed("torch"):
        refuse_without_gpu(f"this Python has no PyTorch; {BY_CUDA}")
    result = measure(a)
    if a.json:
        print(json.dumps(result))
    else:
        for side, told in result["sides"].items():
            print(line(side, told, result["tokens"], result["ratios"].get(side)))
        if "limit" in result["ratios"]:
            print(f"Sluice takes {result['ratios']['limit']:.3f} of the longest of computing, copies and updates")
    failed = [told["failed"] for side, told in result["sides"].items() if side == "sluice" and "failed" in told]
    sys.exit(f"Sluice's side failed: {failed[0]}" if failed else 0)


if __name__ == "__main__":
    main()
