"""Models and loops do with autograd on a wrapped model what they do on a plain one, wherever its parameters live."""

import pytest
import torch
from support import fake_gpu
from support.chain import WIDTH, Chain, drawn, loss_of, plain_loop
from support.wrapped_models import check_as_plain, outcome, same, units_of_modules, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice.torch


# ---- what models do ----


class Tied(Chain):
    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight


class Alternating(Chain):
    """A model of which one layer gets no gradient in every other step."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.first(x))
        return self.last(self.middle(x) if self.calls % 2 else x)


class Outside(Chain):
    """A model that uses weights in other modules' forward passes."""

    def forward(self, x):
        hidden = torch.tanh(x @ self.last.weight + self.middle.bias)
        return super().forward(hidden) + nn.functional.linear(hidden, self.first.weight)


class OwnParameter(Chain):
    """A model with a parameter beside its modules, used after these were called."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


class Normed(Chain):
    """A model with buffers, and activations in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias before a norm would have gradients of noise
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = nn.functional.relu_(self.norm(self.first(x)))
        return self.last(self.middle(x).mul_(2.0).tanh_())


class Branching(Chain):
    """A model with torch.cond(), whose branches use parameters of modules that nobody calls. PyTorch compiles it by itself."""

    def forward(self, x):
        x, one, other = self.first(x), self.middle, self.last
        return torch.cond(x.sum() > 0, lambda x: nn.functional.linear(x, one.weight), lambda x: nn.functional.linear(x, other.weight), (x,))


class Checkpointed(Chain):
    reentrant = True

    def forward(self, x):
        for layer in (self.first, self.middle, self.last):
            x = checkpoint(layer, x if x.requires_grad else x.requires_grad_(), use_reentrant=self.reentrant)
            x = torch.tanh(x)
        return x


class CheckpointedAgain(Checkpointed):
    reentrant = False


OF_OTHERS = fake_gpu.cpu_alone("parameters are on a GPU in calls of their own module alone")


@pytest.mark.parametrize("make", [
    Chain, Tied, Alternating, pytest.param(Outside, marks=OF_OTHERS), pytest.param(Branching, marks=OF_OTHERS), OwnParameter, Normed,
    Checkpointed, CheckpointedAgain,
])  # fmt: skip
def test_models(make):
    check_as_plain(make, plain_loop)


@OF_OTHERS
def test_an_operator_with_bodies_under_autocast():
    def loop(model, optimizer, note):
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, step)
            loss.backward()
            note(loss)
            optimizer.step()
            optimizer.zero_grad()

    check_as_plain(Branching, loop)


def test_sparse_gradients_count_as_dense_ones():
    def make(sparse):
        return lambda: nn.Sequential(nn.Embedding(50, WIDTH, sparse=sparse), nn.Linear(WIDTH, WIDTH))

    def loop(model, optimizer, note):
        for step in range(4):
            for part in range(2):
                ids = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(2 * step + part))
                model(ids).square().mean().backward()
            note(model[0].weight.grad)
            optimizer.step()
            optimizer.zero_grad()

    dense = outcome("memory", make(False), loop)
    assert same(dense, outcome("memory", make(True), loop)) and same(dense, outcome("disk", make(True), loop))


def test_frozen_parameters_stay_and_unfreezing_is_refused():
    def make():
        model = Chain()
        model.first.requires_grad_(False)
        model.last.weight.requires_grad_(False)
        return model

    check_as_plain(make, plain_loop)
    model = make()
    optimizer = wrap(model, "disk")[1]
    model.first.weight.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(sluice.StateError, match=r"'first.weight' was frozen when .*close.*wrap.*frozen after that"):
        optimizer.step()
    model.first.requires_grad_(False)
    model.first.weight.grad = None
    optimizer.step()


