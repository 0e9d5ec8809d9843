"""Runs between hosts, which scripts/hosts.sh makes of network namespaces: the bits of one host, and ranks that are lost."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from host_campaign import FAREWELL, HostCampaign, ranks_of_hosts
from kill_campaign import lesson
from support.sluice_process import BUILD, SLUICE, SOURCE, has_metrics

HOSTS = SOURCE / "scripts" / "hosts.sh"
# The script needs these of the system.
PROBE = (
    "ip link add wire type veth peer name port && ip link add switch type bridge && mount -t tmpfs tmpfs /mnt && "
    "tc qdisc add dev wire root tbf rate 1gbit burst 256kb latency 50ms"
)


@pytest.fixture(scope="module", autouse=True)
def possible():
    for path in (SLUICE, BUILD / "lib" / "libsluice_mpi.so"):
        if not path.exists():
            pytest.skip(f"{path} is not built")
    for tool in ("mpirun", "ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing")
    probe = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"hosts cannot be made of namespaces here: {probe.stderr.strip()}")


def words(folder, name, steps, *more, accumulate=12):
    (folder / "text.txt").write_text(lesson())
    own = f"train --model tiny --tokens bytes --seq 32 --batch 2 --accumulate {accumulate} --steps {steps} --memory 600MiB"
    own += " --threads 1 --schedule constant --lr 1e-3 --progress none --prefetch 1"
    files = ["--data", folder / "text.txt", "--out", folder / name, "--metrics", folder / f"{name}.jsonl"]
    return [str(word) for word in [SLUICE, *own.split(), *files, *more]]


def on_hosts(ranks, *program):
    return [str(HOSTS), "--hosts", "2", "--ranks", str(ranks), *program]


def rows_of(folder, name, rank):
    file = folder / f"{name}.jsonl" if rank == 0 else folder / f"{name}.rank{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def results(folder, name, step):
    losses = [json.loads(line)["loss"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return losses, {p.name: p.read_bytes() for p in (folder / name / f"step-{step:08}").glob("*.safetensors")}


def test_a_c_program_trains_between_hosts():
    example = BUILD / "bin" / "c_example_of_ranks"
    if not example.exists():
        pytest.skip(f"{example} is not built")
    done = subprocess.run(on_hosts(1, example, "mpi"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "all 2 ranks have the same values" in done.stdout
    assert done.stderr == ""  # MPI ends in order


@pytest.mark.parametrize("stage, delay", [
    ("3", "0ms"), pytest.param("0", "0ms", marks=pytest.mark.long), pytest.param("1", "1.5ms", marks=pytest.mark.long),
])  # fmt: skip
def test_hosts_have_the_bits_of_one(tmp_path, stage, delay):
    if delay != "0ms" and not os.path.exists("/dev/net/tun"):
        pytest.skip("there is no /dev/net/tun, with which wires have a delay")
    subprocess.run(words(tmp_path, "one", 3, "--stage", stage, "--ranks", "4"), check=True)
    done = subprocess.run(
        on_hosts(2, "--delay", delay, *words(tmp_path, "two", 3, "--stage", stage)), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr  # ranks of a host share memory, and MPI ends in order
    losses, tensors = results(tmp_path, "two", 3)
    assert len(losses) == 3 and len(tensors) > 1
    assert (losses, tensors) == results(tmp_path, "one", 3)
    # A host receives what the plan says, but for rows of tokens that occur twice and parameters that are still there.
    words_of_plan = words(tmp_path, "plan", 3, "--stage", stage, "--ranks", "4", "--hosts", "2", "--json")
    words_of_plan[1] = "plan"
    plan = json.loads(subprocess.run(words_of_plan, capture_output=True, text=True, check=True).stdout)
    # The memory that ranks hold to talk to each other counts in both. The run alone knows its link, by which it would prefetch more or
    # less, had words() not stated that.
    assert abs(rows_of(tmp_path, "two", 0)[0]["predicted_peak"] - plan["predicted_peak"]) <= 4 << 20
    planned = plan["step"]
    for ranks in ((0, 1), (2, 3)):
        came = sum(row["received_from_hosts"] for rank in ranks for row in rows_of(tmp_path, "two", rank)[1:])
        assert 0.5 * planned["bytes_received_from_hosts"] < came / 2 < 1.02 * planned["bytes_received_from_hosts"]


# Of a pipeline on each host sums go between them; of a stage on each host, messages. A step has so many tokens that all of
# the table's gradient is sent, so the plan knows each byte.
# Of ranks that compute a micro-batch together and are on several hosts, what they send each other meanwhile counts, too.
@pytest.mark.parametrize("mesh, stage", [
    ("data=2,pipeline=2", "0"), pytest.param("pipeline=2,data=2", "2", marks=pytest.mark.long), ("tensor=2,data=2", "0"),
    pytest.param("tensor=4", "0", marks=pytest.mark.long), pytest.param("sequence=2,data=2", "0", marks=pytest.mark.long),
    pytest.param("tensor=2,pipeline=2", "0", marks=pytest.mark.long),
])  # fmt: skip
def test_a_mesh_on_hosts_receives_what_its_plan_says_to_the_byte(tmp_path, mesh, stage):
    more = ["--mesh", mesh, "--stage", stage, "--group", "1", "--recompute", "none"]
    if "pipeline" in mesh:
        more += ["--stages", "0-1,2-3"]
    run = words(tmp_path, "run", 2, *more, accumulate=8)
    for flag, value in (("--seq", "256"), ("--batch", "4")):
        run[run.index(flag) + 1] = value
    words_of_plan = [*run, "--hosts", "2", "--link", "1Gbit/s,1ms", "--link-host", "1GB/s,10us", "--json"]
    words_of_plan[1] = "plan"
    plan = json.loads(subprocess.run(words_of_plan, capture_output=True, text=True, check=True).stdout)
    done = subprocess.run(on_hosts(2, *run), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [rows_of(tmp_path, "run", rank)[-1] for rank in range(4)]
    if "pipeline" in mesh and "tensor" not in mesh:
        of_stages = [stage["bytes_received"] for stage in plan["pipeline"]["stages"]]
        stages = [0, 0, 1, 1] if mesh.startswith("pipeline") else [0, 1, 0, 1]
        for row, stage_of in zip(rows, stages, strict=True):
            assert row["received"] == sum(of_stages[stage_of].values())
    came = rows[0]["received_from_hosts"] + rows[1]["received_from_hosts"]
    assert came == plan["step"]["bytes_received_from_hosts"] > 0


def test_a_host_that_does_not_see_the_checkpoint_is_named(tmp_path):
    subprocess.run(words(tmp_path, "run", 1, "--ranks", "2"), check=True)
    hidden = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then mount -t tmpfs tmpfs "$1"; fi && shift && exec "$@"'
    own = words(tmp_path, "run", 2, "--resume")
    done = subprocess.run(
        on_hosts(1, "sh", "-c", hidden, "sh", str(tmp_path / "run"), *own), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    manifest = tmp_path / "run" / "step-00000001" / "manifest.json"
    for text in (f"rank 1 on host 'host2' cannot read '{manifest}'", "rank 0 on host 'host1' has found", "copy rank 0's there"):
        assert text in done.stderr, done.stderr


def rank_of(process, rank):
    """The process that is that rank, among those below a process."""
    below = [process.pid]
    for parent in below:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            below += [int(child) for child in path.read_text().split()]
    for pid in below:
        with open(f"/proc/{pid}/environ", "rb") as file, open(f"/proc/{pid}/comm") as name:
            if f"OMPI_COMM_WORLD_RANK={rank}".encode() in file.read().split(b"\0") and name.read() == "sluice\n":
                return pid
    raise AssertionError(f"there is no rank {rank}")


def wait_for_a_step(folder):
    until = time.monotonic() + 60
    while not has_metrics(folder / "run.jsonl") and time.monotonic() < until:
        time.sleep(0.01)


def test_a_rank_of_another_host_that_is_lost_is_named(tmp_path):
    """One that is silent is in tests/bindings/launched_ranks_test.cc."""
    # mpirun may end before it has handed on what ranks write last.
    aside = ["sh", "-c", 'exec "$@" 2> "$0.$OMPI_COMM_WORLD_RANK"', str(tmp_path / "error")]
    program = on_hosts(1, *aside, *words(tmp_path, "run", 100000))
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        wait_for_a_step(tmp_path)
        os.kill(rank_of(run, 1), signal.SIGKILL)
        run.communicate(timeout=60)
    assert run.returncode != 0
    error = (tmp_path / "error.0").read_text()
    assert any(line.startswith("sluice: error: ") and "rank 1 is gone" in line for line in error.splitlines()), error
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"sluice{run.pid}-" not in names


@pytest.mark.parametrize("mesh", ["data=2", pytest.param("pipeline=2", marks=pytest.mark.long)])
def test_a_cut_wire_is_told_before_ranks_end(tmp_path, mesh):
    """Each host's rank names the other one once it has been silent, and only then says farewell, which is short."""
    silence, loaded = 3, 2
    aside = ["sh", "-c", 'exec "$@" 2> "$0.$OMPI_COMM_WORLD_RANK"', str(tmp_path / "error")]
    program = on_hosts(1, *aside, *words(tmp_path, "run", 100000, "--silence", str(silence), "--mesh", mesh))
    errors = [tmp_path / f"error.{rank}" for rank in range(2)]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        wait_for_a_step(tmp_path)
        wire = ["ip", "-n", f"sluice{run.pid}-2", "link", "set", "wire"]
        begin = time.monotonic()
        subprocess.run([*wire, "down"], check=True)
        told = ended = None
        while ended is None and time.monotonic() < begin + 30:
            if told is None and all("error: " in error.read_text() for error in errors):
                told = time.monotonic() - begin
            if not ranks_of_hosts(str(tmp_path / "run")):
                ended = time.monotonic() - begin
            time.sleep(0.02)
        subprocess.run([*wire, "up"], check=True)  # mpirun ends the processes that it has started there
        run.communicate(timeout=60)
    for rank, error in enumerate(errors):
        first = next(line for line in error.read_text().splitlines() if line.startswith("sluice: "))
        assert "error: " in first and f"rank {1 - rank} has given no sign of life for {silence} s" in first, error.read_text()
    assert told is not None and told < silence + loaded, told
    assert ended is not None and ended < silence + FAREWELL + loaded, ended


