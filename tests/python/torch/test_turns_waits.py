"""Which threads wait for which, where several use models which are wrapped on a GPU, the fake one of the tests: none for ever, also
where one that is waited for is gone."""

import _thread
import threading
import time
import types

import pytest
import torch
from support.graphs import Counted
from support.threads_on_gpu import (
    Model,
    Stops,
    called,
    data,
    differentiated,
    elsewhere,
    in_threads,
    looks,
    one_module_called,
    turns_of,
    until,
    wrapped,
)
from support.wrapped_models import same
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import sluice
import sluice.torch._turns


# ---- backward passes in threads of PyTorch's ----


class Differentiates(Model):
    """A model whose forward runs backward passes in other threads, which use its modules."""

    def forward(self, x):
        x = self.layers[0](x)
        y = elsewhere(lambda: differentiated_at(self.layers[2], x.detach()) + self.layers[4](x.detach()).detach())
        return super().forward(x + y + differentiated_at(self.layers[3], x.detach()))


def differentiated_at(layer, x):
    with torch.enable_grad():
        x.requires_grad_()
        return torch.autograd.grad(layer(x).square().sum(), x)[0]


def test_backward_passes_of_other_threads_go_on_within_calls():
    with wrapped(make=Differentiates) as (model, _):
        uses = [called, differentiated, lambda model, seed: elsewhere(lambda: one_module_called(model, seed))]
        expected = {}
        in_threads(lambda: expected.update({(use, thread): use(model, thread) for use in uses for thread in range(4)}))

        def run(thread):
            for round in range(10):
                use = uses[(thread + round) % len(uses)]
                assert same(use(model, thread), expected[use, thread])

        in_threads(*(lambda thread=thread: run(thread) for thread in range(4)))


def test_a_pass_that_another_one_needs_does_not_wait_for_a_call_that_waits_for_that():
    """A GPU's passes share one thread: a pass that would wait there for a call could hold up the pass for which that call waits."""
    with wrapped(make=Stops) as (model, _):
        expected, other = called(model, 1), one_module_called(model, 2)
        waits = threading.Event()
        went = threading.Event()

        def stop():
            waits.set()
            until(lambda: len(turns_of(model)._queue) == 1)
            assert elsewhere(lambda: went.wait(30))

        def call():
            model.stop = stop
            assert same(called(model, 1), expected)

        def differentiate():
            waits.wait()
            assert same(elsewhere(lambda: one_module_called(model, 2)), other)
            went.set()

        in_threads(call, differentiate)
        del model.stop


def in_parts(monkeypatch, first, second):
    """Uses turns in two threads that run parts of one backward pass. first, second: start a thread, given what it does. Returns what has
    happened, in order, until the first thread runs nothing any more but what waits for the pass, and the second one has ended."""
    turns, order, kept, ended = sluice.torch._turns.Turns(), [], [], threading.Event()
    waits_for_pass = torch.autograd.graph._engine_run_backward.__code__
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", types.SimpleNamespace(queue_callback=kept.append))
    monkeypatch.setattr(sluice.torch._turns, "_runs_now", lambda thread: waits_for_pass if "left" in order else turns.begin_pass.__code__)

    def begin():
        turns.begin_pass()
        first_looks = looks(turns)
        second(use)
        until(lambda: len(first_looks) > 2 or ended.is_set())
        order.append("left")
        ended.wait()

    def use():
        try:
            turns.begin_pass()
            with turns:
                order.append("used")
        except sluice.StateError as error:
            order.append(str(error))
        ended.set()

    first(begin)
    in_threads(ended.wait)
    kept.clear()
    assert turns._holders == [], "the pass has ended"
    return order


def by_python(run):
    threading.Thread(target=run).start()


def by_pytorch(run):
    _thread.start_new_thread(run, ())


def test_what_a_pass_does_on_a_gpu_waits_until_the_thread_that_has_begun_it_runs_nothing_else(monkeypatch):
    assert in_parts(monkeypatch, by_python, by_pytorch) == ["left", "used"]


@pytest.mark.parametrize("second", [by_python, by_pytorch], ids=["on the CPU", "on another GPU"])
def test_a_pass_that_uses_the_model_elsewhere_after_its_gpu_is_refused(monkeypatch, second):
    """What PyTorch then computes on the GPU is not seen, and what it computes with could be taken away."""
    order = in_parts(monkeypatch, by_pytorch, second)
    assert "uses the model in two threads" in order[0] and order[1:] in ([], ["left"])


# ---- threads that are gone ----


def check_goes_on(model, gone, stays):
    """Checks that other threads go on after gone(), whether its thread stays or ends."""
    expected = called(model, 1)
    ended, went = threading.Event(), threading.Event()

    def go():
        try:
            gone()
        finally:
            ended.set()
        if stays:
            went.wait(60)

    def other():
        ended.wait()
        assert same(called(model, 1), expected)
        went.set()

    in_threads(go, other)


@pytest.mark.parametrize("start", [by_python, by_pytorch])
def test_others_go_on_after_a_thread_has_ended_within_a_use(start):
    turns, kept, began, went = sluice.torch._turns.Turns(), [], threading.Event(), []

    def use():
        with turns:
            yield

    def run():
        kept.append(use())
        next(kept[0])
        began.set()

    def go():
        began.wait()
        with turns:
            went.append(True)

    start(run)
    in_threads(go)
    assert went == [True]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("run", [lambda action: action(), elsewhere], ids=["in its thread", "in another"])
