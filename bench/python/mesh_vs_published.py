"""Plans the meshes of published runs, and prints the predicted limit of their speed beside their published speed. Nothing is trained.

Each product runs at the GPU's peak. So the prediction is the share of the peak that bubbles, updates, loops over memory, sums over data, sums
within layers and messages along the pipeline leave, and a faster run would refute it. A mesh is planned for the memory of its GPUs, and where
it needs more, for more.

    python bench/python/mesh_vs_published.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--sluice", default="build/bin/sluice", help="the program")
arguments = parser.parse_args()

GPUS_OF_A_HOST = 8


MORE_MEMORY = 8  # times as much as a GPU has, for plans in which memory must not bound anything


class Gpu(NamedTuple):
    peak: float  # floating-point operations a second, in bf16 or f16
    memory: int
    bandwidth: float
    link: str  # of a host to others
    link_host: str  # of a GPU to other GPUs of its host


A100 = Gpu(312e12, 80 * 10**9, 2.039e12, "1600Gbit/s,5us", "300GB/s,2us")
H100 = Gpu(989e12, 96 * 10**9, 2.4e12, "3200Gbit/s,5us", "450GB/s,2us")


class Run(NamedTuple):
    """A run of Megatron-LM (Narayanan et al. 2021, table 1)."""

    layers: int
    width: int
    heads: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    reached: int  # teraflop/s of a GPU

    def operations(self) -> float:
        """The operations of a step with full recomputation, as the paper counts them."""
        length, vocabulary = 2048, 51200
        each = 96 * self.batch * length * self.layers * self.width**2
        return each * (1 + length / (6 * self.width) + vocabulary / (16 * self.layers * self.width))


RUNS = [
    Run(24, 2304, 24, 1, 1, 32, 512, 137),
    Run(30, 3072, 32, 2, 1, 64, 512, 138),
    Run(36, 4096, 32, 4, 1, 128, 512, 142),
    Run(40, 6144, 48, 8, 1, 256, 1024, 135),
    Run(48, 8192, 64, 8, 2, 512, 1536, 138),
    Run(60, 10240, 80, 8, 4, 1024, 1792, 140),
    Run(80, 12288, 96, 8, 8, 1536, 2304, 148),
    Run(96, 16384, 128, 8, 16, 1920, 2160, 155),
    Run(105, 20480, 128, 8, 35, 2520, 2520, 163),
    Run(128, 25600, 160, 8, 64, 3072, 3072, 163),
]


def write(path: Path, value: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
    return path


class DoesNotFitError(Exception):
    pass


def plan(folder: Path, config: dict[str, Any], gpu: Gpu, words: list[str], more: int = 1) -> dict[str, Any]:
    """more: times as much memory as a GPU has."""
    model = write(folder / "model" / "config.json", config).parent
    # Each rank has two cores: one computes, with the rates of its GPU, and one is left for messages.
    cores = 2 * GPUS_OF_A_HOST
    machine = {
        "version": 2,
        "cores": {"usable": cores},
        "bf16_products": True,
        "memory": {"usable": more * gpu.memory * GPUS_OF_A_HOST, "bandwidth": cores * gpu.bandwidth},
        "products": [{"type": name, "m": 4096, "n": 4096, "k": 4096, "flops": cores * gpu.peak} for name in ("bf16", "f32")],
        "attention": [{"type": "bf16", "flops": cores * gpu.peak}],
    }
    given = ["--model", str(model), "--machine", str(write(folder / "machine.json", machine)), "--threads", "1"]
    given += ["--memory", str(more * gpu.memory)]
    given += ["--dtype", "bf16", "--batch", "1", "--recompute", "full", "--link", gpu.link, "--link-host", gpu.link_host]
    outcome = subprocess.run([arguments.sluice, "plan", "--json", *given, *words], capture_output=True, text=True)
    if "does not fit" in outcome.stderr:
        raise DoesNotFitError(outcome.stderr.strip())
    if outcome.returncode:
        sys.exit(outcome.stderr.strip())
    return json.loads(outcome.stdout)


def mesh(data: int, pipeline: int, tensor: int) -> list[str]:
    return ["--mesh", f"data={data},pipeline={pipeline},tensor={tensor}", "--hosts", str(data * pipeline * tensor // GPUS_OF_A_HOST)]


def share_of_peak(run: Run, found: dict[str, Any]) -> float:
    return run.operations() / (seconds_of(found) * run.gpus * A100.peak)


def seconds_of(found: dict[str, Any]) -> float:
    return found["pipeline"]["step_seconds"] if "pipeline" in found else found["step"]["seconds"]


def in_its_memory(run: Run, *given: Any) -> str:
    """Returns the prediction where each rank has the memory of its GPU alone."""
    try:
        return f"{share_of_peak(run, plan(*given)):.1%}"
    except DoesNotFitError:
        return "does not fit"


def megatron(folder: Path) -> None:
    print("| parameters | GPUs | tensor x pipeline x data | in 80 GB | predicted | bubble | received along data, pipeline, within layers ", end="")
    print("| largest stage | reached | of the prediction |")
    print("|" + " --- |" * 10)
    for run in RUNS:
        data = run.gpus // run.tensor // run.pipeline
        config = {"model_type": "gpt2", "n_layer": run.layers, "n_embd": run.width, "n_head": run.heads}
        config |= {"n_positions": 2048, "vocab_size": 51200}
        words = [*mesh(data, run.pipeline, run.tensor), "--seq", "2048", "--accumulate", str(run.batch)]
        found = plan(folder, config, A100, words, MORE_MEMORY)
        stages = found["pipeline"]["stages"] if "pipeline" in found else [found]
        along = found["step"].get("bytes_received_along", {"data": found["step"]["bytes_received"]})
        received = ", ".join(f"{along.get(axis, 0) / 1e9:,.0f}" for axis in ("data", "pipeline", "layers"))
        share, reached = share_of_peak(run, found), run.reached * 1e12 / A100.peak
        parameters = 12 * run.layers * run.width**2 + (51200 + 2048) * run.width
        print(
            f"| {parameters / 1e9:,.1f}B | {run.gpus:,} | {run.tensor} x {run.pipeline} x {data} | {in_its_memory(run, folder, config, A100, words)} | "
            f"{share:.1%} | {found.get('pipeline', {'bubble': 0})['bubble']:.1%} | {received} GB | "
            f"{max(stage['predicted_peak'] for stage in stages) / 1e9:.0f} GB | {reached:.1%} | {reached / share:.2f} |",
            flush=True,
        )


def torchtitan(folder: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 126, "hidden_size": 16384, "num_attention_heads": 128}
    config |= {"num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256, "max_position_embeddings": 8192}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}
    print("| micro-batches of a pipeline | bubble of 1F1B, interleaved | interleaved, of 1F1B's speed |")
    print("| --- | --- | --- |")
    for micro_batches, size in ((32, 1), (16, 2), (8, 4)):
        words = [*mesh(8, 8, 8), "--seq", "8192", "--accumulate", str(8 * micro_batches * size), "--group", str(size), "--stage", "3"]
        apart, together = (plan(folder, config, H100, [*words, *chunks], MORE_MEMORY)["pipeline"] for chunks in ([], ["--chunks", "2"]))
        print(
            f"| {micro_batches} of {size} | {apart['bubble']:.1%}, {together['bubble']:.1%} | "
            f"{apart['step_seconds'] / together['step_seconds']:.2f} |",
            flush=True,
        )


with tempfile.TemporaryDirectory() as name:
    megatron(Path(name))
    print()
    torchtitan(Path(name))
