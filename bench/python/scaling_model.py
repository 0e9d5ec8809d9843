"""Predicts the step of a model at several numbers of ranks, or on several meshes of them, over one link. Nothing is trained: these are
the figures of `sluice plan`, as tables for docs/scaling.md. With --ranks each rank has the same micro-batches; with --meshes they share
those of one step.

    python bench/python/scaling_model.py --data text.txt --model gpt2-1.5b --memory 24GiB --links 10Gbit/s,20us
    python bench/python/scaling_model.py --machine host.json --model llama-70b --memory 80GB --dtype bf16 --ranks-of-a-host 8 \\
      --micro-batches 1024 --links 1600Gbit/s,5us --link-host 300GB/s,2us --meshes data=8,pipeline=8 data=16,pipeline=8,tensor=8
"""

import json
import math

from side_by_side import ROOT, options_of, parser_of, sluice

parser = parser_of(__doc__, as_json=False, build=str(ROOT / "build"), model="gpt2-1.5b", dtype="f32", seq=1024, memory="24GiB",
                   recompute="auto")
parser.add_argument("--data", help="a text file, whose bytes are the tokens; not needed with --machine")
parser.add_argument("--micro-batches", type=int, default=8, help="of each rank in a step; of all ranks of a mesh")
parser.add_argument("--machine", help="file of another machine, for which is planned")
parser.add_argument("--threads", type=int, help="of each rank")
parser.add_argument("--links", nargs="+", default=["10Gbit/s,20us", "100Gbit/s,5us"], help="what joins the ranks")
parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 256, 1024])
parser.add_argument("--stage", help="what of a stage is partitioned along data")
parser.add_argument("--meshes", nargs="+", help="in place of --ranks: meshes, as data=16,pipeline=8,tensor=8")
parser.add_argument("--ranks-of-a-host", type=int, default=1, help="neighbours, which share a machine")
parser.add_argument("--link-host", help="what joins the ranks of one host")
arguments = parser.parse_args()


def plan(ranks: int, link: str, mesh: str | None = None) -> dict:
    words = [*options_of(arguments, "model", "dtype", "seq", "memory", "recompute"), "--batch", 1, "--link", link]
    words += ["--accumulate", arguments.micro_batches * (1 if mesh else ranks), "--hosts", ranks // arguments.ranks_of_a_host]
    words += ["--mesh", mesh] if mesh else ["--ranks", ranks]
    words += ["--data", arguments.data, "--tokens", "bytes"] if arguments.data else []
    words += options_of(arguments, *(name for name in ("stage", "machine", "threads") if getattr(arguments, name)))
    words += ["--link-host", arguments.link_host] if arguments.link_host else []
    return json.loads(sluice("plan", "--json", *words, build=arguments.build))


def by_ranks() -> None:
    print("| link | ranks | stage | seconds | of one rank's tokens/s, for each rank | received | peak memory |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for link in arguments.links:
        alone = None
        for ranks in arguments.ranks:
            found = plan(ranks, link)
            step = found["step"]
            alone = alone or step["seconds"]
            print(
                f"| {link} | {ranks} | {found['stage']} | {step['seconds']:.2f} | {alone / step['seconds']:.3f} | "
                f"{step['bytes_received'] / 1e9:.2f} GB | {found['predicted_peak'] / 2**30:.2f} GiB |"
            )


def by_meshes() -> None:
    print("| link | mesh | ranks | seconds | tokens/s of each rank | bubble | received along data, pipeline, within layers | largest stage |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for link in arguments.links:
        for mesh in arguments.meshes:
            ranks = math.prod(int(axis.partition("=")[2]) for axis in mesh.split(","))
            whole = plan(ranks, link, mesh)
            step = whole["step"]
            alone = {"bytes_received": step.get("bytes_received_along", {"data": step["bytes_received"]}), "predicted_peak": whole["predicted_peak"]}
            found = whole.get("pipeline", {"step_seconds": step["seconds"], "bubble": 0, "stages": [alone]})
            received = [max(stage["bytes_received"].get(axis, 0) for stage in found["stages"]) / 1e9 for axis in ("data", "pipeline", "layers")]
            speed = arguments.micro_batches * arguments.seq / found["step_seconds"] / ranks
            print(
                f"| {link} | {mesh} | {ranks:,} | {found['step_seconds']:.2f} | {speed:,.0f} | {found['bubble']:.1%} | "
                f"{', '.join(f'{of_axis:,.1f}' for of_axis in received)} GB | "
                f"{max(stage['predicted_peak'] for stage in found['stages']) / 2**30:.1f} GiB |",
                flush=True,
            )


if arguments.meshes:
    by_meshes()
else:
    by_ranks()