def test_others_go_on_after_a_backward_pass_has_failed(run, stays):
    with wrapped() as (model, _):

        def backward():
            loss = model(data(1)).square().sum()
            hook = model.layers[2].weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            hook.remove()

        check_goes_on(model, lambda: run(backward), stays)


def interrupted(model, call):
    """What a KeyboardInterrupt raises in the fourth module, which keeps what the call has had as long as somebody has it."""

    thread = threading.get_ident()

    def interrupt(*_):
        if threading.get_ident() == thread:
            raise KeyboardInterrupt

    hook = model.layers[3].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    hook.remove()
    return caught


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_others_go_on_after_a_call_was_interrupted(whole, stays):
    with wrapped() as (model, _):
        kept = []
        check_goes_on(model, lambda: kept.append(interrupted(model, lambda: (model if whole else model.layers[3])(data(1)))), stays)
        del kept[:]


@pytest.mark.parametrize("before", [False, True])
def test_the_model_may_be_called_after_a_call_of_a_module_was_interrupted(before):
    with wrapped() as (model, _):
        if before:
            called(model, 1)
        interrupted(model, lambda: model.layers[3](data(1)))
        found = called(model, 1)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert same(found, called(model, 1))


def test_nothing_is_left_of_a_call_that_was_interrupted():
    with wrapped() as (model, _):
        interrupted(model, lambda: model.layers[3](data(1)))
        # What is compiled next is so at once, though nobody has called the model again.
        counted = Counted()
        torch.compile(lambda x: x.sin(), backend=counted)(torch.ones(2))
        assert counted.graphs == 1
    assert _len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_thread_goes_on_after_its_call_was_interrupted():
    with wrapped() as (model, _):
        expected = [one_module_called(model, seed) for seed in range(6)]
        wrong = []

        def run(interrupts):
            for round in range(20):
                if interrupts:
                    interrupted(model, lambda: model.layers[3](data(1)))
                wrong.extend((round, seed) for seed in range(6) if not same(one_module_called(model, seed), expected[seed]))

        in_threads(lambda: run(True), *[lambda: run(False)] * 3)
        assert wrong == []


# ---- who waits for whom ----


def test_a_thread_that_python_has_not_started_keeps_its_turn():
    with wrapped() as (model, _):
        called(model, 1)
        began, may_end, ended, order = threading.Event(), threading.Event(), threading.Event(), []

        def edit():
            with sluice.torch.edit(model):
                began.set()
                may_end.wait()
                order.append("edit")
            ended.set()

        def call():
            began.wait()
            threading.Timer(0.2, may_end.set).start()  # time to look at who has the turn, which takes it from no edit
            called(model, 1)
            order.append("call")

        _thread.start_new_thread(edit, ())
        in_threads(call)
        ended.wait()
        assert order == ["edit", "call"]


def passes_back(model, inside):
    x = data(1).requires_grad_()
    y = model.layers[1](x)
    y.register_hook(lambda gradient: inside())
    torch.autograd.grad(model(y).sum(), x)


def calls_a_module(model, inside):
    hook = model.layers[1].register_forward_pre_hook(lambda *_: inside())
    one_module_called(model, 1)
    hook.remove()


def edits(model, inside):
    with sluice.torch.edit(model):
        inside()


def takes_its_state(model, inside):
    hook = model.register_state_dict_post_hook(lambda *_: inside())
    model.state_dict()
    hook.remove()


@pytest.mark.parametrize("use", [passes_back, calls_a_module, edits, takes_its_state])
def test_others_wait_until_a_use_has_ended(use):
    with wrapped() as (model, _):
        began, order = threading.Event(), []

        def inside():
            if began.is_set():  # the other thread comes here, too
                return
            began.set()
            until(lambda: turns_of(model)._queue)
            order.append("inside")

        def call():
            began.wait()
            called(model, 1)
            order.append("called")

        in_threads(lambda: use(model, inside), call)
        assert order == ["inside", "called"]


def test_a_call_that_has_ended_waits_for_no_other_one():
    with wrapped(make=Stops) as (model, _):
        inside, ended = threading.Event(), threading.Event()

        def stop():
            if not inside.is_set():
                inside.set()
                until(lambda: turns_of(model)._queue)
            else:
                assert ended.wait(30)

        def first():
            called(model, 1)
            ended.set()

        def second():
            inside.wait()
            called(model, 2)

        model.stop = stop
        in_threads(first, second)
        del model.stop, stop


def test_turns_come_in_the_order_in_which_threads_have_come():
    turns, order, goes = sluice.torch._turns.Turns(), [], threading.Event()

    def first():
        with turns:
            goes.set()
            until(lambda: len(turns._queue) == 2)
        with turns:
            order.append("first")

    def later(name, after):
        goes.wait()
        until(lambda: len(turns._queue) == after)
        with turns:
            order.append(name)

    in_threads(first, lambda: later("second", 0), lambda: later("third", 1))
    assert order == ["second", "third", "first"]
    assert turns._holders == turns._queue == []


def test_threads_of_different_models_do_not_wait_for_each_other():
    with wrapped(2, Stops) as ((one, _), (other, _)):
        inside, went = threading.Event(), threading.Event()

        def call():
            one.stop = lambda: (inside.set(), went.wait(60))
            called(one, 1)

        def call_other():
            inside.wait()
            called(other, 1)
            differentiated(other, 1)
            went.set()

        in_threads(call, call_other)
        assert went.is_set()
        del one.stop, _
