#!/usr/bin/env python3
"""Runs a campaign against build/bin/sluice, or bin/sluice of the folder that SLUICE_BUILD names.

    tests/campaigns/run.py KIND [--count N] [--seed S] [--folder FOLDER]

  kill         kills a run N times (200) at random moments, also inside saves, and resumes it
  rank         kills or stops one of 2 to 4 ranks N times (100)
  gpu-rank     kills or stops one of 2 or 3 ranks of a wrapped model, on fake GPUs, N times (100)
  host         cuts the wire of one of 2 or 3 hosts N times (30), which scripts/hosts.sh makes
  fault        injects N faults (10000) into short runs, and produces each real fault that the machine allows
  rank-fault   injects faults at one of several ranks in N rounds (1000), and produces real ones there
  matrix       trains each combination of optimizer, state type, precision, clipping and accumulation in memory and on disk
  rank-matrix  trains the combinations of model, stage, place, optimizer, start, number of ranks, order, clipping, cut and type that
               have every pair, and loads the checkpoint of each mesh at each other one; with --count N so many others, at random
  all          each of these with its own number, as before an issue ends

A disturbed run must end with the bits of an undisturbed one, or with an error after which --resume leads to those bits. CI runs a share of each
(tests/python/cli/test_campaigns.py; those of gpu-rank, host and rank-fault are marked as long). The exit status is 1 where a check failed."""
import argparse
import os
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = HERE.parents[1] / ".venv" / "bin" / "python"  # which has PyTorch, where that of the command line has not
if sys.prefix == sys.base_prefix and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
import matrix  # noqa: E402
from fault_campaign import RealFaults, injected  # noqa: E402
from gpu_rank_campaign import GpuRankCampaign  # noqa: E402
from host_campaign import HostCampaign  # noqa: E402
from kill_campaign import Campaign  # noqa: E402
from rank_campaign import RankCampaign  # noqa: E402
from rank_faults import RankFaults  # noqa: E402

REAL_ROUNDS = 3  # the number of times that each real fault is produced


def kill(campaign, a):
    """Returns the exit status."""
    begin = time.monotonic()
    try:
        campaign.run(a.count, lambda text: print(text, end="", flush=True))
    except AssertionError as error:
        print(f"\nafter {campaign.killed} kills (seed {a.seed}): {error}", file=sys.stderr)
        return 1
    where = ", ".join(f"{count} {place}" for place, count in sorted(campaign.kills.items()))
    print(f"\r{campaign.killed} kills ({where}) in {time.monotonic() - begin:.0f} s, {campaign.rounds} runs resumed to their end:")
    print("losses, parameters, optimizer state and the best checkpoint equal those of a run that was never stopped, bit by bit")
    if isinstance(campaign, (RankCampaign, GpuRankCampaign)):
        print(f"all other ranks named the rank, and ended within {campaign.slowest:.2f} s (of a death, or of --silence)")
    return 0


def fault(make, a, suite="FaultCampaign"):
    if a.count and not injected(suite, a.count, a.seed):
        return 1
    print("for real, runs of sluice train:")
    try:
        make().all(REAL_ROUNDS, lambda text: print(text, flush=True))
    except AssertionError as error:
        print(f"not reported, or not rightly (seed {a.seed}): {error}", file=sys.stderr)
        return 1
    print("none was silent")
    return 0


# The default number of each kind, and its function.
KINDS = {
    "kill": (200, lambda folder, a: kill(Campaign(folder, a.seed), a)),
    "rank": (100, lambda folder, a: kill(RankCampaign(folder, a.ranks or 4, a.seed, a.within), a)),
    "gpu-rank": (100, lambda folder, a: kill(GpuRankCampaign(folder, a.ranks or 2, a.seed, a.within), a)),
    "host": (30, lambda folder, a: kill(HostCampaign(folder, a.ranks or 3, a.seed, a.within), a)),
    "fault": (10000, lambda folder, a: fault(lambda: RealFaults(folder, a.seed), a)),
    "rank-fault": (1000, lambda folder, a: fault(lambda: RankFaults(folder, a.ranks or 4, a.seed), a, "RankFaultCampaign")),
    "matrix": (None, lambda folder, a: matrix.try_optimizers(a)),
    "rank-matrix": (None, lambda folder, a: matrix.try_ranks(a)),
}


def run(kind, a):
    number, campaign = KINDS[kind]
    given = argparse.Namespace(**vars(a) | {"count": number if a.count is None else a.count})
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{kind}_campaign_", dir=a.folder) as folder:
        status = campaign(folder, given)
    print(f"{kind}: {'passed' if status == 0 else 'FAILED'} after {time.monotonic() - begin:.0f} s", flush=True)
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--count", type=int, help="how many kills, faults or rounds; cells of rank-matrix, at random, besides those of every pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, help="a folder on a disk (O_DIRECT) for the runs, made where it is missing; "
                        "by default a temporary one")
    parser.add_argument("--ranks", type=int, help="the most ranks or hosts of a run: at least 2")
    parser.add_argument("--within", type=float, default=2, help="seconds in which all others must end after the death of a rank")
    parser.add_argument("--jobs", type=int, default=2, help="how many cells of a matrix run at a time")
    parser.add_argument("--json", type=pathlib.Path, help="write all results of a matrix to this file, each as soon as it is there")
    parser.add_argument("--resume", action="store_true", help="with --json: try no cell again that has a result of this build there")
    parser.add_argument("--most", type=int, help="end a matrix after so many cells more")
    parser.add_argument("--all", action="store_true", help="every cell of rank-matrix: with --only, since all take weeks")
    parser.add_argument("--only", metavar="VALUES", help="cells of rank-matrix that have all of these values, separated by commas")
    a = parser.parse_args()
    if a.ranks is not None and a.ranks < 2:
        parser.error("--ranks is 2 or more")
    if a.resume and not a.json:
        parser.error("--resume needs --json FILE, which has the results to go on from")
    if a.kind == "all" and (a.count is not None or a.json):
        parser.error("all runs each kind with its own number, and without --json; name the kind instead")
    if a.folder:
        try:
            a.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--folder cannot be made: {error}; name another one")
    if a.kind == "all":
        return max(run(kind, a) for kind in KINDS)
    return run(a.kind, a)


if __name__ == "__main__":
    sys.exit(main())