@pytest.mark.long
def test_a_host_whose_disk_is_full_is_named(tmp_path):
    """Rank 0's host alone has a small file system for checkpoints, which others fill; rank 1 sends its part of them there."""
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("a small file system cannot be made: mkfs.ext4 or /dev/loop-control is missing")
    image, out, filler = tmp_path / "small.img", tmp_path / "out", tmp_path / "out" / "filler"
    out.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    mounted = 'if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then mount -o loop "$1" "$2"; fi && exec 2> "$3.$OMPI_COMM_WORLD_RANK" && shift 3'
    aside = ["sh", "-c", f'{mounted} && exec "$@"', "sh", *map(str, [image, out, tmp_path / "error"])]
    own = words(tmp_path, "run", 6, "--save-every", "1", "--resume", accumulate=40)
    own[own.index("--out") + 1] = str(out / "run")
    with subprocess.Popen(on_hosts(1, *aside, *own), stdout=subprocess.DEVNULL) as run:
        wait_for_a_step(tmp_path)
        inside = ["nsenter", "-m", "-t", str(rank_of(run, 0))]
        full = subprocess.run([*inside, "dd", "if=/dev/zero", f"of={filler}", "bs=64K"], capture_output=True, text=True)
        assert "No space left" in full.stderr, full.stderr
        run.communicate(timeout=60)
    assert run.returncode != 0
    for rank, begin in enumerate(["sluice: error: ", "sluice: rank 1: error: "]):
        text = (tmp_path / f"error.{rank}").read_text()
        lines = [line for line in text.splitlines() if line.startswith(begin)]
        # It is found before a save begins, or within one.
        full = [line for line in lines if "No space left" in line or "are missing; free them" in line]
        assert any(rank == 0 or "rank 0" in line for line in full), text
    # All ranks must see a checkpoint that they load: now both are on the host that has it.
    there = ["unshare", "--mount", "sh", "-c", 'mount -o loop "$1" "$2" && rm "$3" && shift 3 && exec "$@"', "sh", image, out, filler]
    again = subprocess.run([*there, *own, "--ranks", "2"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    subprocess.run(words(tmp_path, "whole", 6, "--ranks", "2", accumulate=40), check=True)
    losses = [[json.loads(line)["loss"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("run", "whole")]
    assert len(losses[0]) == 6 and losses[0] == losses[1]


@pytest.mark.long
def test_cut_wires_and_resumes_change_no_bit(tmp_path):
    """A share of tests/campaigns/run.py host."""
    campaign = HostCampaign(tmp_path, 2, seed=5, within=5)
    campaign.run(1)
    assert campaign.killed >= 1 and campaign.rounds >= 1, campaign.kills


def test_a_rank_that_is_asked_to_end_lets_all_save(tmp_path):
    """Also in steps that last longer than ranks may be silent: then all of them live, and none may be missed."""
    silence = 1.0
    own = lambda name, steps, *more: words(tmp_path, name, steps, "--warmup", "0", *more, accumulate=160)
    program = on_hosts(1, *own("run", 1000, "--silence", f"{silence:.0f}"))
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        wait_for_a_step(tmp_path)
        os.kill(rank_of(run, 1), signal.SIGTERM)  # the other rank is not told by the launcher
        out, error = run.communicate(timeout=120)
    assert run.returncode == 0, error
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert f"saved after step {len(seconds)} of 1000" in out, out + error
    assert min(seconds) > silence / 4, "a step is shorter than the time between signs of life: give it more micro-batches"
    steps = len(seconds) + 1
    done = subprocess.run(on_hosts(1, *own("run", steps, "--resume")), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    subprocess.run(own("whole", steps, "--ranks", "2"), check=True)
    assert results(tmp_path, "run", steps) == results(tmp_path, "whole", steps)
