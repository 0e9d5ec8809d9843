"""Forward and backward passes of several threads at the same time: no gradient is lost or given to another."""

import threading
import time

import pytest
import torch
from support import fake_gpu, rounding
from support.chain import Chain, loss_of
from support.processes import run_python
from support.wrapped_models import TERMS, units_of_modules, wrap

from sluice.torch._gradients import Gradient, Gradients

THREADS = 4


def in_threads(action):
    """Runs action(0), action(1) ... at the same time; raises what one of them raised."""
    errors = []

    def run(i):
        try:
            action(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture(scope="module")
def expected():
    """The sums of all threads' gradients."""
    torch.manual_seed(0)
    model = Chain()
    for i in range(THREADS):
        loss_of(model, i).backward()
    return gradients_of(model)


def wrapped(place):
    torch.manual_seed(0)
    return wrap(Chain(), place, units=units_of_modules(Chain()), held_units=2)


def check(model, expected):
    for found, wanted in zip(gradients_of(model), expected, strict=True):
        rounding.assert_near(found, wanted, rounding.of_roundings(THREADS), terms=TERMS)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_gradients_of_threads_are_added(place, expected, monkeypatch):
    """A gradient counts that comes while another thread's first one goes to the engine, which takes long here."""
    model, optimizer = wrapped(place)
    put = Gradients.put

    def slow(*given):
        gradient = put(*given)
        time.sleep(0.02)
        return gradient

    monkeypatch.setattr(Gradients, "put", slow)
    for _ in range(3):
        in_threads(lambda i: loss_of(model, i).backward())
        check(model, expected)
        optimizer.zero_grad()


def test_a_gradient_that_came_to_nothing_stands_in_nobodys_way(expected):
    """torch.autograd.grad() and a backward that fails announce gradients that never come."""
    model, optimizer = wrapped("disk")

    def fail(i):
        with pytest.raises(ZeroDivisionError):
            loss_of(model, i).backward()

    in_threads(lambda i: torch.autograd.grad(loss_of(model, i), list(model.parameters())))
    hook = model.first.weight.register_hook(lambda gradient: 1 / 0)
    in_threads(fail)
    hook.remove()
    optimizer.zero_grad()
    for i in range(THREADS):
        loss_of(model, i).backward()
    check(model, expected)
    optimizer.step()
    assert all(isinstance(p.grad, Gradient) for p in model.parameters())
    check(model, expected)


READS_WHILE_STATE_MOVES = """
import faulthandler, threading
import torch
from support.chain import Chain, loss_of
from support.wrapped_models import units_of_modules, wrap
import sluice.torch

model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
faulthandler.enable()  # installs another handler of SIGSEGV, by which touches are served
loss_of(model, 0).backward()
optimizer.step()
optimizer.zero_grad()
loss_of(model, 1)
ended, reads = threading.Event(), 0

def read():  # tolist() keeps the GIL
    global reads
    while not ended.is_set():
        for p in model.parameters():
            assert len(p.detach().view(-1)[:3].tolist()) == 3
            reads += 1

reader = threading.Thread(target=read)
reader.start()
engine = sluice.torch.engine_of(model)
for round in range(20):
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    for unit in engine.units:
        engine.get_values(unit.name)
ended.set()
reader.join()
assert reads > 0 and engine.counters().touches > 0
"""


@fake_gpu.cpu_alone("outside of the model's calls parameters are read within edit() on a GPU, by one thread")
def test_parameters_are_read_by_one_thread_while_another_moves_state():
    """The test has a process of its own, since a failure is a hang of the whole interpreter."""
    finished = run_python(READS_WHILE_STATE_MOVES)
    assert finished.returncode == 0, finished.stderr
