"""Several threads that use one model which is wrapped on a GPU, the fake one of the tests: each gets the bits that it gets alone,
whatever the others do meanwhile."""

import threading

import pytest
import torch
import torch.utils.checkpoint
from support.threads_on_gpu import WIDTH, called, data, differentiated, in_threads, one_module_called, pause, wrapped
from support.wrapped_models import same

import sluice.torch


def differentiated_by_its_input(model, seed):
    x = data(seed).requires_grad_()
    return list(torch.autograd.grad(model(x).square().sum(), x))


def recomputed(model, seed):
    x = data(seed).requires_grad_()
    y = x
    for layer in model.layers:
        y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
    return list(torch.autograd.grad(y.square().sum(), [x, model.layers[1].weight]))


def recomputed_in_passes_within(model, seed):
    x = data(seed).requires_grad_()
    y = x
    for layer in model.layers:
        y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=True)
    y.square().sum().backward()
    return [x.grad]


def edited(model, seed):
    with sluice.torch.edit(model):
        pause()
        return [model.layers[seed % len(model.layers)].weight * 2]


def saved(model, seed):
    return list(model.state_dict().values())


def set_by_the_engine(model, seed):
    engine = sluice.torch.engine_of(model)
    unit = f"layers.{seed % len(model.layers)}"
    values = engine.get_values(unit)
    engine.set_values(unit, values)
    return [torch.frombuffer(bytearray(value), dtype=torch.float32) for value in values.values()]


# An edit is one of the values that a backward pass needs: it refuses those of other threads.
USES = {
    "calls": [called],
    "calls of modules": [one_module_called],
    "backward": [differentiated],
    "backward to the input": [differentiated_by_its_input],
    "checkpoints": [recomputed, recomputed_in_passes_within],
    "states": [called, saved],
    "edits": [called, edited],
    "values": [called, set_by_the_engine],
    "much": [called, differentiated, recomputed, one_module_called, saved],
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_threads_get_the_bits_that_they_get_alone(uses):
    with wrapped() as (model, _):
        def use(thread, round):
            return uses[(thread + round) % len(uses)](model, 10 * thread + round % 5)

        expected = {(thread, round): use(thread, round) for thread in range(4) for round in range(5 * len(uses))}
        wrong = []

        def run(thread):
            for round in range(50):
                if not same(use(thread, round), expected[thread, round % (5 * len(uses))]):
                    wrong.append((thread, round))

        in_threads(*(lambda thread=thread: run(thread) for thread in range(4)))
        assert wrong == []


# ---- training ----


@pytest.mark.parametrize("at_once", [False, True])
def test_one_thread_trains_while_others_generate(at_once):
    def train(model, optimizer):
        for step in range(8):
            model(data(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    values = []
    for others in (0, 2):
        with wrapped(update_in_backward=at_once) as (model, optimizer):
            ended = threading.Event()

            def trains():
                try:
                    train(model, optimizer)
                finally:
                    ended.set()

            def generates():
                while not ended.is_set():
                    called(model, 1)

            in_threads(trains, *[generates] * others)
            values.append(saved(model, 0))
            del optimizer
    assert same(*values)


def test_gradients_of_threads_are_added():
    """PyTorch has a lock for each parameter while it adds to its gradient, and threads come to these in any order. Sums of small
    integers are exact."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2, bias=False) for _ in range(2))

        def forward(self, x, first):
            return self.parts[first](x) + self.parts[1 - first](x)

    with wrapped(make=Both) as (model, optimizer):
        x = torch.randint(-2, 3, (4, 3, WIDTH)).float()

        def add(thread):
            for _ in range(20):
                model(x[thread], thread % 2).sum().backward()

        def gradients():
            found = [p.grad + 0 for p in model.parameters()]
            optimizer.zero_grad()
            return found

        for thread in range(4):
            add(thread)
        expected = gradients()
        for _ in range(3):
            in_threads(*(lambda thread=thread: add(thread) for thread in range(4)))
            assert same(gradients(), expected)
        del optimizer, add, gradients


def test_a_backward_pass_is_refused_whose_values_another_thread_has_changed():
    with wrapped() as (model, optimizer):
        loss = model(data(1)).square().sum()

        def step():
            model(data(2)).square().sum().backward()
            optimizer.step()

        in_threads(step)
        with pytest.raises(RuntimeError, match="before 'layers.5.weight' was changed"):
            loss.backward()
        del loss, optimizer, step
