"""Predicts the step of a model at several numbers of ranks, each with the same micro-batches and on a machine of its own, over one
link. Nothing is trained: these are the figures of `sluice plan --ranks N --hosts N --link`, as a table for docs/scaling.md.

    python bench/python/scaling_model.py --model gpt2-1.5b --memory 24GiB --link 10Gbit/s,20us
"""

import argparse
import json
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--sluice", default="build/bin/sluice", help="the program")
parser.add_argument("--model", default="gpt2-1.5b", help="a preset")
parser.add_argument("--data", required=True, help="a text file, whose bytes are the tokens")
parser.add_argument("--seq", type=int, default=1024, help="tokens of a micro-batch")
parser.add_argument("--micro-batches", type=int, default=8, help="of each rank in a step")
parser.add_argument("--memory", default="24GiB", help="of each rank")
parser.add_argument("--machine", help="file of another machine, for which is planned")
parser.add_argument("--threads", type=int, help="of each rank")
parser.add_argument("--links", nargs="+", default=["10Gbit/s,20us", "100Gbit/s,5us"], help="what joins the ranks")
parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 256, 1024])
arguments = parser.parse_args()


def plan(ranks: int, link: str) -> dict:
    words = ["plan", "--json", "--model", arguments.model, "--data", arguments.data, "--tokens", "bytes"]
    words += ["--batch", "1", "--seq", str(arguments.seq), "--accumulate", str(ranks * arguments.micro_batches)]
    words += ["--ranks", str(ranks), "--hosts", str(ranks), "--memory", arguments.memory, "--link", link]
    if arguments.machine:
        words += ["--machine", arguments.machine]
    if arguments.threads:
        words += ["--threads", str(arguments.threads)]
    outcome = subprocess.run([arguments.sluice, *words], capture_output=True, text=True)
    if outcome.returncode:
        sys.exit(outcome.stderr.strip())
    return json.loads(outcome.stdout)


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
