"""The parts of scripts/gpu_check.sh: the command of each part, its time limit, and the reading of its output."""
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
import typing
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("SLUICE_BUILD", ROOT / "build"))
WHOLE_LIMIT_S = 480
PROBE_LIMIT_S = 30
ENDING_S = 10  # for the exit of a process that holds much pinned host memory, and for reading its measurements
KERNELS = "UpdateTest.*:SquaresTest.*"
TWINS = "DeviceEngineTest.*:Seeds/DeviceEngineOrdersTest.*:Updates/DeviceEngineFailuresTest.*:CpuUpdatesTest.*"
NCCL = "NcclTest.*"
LACKS_MEMORY = 3  # the exit status of Sluice's programs where a budget is too small


class Skip(Exception):
    """A part cannot run here; the text says why."""


class Failure(Exception):
    """A part has found an error; the text describes it."""


@dataclasses.dataclass
class Done:
    """The result of a part's command."""

    status: int
    output: str
    tests: str  # a test program's JSON report of its tests; else empty


@dataclasses.dataclass
class Part:
    """`lines` are the properties that it checks, by name. command(is_fake, limit_s) returns the command's words; read(done) returns a
    figure for each line that was checked. Both may raise Skip, and read() Failure."""

    name: str
    limit_s: int  # its minimum of seconds, to which the unused time of earlier parts is added
    shown: str  # the command that a user types on a machine with a GPU
    lines: dict
    command: typing.Callable
    read: typing.Callable


def program(name):
    path = BUILD / "bin" / name
    if not path.exists():
        raise Skip(f"{path} is not there; scripts/build.sh builds it")
    return str(path)


# ---- tests ----


def tests_of(text):
    """Returns the tests that a program of GoogleTest has run, each as its JSON with the full `name`; none where the program did
    not complete."""
    suites = json.loads(text)["testsuites"] if text else []
    return [test | {"name": f"{suite['name']}.{test['name']}"} for suite in suites for test in suite["testsuite"]
            if test["status"] == "RUN"]


def first_line(test):
    """Returns a test's first failure as a short line: the text of an exception, or the message."""
    text = test["failures"][0]["failure"]
    thrown = re.search(r'exception with description "(.*)" thrown', text, re.DOTALL)
    return " ".join((thrown[1] if thrown else text).split())[:300]


def last_begun(output):
    names = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
    return names[-1] if names else "its first test"


def read_tests(line, done):
    tests = tests_of(done.tests)
    failed = [test for test in tests if "failures" in test]
    if failed:
        raise Failure(f"{len(failed)} of {len(tests)} tests failed, the first of them {failed[0]['name']}: {first_line(failed[0])}")
    if done.status != 0 or not tests:
        raise Failure(f"the tests ended with status {done.status} in {last_begun(done.output)}")
    skipped = [test for test in tests if test["result"] == "SKIPPED"]
    reasons = set(re.findall(r": Skipped\n(.+)", done.output))
    if len(skipped) == len(tests):
        raise Skip("; ".join(sorted(reasons)))
    passed = f"{len(tests) - len(skipped)} of {len(tests)} tests passed"
    return {line: f"{passed}, and the others were skipped ({'; '.join(sorted(reasons))})" if skipped else passed}


def test_part(name, limit_s, tests, title):
    words = f"--gtest_filter={tests}"
    return Part(name, limit_s, f"SLUICE_CUDA_DRIVER=libcuda.so.1 build/bin/cuda_test '{words}'", {name: title},
                lambda is_fake, limit_s: [program("cuda_test"), words], lambda done: read_tests(name, done))


def nccl_library():
    """Returns the file of the NCCL that PyTorch's packages bring; where there is none, the name by which the system's is found."""
    found = [path for folder in sys.path for path in sorted(pathlib.Path(folder).glob("nvidia/*/lib/libnccl.so.2"))]
    return os.environ.get("SLUICE_NCCL") or str(found[0] if found else "libnccl.so.2")


def nccl_part(name, limit_s, title):
    tests = test_part(name, limit_s, NCCL, title)
    return dataclasses.replace(
        tests, shown=f"SLUICE_NCCL=libnccl.so.2 {tests.shown}",
        command=lambda is_fake, limit_s: [*([] if is_fake else ["env", f"SLUICE_NCCL={nccl_library()}"]), *tests.command(is_fake, limit_s)])


# ---- what NVIDIA's tool finds ----


