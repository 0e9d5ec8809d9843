"""Predicts the step of Llama-like models on 1 to 8 GPUs of one host, each with a rank. Nothing is trained, and no GPU is needed: these are
the seconds of plans with the rates that this file states, as tables for docs/scaling.md.

    python bench/python/gpu_scaling_model.py --tokens 16384
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "bindings/python"))

import sluice  # noqa: E402

OF_PEAK = 0.5  # the share of the GPU's peak that computing reaches: an assumption
BASE = "700MiB"  # of a GPU's memory, for CUDA's context and kernels


@dataclass(frozen=True)
class Host:
    """Bytes and operations a second. Ranks share the host's resources equally."""

    name: str
    peak: float  # dense products of bf16, of a GPU
    device_memory: str  # that a plan may take of a GPU
    to_gpu: float
    from_gpu: float
    both_ways: float
    gpu_updates: float  # elements a second
    memory: int  # of all ranks, as the following fields
    bandwidth: float  # of that memory
    cores: int
    most_bandwidth: float  # that a rank reaches alone
    most_cores: int  # that a rank has
    between: float = 0  # that a GPU reads from the others' memory, while all GPUs do; 0: they do not


GIB = 2**30
HOSTS = {
    # Copies, updates and a rank's part of the host as measured on 2026-11-26 (docs/gpu/); all of the host assumed: two such sockets. NVLink
    # has 450 GB/s in each direction.
    "h200": Host("H200", 989e12, "130GiB", 5.47e10, 5.48e10, 1.01e11, 4.32e10, 2048 * GIB, 5.4e11, 128, 2.7e11, 16, 3.5e11),
    # PCIe 4.0 with 16 lanes, and eight channels of DDR5; assumed as a whole.
    "4090": Host("RTX 4090", 165e12, "23GiB", 25e9, 25e9, 50e9, 1e10, 512 * GIB, 2e11, 32, 2e11, 32),
}


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    inner: int
    keys: int
    vocabulary: int


MODELS = {"8B": Shape(32, 4096, 14336, 1024, 128256), "32B": Shape(64, 5120, 27648, 1024, 152064), "70B": Shape(80, 8192, 28672, 1024, 128256)}


def units_of(shape: Shape) -> list[sluice.Unit]:
    def unit(name: str, shapes: dict[str, list[int]]) -> sluice.Unit:
        return sluice.Unit(name, [sluice.Parameter(f"{name}.{key}", size) for key, size in shapes.items()])

    width, keys, inner = shape.width, shape.keys, shape.inner
    layer = {"q": [width, width], "k": [keys, width], "v": [keys, width], "o": [width, width]}
    layer |= {"gate": [inner, width], "up": [inner, width], "down": [width, inner], "norm": [width], "norm2": [width]}
    layers = [unit(f"layers.{i}", layer) for i in range(shape.layers)]
    return [unit("embedding", {"all": [shape.vocabulary, width]}), *layers, unit("head", {"norm": [width], "all": [shape.vocabulary, width]})]


def plan(host: Host, model: str, gpus: int, in_backward: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the plan of rank 0."""
    units = units_of(MODELS[model])
    parameters = sum(parameter.elements for unit in units for parameter in unit.parameters)
    computing = 6 * parameters * arguments.tokens / gpus / (host.peak * OF_PEAK)
    bandwidth = min(host.most_bandwidth, host.bandwidth / gpus)
    rates = (host.to_gpu, host.from_gpu, host.both_ways, host.gpu_updates, bandwidth)
    between = host.between if arguments.links == "gpus" else 0.0
    facts = sluice.DeviceFacts(*rates, base=BASE, computing=computing, between_gpus=between)
    options = sluice.Options(
        memory=host.memory // gpus,
        dtype="bf16",
        state=arguments.state,
        threads=min(host.most_cores, host.cores // gpus),
        held_units=2,
        planned=(0, gpus) if gpus > 1 else None,
        stage=arguments.stage if gpus > 1 else None,
        micro_batches=0 if in_backward and gpus == 1 else gpus * arguments.accumulate,
        update_in_backward=in_backward,
        device_memory=host.device_memory,
        device_reserved=arguments.reserve,
        device_facts=facts,
    )
    return sluice.plan(units, options)


def plan_that_fits(host: Host, model: str, gpus: int, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Returns a plan with updates at the step's end, which holds all gradients at once, if it fits; else one with updates in backward,
    which cannot accumulate micro-batches."""
    if arguments.backward and gpus * arguments.accumulate > 1:
        return plan(host, model, gpus, True, arguments), "backward"
    try:
        return plan(host, model, gpus, False, arguments), "step()"
    except sluice.BudgetError:
        if arguments.accumulate > 1:
            raise
        return plan(host, model, gpus, True, arguments), "backward"


def rows(host: Host, arguments: argparse.Namespace) -> None:
    for model in arguments.models:
        alone = None
        for gpus in arguments.gpus:
            try:
                found, updates = plan_that_fits(host, model, gpus, arguments)
            except sluice.BudgetError as error:
                print(f"{host.name}, {model}, {gpus}: {error}", file=sys.stderr)
                print(f"| {host.name} | {model} | {gpus} | does not fit | | | | | | | | | |")
                continue
            step = found["step"]
            seconds = step["seconds"]
            alone = alone or seconds
            print(
                f"| {host.name} | {model} | {gpus} | {found['stage']} | {updates} | {seconds:.2f} | {arguments.tokens / seconds:,.0f} | "
                f"{alone / seconds:.2f} | {step['bound']} | {step['compute_seconds']:.2f} | {step['ranks_seconds']:.2f} | "
                f"{step['link_seconds']:.2f} | {step['bytes_received'] / 1e9:.0f} GB |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8B", "32B"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=16384, help="of a step of all GPUs")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of each rank in a step")
    parser.add_argument("--state", default="bf16", help="the type of AdamW's state; masters are f32")
    parser.add_argument("--stage", type=int, help="what is partitioned; chosen by the plan where it is not given")
    parser.add_argument("--links", choices=("gpus", "host"), default="gpus", help="through what ranks sum, where the GPUs read each other's memory")
    parser.add_argument("--backward", action="store_true", help="several GPUs update in backward, without clipping by the norm")
    parser.add_argument("--reserve", default="5GiB", help="of a GPU's memory, for what PyTorch computes")
    arguments = parser.parse_args()
    print("| GPU | model | GPUs | stage | updates | seconds | tokens/s | speedup | bound by | computing | ranks | copies | received |")
    print("|" + " --- |" * 13)
    for host in arguments.hosts:
        rows(HOSTS[host], arguments)


if __name__ == "__main__":
    main()
