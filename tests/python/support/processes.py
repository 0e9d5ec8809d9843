"""Runs tests of wrapped models in processes of their own, and measures what a process holds."""

import gc
import os
import resource
import subprocess
import textwrap

from support import fake_gpu, warm_python
from support.sluice_process import PACKAGE, TESTS

measures_the_process = fake_gpu.cpu_alone("it measures the process, and the fake GPU's memory is the process's own")


def pages_held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def files_open():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def grown(action, warm, times):
    """The growth of memory (bytes), open files, mappings and threads over `times` calls, after `warm` calls."""
    seen = []
    for count in (warm, times):
        for _ in range(count):
            action()
        gc.collect()
        seen.append((pages_held(), files_open(), mappings(), len(os.listdir("/proc/self/task"))))
    return [after - before for before, after in zip(*seen, strict=True)]


def run_python(program):
    """Runs a program that may import what tests of wrapped models and this module import. Captures its output."""
    paths = [PACKAGE, TESTS, TESTS / "torch"]
    return subprocess.run(
        [warm_python.executable(), "-c", program], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip


BEGIN = """
import os, sys, tempfile
from collections import OrderedDict
import torch
import sluice.torch
from support import fake_gpu, warm_python
fake_gpu.begin_if_asked()
model = torch.nn.Sequential(OrderedDict(first=torch.nn.Linear(24, 24), last=torch.nn.Linear(24, 24)))
units = {"first": ["first"], "last": ["last"]}
given = fake_gpu.placed(memory="4GiB", disk=tempfile.gettempdir(), place="disk", units=units)
model, optimizer = sluice.torch.wrap(model, sluice.AdamW(), **given)
def loss_of(model, step):
    return model(torch.ones(3, 24)).square().mean()
loss_of(model, 0).backward()
"""


def run(program):
    return run_python(BEGIN + textwrap.dedent(program))


BIG = """
import os, tempfile
import torch
import sluice.torch
from support import fake_gpu, warm_python
fake_gpu.begin_if_asked()
torch.set_num_threads(2)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
def layers(count):
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(1400, 1400) for _ in range(count)])
    return model, {str(i): [str(i)] for i in range(count)}
model, units = layers(24)
begin = held()
def wrapped(memory):
    given = {"disk": tempfile.gettempdir(), "reserve": "160MiB", "units": units}
    return sluice.torch.wrap(model, sluice.AdamW(), **fake_gpu.placed(True, memory=begin + memory, **given))
def step():
    model(torch.ones(2, 1400)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run_big(program):
    return run_python(BIG + textwrap.dedent(program))