def sanitizer():
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", os.environ.get("PATH", "")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if not found:
        raise Skip("compute-sanitizer, which is in CUDA's toolkit, is neither on the PATH nor in $CUDA_HOME/bin")
    return found


def sanitizer_command(tool, tests, is_fake):
    if is_fake:
        raise Skip("compute-sanitizer looks at work on a GPU, and the fake driver has none")
    return [sanitizer(), "--tool", tool, "--error-exitcode", "9", program("cuda_test"), f"--gtest_filter={tests}"]


def read_sanitizer(name, done):
    if "Device not supported" in done.output:
        raise Skip("compute-sanitizer says that this machine does not let it look at the GPU: Device not supported")
    found = re.findall(r"^========= (.+)", done.output, re.MULTILINE)
    if done.status == 9:
        raise Failure(next((line for line in found if "COMPUTE-SANITIZER" not in line), "it found errors"))
    return {name: (found[-1] if found else "no errors") + "; " + read_tests(name, done)[name]}


def sanitizer_part(tool, limit_s, tests, title):
    return Part(tool, limit_s, f"SLUICE_CUDA_DRIVER=libcuda.so.1 compute-sanitizer --tool {tool} build/bin/cuda_test "
                f"'--gtest_filter={tests}'", {tool: title}, lambda is_fake, limit_s: sanitizer_command(tool, tests, is_fake),
                lambda done: read_sanitizer(tool, done))


# ---- the wheel ----


