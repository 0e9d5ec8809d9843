"""An estimate runs the model once more, without values: nothing of that is left with the model, its hooks or its callers."""

import collections
import functools
import queue
import threading

import pytest
import torch
from support import fake_gpu
from support.wrapped_models import update, values_of

import sluice
import sluice.torch

pytestmark = fake_gpu.cpu_alone("on a GPU calls are not estimated")
SETTINGS = dict(lr=1e-2, weight_decay=0.0)
SEEN: list = []  # what hooks have been given
LOSSES: list = []


@pytest.fixture(autouse=True)
def lists_of_a_running_program(monkeypatch):
    """The lists above are frozen: the collector of the tests' processes does not look at what is made before they run."""
    monkeypatch.setitem(globals(), "SEEN", [])
    monkeypatch.setitem(globals(), "LOSSES", [])


def layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def train(model, loss_of, steps=3):
    """Trains a model plainly, and wrapped, and returns the losses of both and their values."""
    results = []
    for wrapped in (False, True):
        made = model()
        if wrapped:
            made, optimizer = sluice.torch.wrap(made, sluice.AdamW(**SETTINGS), memory="4GiB")
        else:
            optimizer = torch.optim.AdamW(made.parameters(), **SETTINGS)
        losses = []
        for step in range(steps):
            loss = loss_of(made, step)
            update(optimizer, loss)
            losses.append(loss.item())
        results.append((losses, values_of(made)))
    (plain, values), (own, own_values) = results
    assert plain == pytest.approx(own, rel=1e-5)
    assert values.keys() == own_values.keys()
    for name, value in values.items():
        torch.testing.assert_close(own_values[name], value, rtol=1e-5, atol=1e-6)


def x(step, rows=4):
    return torch.randn(rows + step, 8, generator=torch.Generator().manual_seed(step))


class Collector:
    def __init__(self):
        self.seen, self.last = [], {}

    def hook(self, module, args, output):
        self.seen.append(output)
        self.last["output"] = self.output = output


def by_closure(layer):
    seen = collections.deque()
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    return lambda: list(seen), seen.clear


def by_method(layer):
    collector = Collector()
    layer.register_forward_hook(collector.hook)

    def found():
        assert collector.output is collector.last["output"] is collector.seen[-1]
        return list(collector.seen)

    return found, collector.seen.clear


def by_partial(layer):
    seen = {}

    def note(to, module, args):
        to[len(to)] = args[0] * 2

    layer.register_forward_pre_hook(functools.partial(note, seen))
    return lambda: list(seen.values()), seen.clear


def by_module(layer):
    layer.register_forward_hook(note_for_all)
    return lambda: list(SEEN), SEEN.clear


def note_for_all(module, args, output):
    SEEN.append(output)


def by_variable(layer):
    last = None

    def hook(module, args, output):
        nonlocal last
        assert last is None
        last = output

    def clear():
        nonlocal last
        last = None

    layer.register_forward_hook(hook)
    return lambda: [last], clear


@pytest.mark.parametrize("register", [by_closure, by_method, by_partial, by_module, by_variable])
def test_hooks_keep_what_the_real_calls_gave_alone(register):
    found = {}

    def made():
        model = layers()
        found[model], clear = register(model[1])
        clear()
        model.clear = clear
        return model

    def loss_of(model, step):
        model.clear()
        output = model(x(step))
        seen = found[model]()
        assert [type(each) for each in seen] == [torch.Tensor]
        return output.square().mean() + sum(each.abs().mean() for each in seen)

    train(made, loss_of)


def test_hooks_of_backward_passes_keep_what_the_real_ones_gave_alone():
    model, seen = layers(), []
    model[1].register_full_backward_hook(lambda module, given, output: seen.append(output[0]))
    wrapped, _ = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB")
    wrapped(x(0)).sum().backward()
    assert [type(each) for each in seen] == [torch.Tensor]


class WithLosses(torch.nn.Module):
    """A model whose forward() writes to a list outside of it."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, given):
        hidden = self.layers[0](given)
        LOSSES.append(hidden.square().mean())
        return self.layers[2](hidden)


def test_a_list_outside_of_the_model_has_what_the_real_calls_gave_alone():
    def loss_of(model, step):
        LOSSES.clear()
        output = model(x(step))
        assert len(LOSSES) == 1
        return output.square().mean() + LOSSES[0]

    train(WithLosses, loss_of)


class Recurrent(torch.nn.Module):
    """A model that keeps a result, with its graph, for its next call."""

    def __init__(self):
        super().__init__()
        self.layers, self.state = layers(), None

    def forward(self, given):
        hidden = self.layers[0](given).tanh()
        if self.state is not None:
            hidden = hidden + self.state.mean(0)
        self.state = hidden
        return self.layers[2](hidden)


def test_a_result_that_a_model_keeps_is_no_part_of_the_estimate():
    def loss_of(model, step):
        model.state = None
        return model(x(step)).square().mean() + model(x(step, 7)).square().mean()

    train(Recurrent, loss_of)


class Counting(torch.nn.Module):
    """A model that reads buffers of one element."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = layers(), torch.nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(4, 8))

    def forward(self, given):
        hidden = self.norm(self.layers[0](given).tanh())
        at = int(self.place)
        self.queue[at] = hidden.detach()[0]
        self.place[0] = (at + 1) % len(self.queue)
        return self.layers[2](hidden + self.queue.mean(0))