def test_layers_that_are_frozen_after_the_wrap_are_unfrozen_at_any_step():
    """As recipes unfreeze a model layer by layer: a layer has no state before its first gradient."""

    def loop(model, optimizer, note):
        model.requires_grad_(False)
        for layer in (model.last, model.middle, model.first):
            layer.requires_grad_(True)
            plain_loop(model, optimizer, note, steps=2)
            note(torch.tensor(len(optimizer.state_dict()["state"])))

    check_as_plain(Chain, loop)


def test_freezing_in_mid_run():
    def loop(model, optimizer, note):
        plain_loop(model, optimizer, note, steps=2)
        model.middle.requires_grad_(False)
        plain_loop(model, optimizer, note, steps=2)
        model.middle.requires_grad_(True)
        plain_loop(model, optimizer, note, steps=2)

    check_as_plain(Chain, loop)


# ---- what loops do ----


def test_several_losses_over_one_graph():
    def loop(model, optimizer, note):
        for step in range(3):
            output = model(drawn(step))
            output.square().mean().backward(retain_graph=True)
            output.abs().mean().backward(retain_graph=True)
            output.sum().backward()
            note(model.first.weight.grad)
            optimizer.step()
            optimizer.zero_grad()

    check_as_plain(Chain, loop)


def test_autograd_grad():
    def loop(model, optimizer, note):
        for step in range(2):
            for gradient in torch.autograd.grad(loss_of(model, step), list(model.parameters())):
                note(gradient)
            assert model.first.weight.grad is None
            plain_loop(model, optimizer, note, steps=1)

    check_as_plain(Chain, loop)


def test_hooks_of_the_users_own():
    def loop(model, optimizer, note):
        model.first.weight.register_hook(lambda gradient: gradient * 2)
        model.last.weight.register_post_accumulate_grad_hook(lambda p: note(p.grad))
        model.middle.register_forward_hook(lambda module, given, output: output * 1.5)
        model.middle.register_full_backward_hook(lambda module, inner, outer: note(outer[0]))
        model.middle.register_forward_pre_hook(lambda module, given: note(module.weight))
        plain_loop(model, optimizer, note)

    check_as_plain(Chain, loop)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle(where):
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in backward")

    class Failing(Chain):
        fails = False

        def forward(self, x):
            x = torch.tanh(self.middle(self.first(x)))
            if self.fails and where == "forward":
                raise ArithmeticError("in forward")
            return self.last(Stops.apply(x) if self.fails else x)

    def loop(model, optimizer, note, fails=True):
        for step in range(4):
            if fails and step in (0, 2):
                model.fails = True
                with pytest.raises(ArithmeticError):
                    loss_of(model, 77).backward()
                model.fails = False
                optimizer.zero_grad()
            plain_loop(model, optimizer, note, steps=1)

    check_as_plain(Failing, loop)
    for place in ("memory", "disk"):
        smooth = outcome(place, Failing, lambda *given: loop(*given, fails=False))
        assert same(outcome(place, Failing, loop), smooth)


WRITTEN = pytest.param("copy_", marks=fake_gpu.cpu_alone("a write outside of full_parameters() is a StateError on a GPU"))
READ = pytest.param("outside of forward", marks=fake_gpu.cpu_alone("a use of parameters there is a StateError on a GPU"))


@pytest.mark.parametrize("change", ["step", "edit", "data", WRITTEN, READ])
def test_a_graph_whose_parameters_have_changed(change):
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    loss_of(model, 0).backward()
    loss = loss_of(model, 1)
    if change == "outside of forward":
        loss = model.middle.weight.square().sum()
    if change == "copy_":
        with torch.no_grad():
            model.middle.weight.copy_(torch.ones(WIDTH, WIDTH))
    elif change == "data":  # inside of full_parameters() changes that no counter counts are noticed, too
        with sluice.torch.full_parameters(model):
            model.middle.weight.data.mul_(2.0)
    elif change == "edit":
        with sluice.torch.full_parameters(model), torch.no_grad():
            model.middle.weight.mul_(2.0)
    else:
        optimizer.step()
    expected = "modified by an inplace operation" if change == "outside of forward" else r"'\w+\.weight' was changed"
    with pytest.raises(RuntimeError, match=expected):
        loss.backward()