def packed_libraries(folder):
    """Returns environment variables for the libraries that programs need besides build/. In the archive the matrix library is only
    in the wheel, which is unpacked into the folder."""
    for wheel in (ROOT / "wheels").glob("sluice_train-*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
        return {"SLUICE_LIBRARY_PATH": str(pathlib.Path(folder, "sluice"))}
    return {}


# Trains an engine from the wheel that the first word names, beside PyTorch where this Python has it.
TRIED = """
import array, json, sys, tempfile, zipfile
folder = tempfile.TemporaryDirectory()
zipfile.ZipFile(sys.argv[1]).extractall(folder.name)
sys.path.insert(0, folder.name)
try:
    import torch
except ImportError:
    torch = None
sees = torch is not None and torch.cuda.is_available() and torch.ones(8, device="cuda").sum().item() == 8
import sluice
unit = sluice.Unit("unit", [sluice.Parameter("weight", (8, 8))])
with sluice.Engine([unit], sluice.Options(memory="1GiB", threads=1)) as engine:
    engine.set_values("unit", {"weight": array.array("f", [1.0] * 64)})
    engine.begin_step()
    with engine.acquire("unit", gradient=True):
        engine.add_gradient("weight", array.array("f", [0.5] * 64))
    assert abs(engine.step().gradient_norm - 4.0) < 1e-6
print(json.dumps({"torch": torch and torch.__version__, "sees": sees}))
"""


def wheel_command(is_fake, limit_s):
    found = [*(ROOT / "wheels").glob("sluice_train-*.whl"), *(BUILD / "wheel").glob("sluice_train-*.whl")]
    if not found:
        raise Skip(f"there is no wheel in {BUILD / 'wheel'}; scripts/wheel.sh makes it")
    return [sys.executable, "-c", TRIED, str(found[0])]


def read_wheel(done):
    found = read_json(done)
    if found["torch"] is None:
        return {"wheel": "an engine trained; this Python has no PyTorch"}
    return {"wheel": f"an engine trained beside PyTorch {found['torch']}, which {'sees the GPU' if found['sees'] else 'sees no GPU'}"}


# ---- measurements ----


def read_json(done):
    """Returns the JSON object that a bench printed, perhaps between warnings."""
    if done.status == LACKS_MEMORY:
        raise Skip(done.output.strip().splitlines()[-1])
    if done.status != 0:
        raise Failure(f"status {done.status}: {(done.output.strip().splitlines() or ['nothing was printed'])[-1]}")
    for begin in re.finditer(r"^\{", done.output, re.MULTILINE):
        try:
            return json.JSONDecoder().raw_decode(done.output[begin.start():])[0]
        except json.JSONDecodeError:
            continue  # a library has printed that
    raise Failure("no JSON was printed")


LINK = {
    "host to GPU": "copies to the GPU, unit by unit (goal: 0.90 of one copy)",
    "GPU to host": "copies from the GPU, unit by unit (goal: 0.90 of one copy)",
    "both ways": "copies both ways at once (goal: 0.90 of each way alone)",
    "mapping of 32.0 MiB": "what mapping memory costs",
    "mapping of 32.0 MiB beside copies": "what mapping memory costs while copies are under way",
    "both ways beside mapping": "copies both ways while memory is mapped",
    "registering of 32.0 MiB": "what registering host memory costs",
    "registering of 32.0 MiB beside copies": "what registering host memory costs while copies are under way",
    "both ways beside registering": "copies both ways while host memory is registered",
}


def link_figure(row):
    limit, ratio = row["limit_is"], row["ratio"]
    if row["unit"] == "seconds":
        return f"{1e3 * row['reached']:.3f} ms; {limit} takes {1e3 * row['limit']:.3f} ms"
    return f"{row['reached'] / 1e9:.1f} GB/s, {ratio:.2f} of {limit}"


def read_link(done):
    rows = {row["name"]: row for row in read_json(done)["rows"]}
    if rows.keys() != LINK.keys():
        raise Failure(f"the bench has other rows than are known here: {', '.join(rows.keys() ^ LINK.keys())}")
    return {name: link_figure(row) for name, row in rows.items()}


SPEED = {
    "AdamW, f32 masters and state": "updates of bf16 parameters with f32 masters and state (goal: 0.85 of copies within the GPU)",
    "the same in 20 spans": "the same of 20 spans in one launch (goal: 0.85)",
    "AdamW, bf16 alone": "updates of bf16 parameters without masters, with bf16 state (goal: 0.85)",
    "first gradient": "a first gradient in bf16, stored in f32 with its squares (goal: 0.85)",
    "further gradient": "a further gradient in bf16, added to one in f32 with the squares (goal: 0.85)",
}


def read_speed(done):
    found = read_json(done)
    rows = {name: [row for row in found["rows"] if row["name"] == name] for name in SPEED}
    return {name: f"of copies, which read and write {found['copy'] / 1e9:.0f} GB/s: " +
            ", ".join(f"{row['ratio']:.2f} at {row['elements'] / 2**20:.4g} Mi elements" for row in of) for name, of in rows.items()}


def read_step(done):
    found = read_json(done)
    return {"step": f"{found['seconds']:.3f} s, {found['ratio']:.2f} of the larger of {found['link_seconds']:.3f} s for "
                    f"{(found['bytes_in'] + found['bytes_out']) / 1e9:.1f} GB on the link and {found['update_seconds']:.3f} s for updates"}


# ---- beside PyTorch ----

NO_PYTORCH = 4  # the exit status of bench/python/gpu_vs_pytorch.py where PyTorch sees no GPU
PEERS = {"fused": "PyTorch's fused AdamW", "compute": "forward and backward alone",
         "limit": "the longest of these, copies and updates", "fsdp2": "FSDP2 with CPU offload",
         "deepspeed": "DeepSpeed ZeRO-3 with offload"}


def limited(limit_s):
    """The words that let a program end, and tell what it has found, before its part's limit."""
    return ["--limit", f"{limit_s - ENDING_S:.0f}"]


def peers_command(case, limit_s, is_fake):
    return [sys.executable, str(ROOT / "bench" / "python" / "gpu_vs_pytorch.py"), "--json", "--case", case, *limited(limit_s),
            *["--fake"] * is_fake]


def taken_text(took):
    """Returns the figures for PyTorch in Sluice's plan after some steps, in bytes and seconds; None for a figure that
    was not measured."""
    texts = []
    if took["seconds"]:
        texts.append(f"{took['seconds']['waiting']:.3f} s of a step of {took['seconds']['step']:.3f} s waited for units")
    if took["measured"] is not None:
        texts.append(f"PyTorch took {took['measured'] / 2**30:.2f} GiB of the {took['reserve'] / 2**30:.2f} GiB that were planned for it")
    if took["beside"] is not None:
        texts.append(f"{took['beside'] >> 20} MiB were taken beside that, and {took['host'] >> 20} MiB of the host's "
                     f"({took['host_reserve'] >> 20} MiB are assumed)")
    return texts


def read_peers(case, done):
    if done.status == NO_PYTORCH:
        raise Skip(done.output.strip().splitlines()[-1])
    found = read_json(done)
    sides = found["sides"]
    texts = [f"{sides['sluice']['step']:.3f} s a step, {found['tokens'] / sides['sluice']['step']:.0f} tokens/s"]
    for name, what in PEERS.items():
        if name in found["ratios"]:
            texts.append(f"{found['ratios'][name]:.2f} of the time of {what}")
        elif name in sides:
            texts.append(f"{what} was not measured ({sides[name]['failed'][:200]})")
    ready = sides["sluice"]["ready"]
    texts.append(f"made ready in {sum(ready.values()):.1f} s ({', '.join(f'{phase} {took:.1f}' for phase, took in ready.items())})")
    texts += taken_text(sides["sluice"]["pytorch"])
    return {case: "; ".join(texts)}


def peers_part(case, limit_s, title):
    return Part(case, limit_s, f"python3 bench/python/gpu_vs_pytorch.py --case {case}", {case: title},
                lambda is_fake, limit_s: peers_command(case, limit_s, is_fake), lambda done: read_peers(case, done))


# ---- two GPUs ----

TWO_GPUS = {
    "alone": "a step of 1.1G parameters, f32 masters and state, in 8 GiB of each of two GPUs, updated in backward, beside the same step on "
             "one GPU (goal: 1.9 times as fast)",
    "fsdp2": "the same step, beside FSDP2 with CPU offload on both GPUs (goal: 1.7 times as fast)",
    "all-gather": "parameters that two GPUs gather, beside NCCL's all-gather (goal: 0.90 of its rate by NVLink, and above it where GPUs do "
                  "not read each other's memory)",
    "reduce-scatter": "gradients that two GPUs sum, beside NCCL's reduce-scatter (goal: as for parameters)",
}


def read_two_gpus(done):
    if done.status == NO_PYTORCH:
        raise Skip(done.output.strip().splitlines()[-1])
    found = read_json(done)
    sides, ratios = found["sides"], found["ratios"]

    def figure(name):
        side = sides[name if name in sides else "between"]
        if "failed" in side:
            return f"not measured ({side['failed'][:200]})"
        if name in ratios:
            return f"{sides['sluice']['step']:.3f} s a step, {side['step']:.3f} s there: {1 / ratios[name]:.2f} times as fast"
        own, peer = side["rates"][name], side["peer"][name]
        return f"{own / 1e9:.1f} GB/s to each GPU by links=\"{side['links']}\", {own / peer:.2f} of NCCL's {peer / 1e9:.1f} GB/s"

    return {name: figure(name) for name in TWO_GPUS}


# ---- models of transformers ----

WAYS = {
    "loop": "a loop with clipping over a small Llama of transformers has the same bits on the device, in host memory and on disk",
    "loop_bf16": "the same in bf16 with f32 masters",
    "budgets": "the same with budgets of which the plan needs the disk",
    "checkpointing": "the same with gradient checkpointing",
    "autocast": "the same under autocast to bf16",
    "trainer": "transformers' Trainer has them, too",
    "generate": "generate() gives the tokens of plain PyTorch",
    "saved": "state_dict() and save_pretrained() have what was trained",
    "compiled": "blocks that torch.compile() compiles have the same bits wherever the model lies",
}


def read_ways(done):
    if done.status == NO_PYTORCH:
        raise Skip(done.output.strip().splitlines()[-1])
    told = read_json(done)
    failed = [f"{name}: {way['line']}" for name, way in told.items() if not way["passed"]]
    if failed:
        raise Failure(f"{len(failed)} of {len(told)} ways failed: {'; '.join(failed)}")
    return {name: f"{way['line']} ({way['seconds']} s)" for name, way in told.items()}


def ways_part(name, limit_s, titles):
    """A part whose program, gpu_NAME.py, tells of each way that it tried, also where its time ends."""
    shown = f"bench/python/gpu_{name}.py"
    return Part(name, limit_s, f"python3 {shown}", titles,
                lambda is_fake, limit_s: [sys.executable, str(ROOT / shown), "--json", *limited(limit_s), *["--fake"] * is_fake], read_ways)


# On the fake driver all sizes are small: it computes on the CPU, and its times are meaningless.
#
# The minimums and PROBE_LIMIT_S add up to WHOLE_LIMIT_S. A test holds that each part has time enough if every one takes what it took on an
# H200 with 16 cores (docs/gpu), or its minimum where it was not seen there. Where there is one GPU, `two-gpus` leaves its time to what
# follows. `offload` is last, because it took 106 s beside FSDP2 and 168
# with DeepSpeed, too: it gets what all others leave over, and its last sides are left out, or measure fewer steps, where that is little.
PARTS = [
    Part("link", 11, "build/bin/sluice bench link --seconds 8", LINK,
         lambda is_fake, limit_s: [program("sluice"), "bench", "link", "--json"] +
         (["--size", "32MiB", "--seconds", "0.1"] if is_fake else ["--seconds", "8"]), read_link),
    test_part("conformance", 12, f"*-{KERNELS}:{TWINS}:{NCCL}", "the driver does what the fake driver of the tests does"),
    test_part("kernels", 5, KERNELS, "updates and sums of squares have the bits of the CPU's"),
    Part("speed", 6, "build/bin/gpu_kernels_bench", SPEED,
         lambda is_fake, limit_s: [program("gpu_kernels_bench"), "--json"] +
         (["--elements", "5000", "--device-memory", "16MiB"] if is_fake else []), read_speed),
    test_part("twins", 15, TWINS, "an engine on the GPU has the bits of one on the CPU, wherever its parts are"),
    nccl_part("nccl", 8, "one rank is joined by NCCL, and receives what it sends itself"),
    Part("step", 18, "build/bin/gpu_step_bench --model llama-3b --device-memory 16GiB --memory 96GiB",
         {"step": "a step of 3.0G parameters that only moves and updates, beside the larger of what its bytes and its updates take "
          "(goal: 1.1)"},
         lambda is_fake, limit_s: [program("gpu_step_bench"), "--json"] +
         (["--model", "tiny", "--device-memory", "52MiB"] if is_fake else
          ["--model", "llama-3b", "--device-memory", "16GiB", "--memory", "96GiB"]), read_step),
    Part("wheel", 9, "scripts/gpu_check.sh --only wheel", {"wheel": "the wheel works there, beside PyTorch"}, wheel_command,
         read_wheel),
    sanitizer_part("memcheck", 4, "UpdateTest.SmallSpansHaveThemToo:SquaresTest.*", "kernels touch no memory but their own"),
    sanitizer_part("racecheck", 7, "SquaresTest.*", "no thread of a kernel reads what another one has yet to write"),
    dataclasses.replace(peers_part("two-gpus", 60, ""), lines=TWO_GPUS, read=read_two_gpus),
    ways_part("transformers", 88, WAYS),
    ways_part("ranks", 55, {
        "ranks": "two ranks, and three, that share the GPU have the same bits at stages 0 to 3, and two as a pipeline, also in one "
        "process, in several places, near those on the CPU"}),
    peers_part("on-device", 35, "a step of 3.0G parameters, all on the GPU, beside PyTorch's fused AdamW (goal: 1.02 of its time)"),
    peers_part("llama", 22, "a step of 1.1G parameters by transformers, clipped, all on the GPU, beside PyTorch's fused AdamW with the "
               "same state (goal: 1.15)"),
    peers_part("8b", 35, "a step of 7.5G parameters, f32 masters and bf16 state, in 24 GiB of the GPU's memory and 96 GiB of the host's, "
               "beside the longest of computing, copies and updates (goal: 1.07)"),
    peers_part("at-step", 30, "a step of 3.0G parameters with f32 masters and state in 16 GiB of the GPU's memory, clipped and updated at "
               "step(), beside forward and backward alone (goal: 1.15)"),
    peers_part("offload", 30, "the same step, updated in backward, beside the longest of computing, copies and updates (goal: 1.07), and "
               "peers (goals: 0.59 of FSDP2's time, 0.71 of DeepSpeed's), made ready (goal: in less than 8 s)"),
]


# ---- which GPU it is ----


def probe_command():
    return [program("cuda_test"), "--gtest_filter=OpeningTest.SaysWhatTheDeviceIs"]


def read_probe(done):
    """Returns the GPU's description, and whether it is the fake driver's. Raises Skip where no GPU can be opened."""
    tests = tests_of(done.tests)
    if not tests:
        raise Skip(f"no GPU can be opened: build/bin/cuda_test ended with status {done.status}: {done.output.strip()[-300:]}")
    if "failures" in tests[0]:
        raise Skip(f"no GPU can be opened: {first_line(tests[0])}")
    found = tests[0]
    is_fake = found["is_fake"] == "1" or found["gpu"] == "fake GPU"  # the fake driver is recognised even without its control functions
    return {"name": found["gpu"], "capability": found["capability"], "memory": int(found["memory"]),
            "cuda_of_driver": int(found["cuda_of_driver"])}, is_fake