def handle(items):
    while (item := items.get()) is not None:
        SEEN.append(item)
        items.task_done()


class OfOthers(torch.nn.Module):
    """A model that holds what is not to be entered, or refuses to be written: a queue with a worker, and a dict whose items are made."""

    class Made(collections.OrderedDict):
        def __getitem__(self, key):
            return super().__getitem__(key)()

        def update(self, *args, **kwargs):
            raise TypeError("no")

    def __init__(self):
        super().__init__()
        self.layers, self.made = layers(), self.Made(tanh=torch.nn.Tanh)
        self.state, self.kept = None, self.Made()
        self.queue = queue.Queue()
        threading.Thread(target=handle, args=(self.queue,), daemon=True).start()

    def forward(self, given):
        hidden = self.made["tanh"](self.layers[0](given))
        collections.OrderedDict.__setitem__(self.kept, "hidden", hidden)
        return self.layers[2](hidden)


def test_what_a_model_holds_of_others_stays_as_it_is():
    SEEN.clear()
    wrapped, optimizer = sluice.torch.wrap(OfOthers(), sluice.AdamW(), memory="4GiB")
    for step in range(3):
        wrapped.queue.put(step)
        update(optimizer, wrapped(x(step)).sum())
        wrapped.queue.join()
    wrapped.queue.put(None)
    assert SEEN == [0, 1, 2] and dict.items(wrapped.made) == {"tanh": torch.nn.Tanh}.items()
    assert all(type(p) is torch.nn.Parameter for p in wrapped.parameters())


KEEPING = {
    "lstm": (torch.nn.LSTM, (48, 64), dict(batch_first=True), (8, 32, 48)),
    "deep lstm": (torch.nn.LSTM, (48, 100, 2), dict(bidirectional=True), (32, 8, 48)),
    "lstm of wide input": (torch.nn.LSTM, (1024, 16), dict(bidirectional=True), (16, 8, 1024)),
    "fold": (torch.nn.Fold, ((34, 34), 3), {}, (4, 72, 1024)),
    "gru": (torch.nn.GRU, (48, 64, 2), {}, (32, 8, 48)),
    "rnn": (torch.nn.RNN, (48, 64), {}, (32, 8, 48)),
    "convolution": (torch.nn.Conv2d, (8, 16, 3), {}, (4, 8, 32, 32)),
    "transposed": (torch.nn.ConvTranspose2d, (8, 16, 3), dict(stride=2), (4, 8, 16, 16)),
    "encoder": (torch.nn.TransformerEncoderLayer, (64, 4), dict(batch_first=True), (4, 64, 64)),
    "norm": (torch.nn.BatchNorm2d, (16,), {}, (8, 16, 32, 32)),
}


@pytest.mark.parametrize("layer, given, named, shape", KEEPING.values(), ids=KEEPING)
def test_what_a_layer_keeps_for_backward_is_estimated(layer, given, named, shape):
    """Operators keep for backward what no module has, as the workspace of an LSTM of oneDNN."""
    torch.manual_seed(3)
    model, batch, kept = layer(*given, **named), torch.randn(*shape, requires_grad=True), {}
    own = {p.untyped_storage().data_ptr() for p in (batch, *model.parameters(), *model.buffers())}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(batch)
    for tensor in output if isinstance(output, tuple) else [output]:
        if isinstance(tensor, torch.Tensor):
            note(tensor)
    real = sum(size for place, size in kept.items() if place not in own)
    estimated = sluice.torch.estimate(model, batch.detach(), train=True).kept
    assert 0.95 * real <= estimated <= 1.6 * real


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"])
def test_the_memory_that_a_loss_keeps_is_estimated(name):
    """PyTorch makes memory for each element before it takes the mean, and the mean keeps it."""

    class Loss(torch.nn.Module):
        def forward(self, x):
            return {"loss": getattr(torch.nn.functional, name)(x, x)}

    batch = torch.rand(64, 1024)
    real = Loss()(batch)["loss"].untyped_storage().nbytes()
    assert real == batch.nbytes
    assert sluice.torch.estimate(Loss(), (batch,), train=True).kept >= real


def test_a_model_without_parameters_is_estimated():
    assert sluice.torch.estimate(torch.nn.ReLU(), torch.ones(4, 8), train=True).peak > 0


def test_models_may_read_buffers_of_one_element():
    train(Counting, lambda model, step: model(x(step)).square().mean(), steps=6)


def test_what_keeps_an_estimates_tensors_where_they_are_not_found_is_refused():
    class Kept:
        output = None

    def keep(module, args, output):
        Kept.output = output

    model = layers()
    model[1].register_forward_hook(keep)
    wrapped, _ = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB")
    with pytest.raises(sluice.InvalidArgumentError, match="outside of it, such as a hook, keeps 128 bytes .* state `reserve`"):
        wrapped(x(0))
    Kept.output = None
    sluice.torch.close(wrapped)
    wrapped, optimizer = sluice.torch.wrap(wrapped, sluice.AdamW(), memory="4GiB", reserve="256MiB")
    wrapped(x(0)).sum().backward()
    optimizer.step()
    assert type(Kept.output) is torch.Tensor


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_is_no_call_to_estimate():
    model, _ = sluice.torch.wrap(layers(), sluice.AdamW(), memory="4GiB")
    traced = torch.jit.trace(model, x(0))
    assert torch.equal(traced(x(3)), model(x(3)))
