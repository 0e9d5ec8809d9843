"""bench/python/gpu_vs_pytorch.py, whose cases are parts of scripts/gpu_check.sh, without a GPU: what its sides do is done on the tests'
fake driver, with a tiny model, and its cases are planned in their own sizes."""

import gzip
import json
import os
import subprocess
import sys

import gpu_parts
import pytest
import torch
from support import fake_gpu, warm_python
from support.sluice_process import BUILD, SOURCE

import sluice
import sluice.torch

BENCH = SOURCE / "bench" / "python"
sys.path.append(str(BENCH))
import gpu_sides  # noqa: E402
import gpu_vs_pytorch  # noqa: E402


def variables(**more):
    return os.environ | {"SLUICE_CUDA_DRIVER": str(fake_gpu.DRIVER), "SLUICE_LIBRARY_PATH": str(BUILD / "lib")} | more


def bench(*words, folder=BENCH, **more):
    """Runs the bench, whose sides are processes of the same Python. Returns its exit status and what it printed."""
    script, python = str(folder / "gpu_vs_pytorch.py"), warm_python.executable()
    program = (f"import runpy, sys; sys.executable, sys.argv = {python!r}, {[script, *words]!r}; sys.path[0] = {str(folder)!r}; "
               "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=300, env=variables(**more))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("case", gpu_vs_pytorch.CASES)
def test_each_case_has_a_plan_in_its_own_size(case):
    chosen = gpu_vs_pytorch.CASES[case]
    with fake_gpu.shared(memory=78 << 30):
        model = gpu_sides.made(chosen | {"device": "meta"}, "meta")
        made = sluice.torch.plan(model, sluice.AdamW(), **gpu_sides.sluice_options({"seq": 2048} | chosen | {"device": "cpu"}))
    assert made["budget"]["device"] < 78 << 30 and made["pytorch"]["reserve"] > 4 << 30
    assert made["predicted_peak"] < 100 << 30, "the host has other memory, too"


@pytest.mark.long
def test_what_gathers_and_sums_alone_has_a_plan_in_its_own_size():
    with torch.device("meta"):
        model = gpu_sides.Bare({"fake": False})
    with fake_gpu.shared(memory=78 << 30):
        sample = torch.zeros(1, dtype=torch.bfloat16)
        made = sluice.torch.plan(model, sluice.AdamW(), **gpu_sides.Between({"fake": False}).options(sample))
    assert made["bytes"]["device"]["gradient"] == 2 * model.bytes and made["predicted_peak"] < 8 << 30


def test_each_side_is_one_of_the_bench():
    sides = {side for case in gpu_vs_pytorch.CASES.values() for side in case["sides"]}
    assert sides == gpu_sides.SIDES.keys() and all(case["sides"][0] == "sluice" for case in gpu_vs_pytorch.CASES.values())
    assert set(gpu_parts.PEERS) == {*sides, "limit"} - {"sluice", "alone", "between"}
    assert gpu_vs_pytorch.NO_GPU == gpu_sides.NO_GPU == gpu_parts.NO_PYTORCH


def test_each_part_has_the_peer_that_its_goal_names():
    titles = {part.name: part.lines[part.name] for part in gpu_parts.PARTS if part.name in part.lines and part.name in gpu_vs_pytorch.CASES}
    assert {*titles, "two-gpus"} == gpu_vs_pytorch.CASES.keys()
    goals = {"on-device": 1.02, "offload": 1.07, "8b": 1.07, "at-step": 1.15, "llama": 1.15}
    for case, goal in goals.items():
        peer = "fused" if case in ("on-device", "llama") else "compute"
        assert peer in gpu_vs_pytorch.CASES[case]["sides"] and f"(goal: {goal}" in titles[case], case


def test_a_step_of_8b_is_beside_its_computing_alone():
    fake_gpu.require_built()
    status, told, errors = bench("--fake", "--case", "8b", "--json")
    assert status == 0, errors
    figure = gpu_parts.read_peers("8b", gpu_parts.Done(0, told, ""))["8b"]
    assert "of the time of forward and backward alone" in figure and "of the time of the longest of these, copies and updates" in figure


def two_gpus():
    return next(part for part in gpu_parts.PARTS if part.name == "two-gpus")


def test_what_two_gpus_reach_is_beside_one_and_beside_peers():
    fake_gpu.require_built()
    status, told, errors = bench("--fake", "--case", "two-gpus", "--json")
    assert status == 0, errors
    part = two_gpus()
    figures = part.read(gpu_parts.Done(0, told, ""))
    assert figures.keys() == part.lines.keys()
    for name, goal, said in (("alone", "1.9", " times as fast"), ("fsdp2", "1.7", " times as fast"), ("all-gather", "0.90", " of NCCL's "),
                             ("reduce-scatter", "as for", " of NCCL's ")):  # fmt: skip
        assert f"(goal: {goal} " in part.lines[name] and said in figures[name], figures
    assert 'links="gpus"' in figures["all-gather"]


@pytest.mark.parametrize("there, said", [(0, "none is"), (1, "one is"), (2, None)])
def test_where_there_are_fewer_than_two_gpus_the_part_says_so(monkeypatch, capsys, there, said):
    monkeypatch.setattr(gpu_sides.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_sides.torch.cuda, "device_count", lambda: there)
    if said is None:
        return gpu_sides.refuse_without_gpus(2)
    with pytest.raises(SystemExit) as ended:
        gpu_sides.refuse_without_gpus(2)
    with pytest.raises(gpu_parts.Skip, match=f"^needs two GPUs; {said} here$"):
        two_gpus().read(gpu_parts.Done(ended.value.code, capsys.readouterr().err, ""))


def test_what_a_peer_lacks_is_a_line(tmp_path):
    fake_gpu.require_built()
    (tmp_path / "deepspeed.py").write_text("raise ImportError('it was built for another PyTorch')")
    status, told, errors = bench("--fake", "--case", "offload", "--sides", "sluice", "deepspeed", "--json", PYTHONPATH=str(tmp_path))
    assert status == 0, errors
    found = json.loads(told)
    assert found["sides"]["sluice"]["steps"] == 1 and found["ratios"] == {}
    assert found["sides"]["deepspeed"] == {"failed": "status 1: ImportError: it was built for another PyTorch"}
    figure = gpu_parts.read_peers("offload", gpu_parts.Done(0, told, ""))["offload"]
    assert "DeepSpeed ZeRO-3 with offload was not measured (status 1: ImportError: it was built for another PyTorch)" in figure


def test_without_a_gpu_it_says_so():
    status, told, errors = bench("--case", "8b", "--json")
    assert status == gpu_vs_pytorch.NO_GPU and told == "" and "sees no GPU" in errors.splitlines()[-1]


def test_gaps_of_a_trace_have_their_reasons(tmp_path):
    """Of three kernels the second comes late, since a copy is awaited, and the third, since it is queued late."""

    def event(cat, ts, dur, correlation, **more):
        return {"ph": "X", "cat": cat, "name": cat, "ts": 1000 * ts, "dur": 1000 * dur, "args": {"correlation": correlation, **more}}

    events = [event("cuda_runtime", at, 0.1, i) for i, at in enumerate([0, 1, 20])]
    events += [event("kernel", at, 2, i, stream=7) for i, at in enumerate([1, 10, 21])]
    events += [event("gpu_memcpy", 2, 7, 9, stream=8, bytes=7000000)]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    told = subprocess.run([sys.executable, str(BENCH / "gpu_gaps.py"), str(trace)], capture_output=True, text=True, check=True).stdout
    assert "stream 8: 1 times gpu_memcpy, 7.0 ms, 0.01 GB at 1.0 GB/s" in told
    assert "stream 7 computes, and had nothing to do for 16.0 of 22.0 ms" in told
    assert "at     11.0 ms   9.00 ms, before kernel (queued 8.00 ms after its begin); beside it nothing" in told
    assert "at      2.0 ms   7.00 ms, before kernel (the GPU waited); beside it 1 copies on 8" in told
