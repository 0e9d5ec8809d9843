"""What autograd keeps of a model that is wrapped on a GPU, where other hooks of saved tensors than the model's are in force, or none:
its units have gone when backward needs them. The GPU is the fake one of the tests; the reference is the same model on the CPU."""

import contextlib
import functools
import gc

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, check_twin, least
from support.wrapped_models import same, units_of_modules, wrap
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import sluice
import sluice.torch

WIDTH = 32


def drawn(step):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


class Stack(torch.nn.Module):
    """More layers than may be held. way(x, layer) applies one of them, and around(part, x) a part of the model."""

    def __init__(self, way=lambda x, layer: layer(x), around=lambda part, x: part(x), parts=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.way, self.around, self.parts = way, around, parts

    def forward(self, x):
        each = len(self.layers) // self.parts
        for first in range(0, len(self.layers), each):

            def part(x, first=first):
                for layer in self.layers[first : first + each]:
                    x = torch.tanh(self.way(x, layer))
                return x

            x = self.around(part, x)
        return x


def loss_of(model, step):
    return model(drawn(step).requires_grad_()).square().mean()


@functools.cache
def least_memory(held_units):
    """The least device_memory for such a model: its units share the room of those that are held."""

    def plan_with(device_memory):
        given = {"units": units_of_modules(Stack()), "held_units": held_units, "place": "memory", "memory": "6GiB"}
        sluice.torch.plan(Stack(), sluice.AdamW(lr=1e-3), device_facts=fake_gpu.FACTS, **given, **GPU | {"device_memory": device_memory})

    with fake_gpu.shared():
        return least(plan_with, 1024) << 20


def check_on_gpu(make, loss=loss_of, held_units=3, **options):
    given = {"device_memory": least_memory(held_units), "device_facts": fake_gpu.FACTS}
    check_twin(make, loss, places=["memory", "memory"], steps=2, held_units=held_units, on_gpu_only=given, **options)


# ---- a backward pass that makes a graph ----


def gradient_penalty(model, step):
    x = drawn(step).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def products_with_the_hessian(model, step):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, step), parameters, create_graph=True)
    products = torch.autograd.grad(sum((g * g.detach()).sum() for g in gradients), parameters)
    return loss_of(model, step) + sum(p.square().sum() for p in products)


def hessian(model, step):
    found = torch.autograd.functional.hessian(lambda x: model(x).square().sum(), drawn(step)[:1])
    return loss_of(model, step) + found.square().sum()


def computed_again(part, x):
    return checkpoint(part, x, use_reentrant=False)


@pytest.mark.parametrize("loss", [gradient_penalty, products_with_the_hessian, hessian])
def test_a_graph_of_a_backward_pass(loss):
    check_on_gpu(Stack, loss)


@pytest.mark.parametrize("around", [computed_again, lambda part, x: kept_by_users_hooks(part, x)], ids=["checkpoint", "hooks"])
def test_a_graph_of_a_backward_pass_through_other_hooks(around):
    check_on_gpu(lambda: Stack(lambda x, layer: linear(x, layer.weight) + layer(x), around), gradient_penalty)


def test_a_backward_pass_leaves_no_hooks_behind():
    """Neither in this thread nor for the pass that fails, nor for what PyTorch calls when all has been computed."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(innermost())
            raise ValueError("not now")

    seen = []
    with fake_gpu.shared():
        model, _ = wrap(Stack(), "memory", units=units_of_modules(Stack()), **GPU)
        for fails in (False, True):
            x = drawn(0).requires_grad_()
            x.register_hook(lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(innermost())))
            output = model(Fails.apply(x) if fails else x).sum()
            with pytest.raises(ValueError) if fails else contextlib.nullcontext():
                torch.autograd.grad(output, x, create_graph=True)
            assert innermost() is None
        assert seen == [None, None]
        sluice.torch.close(model, values=False)
        del output
        gc.collect()


def innermost():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_a_backward_pass_that_makes_a_graph_without_hooks_is_refused():
    with fake_gpu.shared():
        model, _ = wrap(Stack(), "memory", units=units_of_modules(Stack()), **GPU)
        x = drawn(0).requires_grad_()
        output = model(x).sum()
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            (expected,) = torch.autograd.grad(output, x, retain_graph=True)
            with pytest.raises(sluice.StateError, match=r"makes a graph \(create_graph=True\) where autograd keeps .*\(no hooks here\)"):
                torch.autograd.grad(output, x, create_graph=True)
        assert torch.equal(torch.autograd.grad(output, x)[0], expected)
        sluice.torch.close(model, values=False)
        del output
        gc.collect()


# ---- hooks of others within a call ----


def computed_again_within(part, x):
    return checkpoint(part, x, use_reentrant=True)


def kept_by_users_hooks(part, x):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return part(x)


def kept_on_the_cpu(part, x):
    with save_on_cpu():
        return part(x)


def kept_twice(part, x):
    return kept_by_users_hooks(lambda x: computed_again(part, x), x)


WAYS = {
    "functions": lambda x, layer: linear(x, layer.weight, layer.bias),
    "left": lambda x, layer: (layer.weight @ x.t()).t() + layer.bias,
    "bias": lambda x, layer: x * layer.bias,
    "both": lambda x, layer: layer(x) + x @ layer.weight.t(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("around", [computed_again, computed_again_within, kept_by_users_hooks, kept_on_the_cpu, kept_twice])
def test_parameters_that_no_module_of_theirs_uses(around, way):
    check_on_gpu(lambda: Stack(way, around))


def test_parameters_in_a_checkpoint_under_autocast():
    def loss(model, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, step)

    for around in (computed_again, computed_again_within, kept_by_users_hooks):
        check_on_gpu(lambda around=around: Stack(WAYS["both"], around), loss)


def test_what_a_node_has_asked_for_stays_while_a_checkpoint_computes_again():
    """The last operation asks for its weight first, and then for what the checkpoint computes with all layers."""

    class Ends(Stack):
        def forward(self, x):
            return computed_again(super().forward, x) @ self.layers[5].weight

    check_on_gpu(lambda: Ends(WAYS["functions"]))


def test_saved_tensors_may_be_looked_at_between_passes():
    with fake_gpu.shared():
        model, _ = wrap(Stack(WAYS["functions"], computed_again), "memory", units=units_of_modules(Stack()), **GPU)
        loss = loss_of(model, 0)
        loss.grad_fn.next_functions[0][0]._saved_self.sum()  # PyTorch computes the second checkpoint again for it
        loss.backward()
        assert innermost() is None
        sluice.torch.close(model, values=False)
        del loss
        gc.collect()


def test_hooks_of_others_are_as_ever_outside_of_calls():
    def pack(tensor):
        return tensor

    with fake_gpu.shared():
        model, _ = wrap(Stack(), "memory", units=units_of_modules(Stack()), **GPU)
        with saved_tensors_hooks(pack, pack):
            assert innermost() == (pack, pack)
            loss_of(model, 0).backward()
            assert innermost() == (pack, pack)
        assert innermost() is None
        sluice.torch.close(model, values=False)
        gc.collect()


def test_hooks_that_end_within_a_node_see_nothing_of_it_afterwards():
    """The model's for the node come into force above them, when it asks for what it keeps."""
    ends = []

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):
            is_on = True

            def pack(tensor):
                assert is_on
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                x, weight = ctx.saved_tensors
            is_on = False
            with torch.enable_grad():
                inner = gradient.detach().requires_grad_()
                inner.square().sum().backward()
            ends.append(innermost())
            return gradient @ weight.t() + 0 * inner.grad, x.t() @ gradient

    check_on_gpu(lambda: Stack(way=lambda x, layer: Scaled.apply(x, layer.weight)))
    assert ends


# ---- several units in one node ----


class Fused(torch.autograd.Function):
    """Layers in one node, which keeps all of their weights."""

    @staticmethod
    def forward(ctx, x, *weights):
        made = [x]
        for weight in weights:
            made.append(torch.tanh(made[-1] @ weight.t()))
        ctx.save_for_backward(*made, *weights)
        return made[-1]

    @staticmethod
    def backward(ctx, gradient):
        count = len(ctx.saved_tensors) // 2
        made, weights = ctx.saved_tensors[: count + 1], ctx.saved_tensors[count + 1 :]
        gradients = []
        for i in reversed(range(count)):
            gradient = gradient * (1 - made[i + 1].square())
            gradients.append(gradient.t() @ made[i])
            gradient = gradient @ weights[i]
        return gradient, *reversed(gradients)


class OfFused(Stack):
    def __init__(self, together):
        super().__init__()
        self.together = together

    def forward(self, x):
        for first in range(0, len(self.layers), self.together):
            x = Fused.apply(x, *(layer.weight for layer in self.layers[first : first + self.together]))
        return x


def test_a_node_may_keep_as_many_units_as_may_be_held():
    check_on_gpu(lambda: OfFused(4), held_units=4)


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: disable_saved_tensors_hooks("not here")])
def test_a_node_that_keeps_more_units_than_may_be_held_is_refused(around):
    with fake_gpu.shared():
        model, _ = wrap(OfFused(6), "memory", units=units_of_modules(Stack()), held_units=4, **GPU)
        loss = loss_of(model, 0)
        refused = pytest.raises(sluice.StateError, match=r"FusedBackward needs 6 units at once \('layers.6'.*held_units=6, or use fewer")
        with refused, around():
            loss.backward()
        sluice.torch.close(model, values=False)
        del loss
        gc.collect()


# ---- Ctrl-C ----


@pytest.mark.parametrize("by_itself", [False, True])
def test_an_interrupted_checkpoint_leaves_nothing_behind(by_itself):
    """torch.utils.checkpoint ends its hooks before the call ends that they are in, and PyTorch does not tell the end of the layer."""

    def stop(*_):
        raise KeyboardInterrupt

    def part(x):
        return computed_again(model.layers[5], computed_again(model.layers[4], x))

    def gradients():
        loss = part(drawn(0).requires_grad_()).sum() if by_itself else loss_of(model, 0)
        loss.backward()
        found = [p.grad + 0 for p in model.layers[4].parameters()]
        optimizer.zero_grad()
        return found

    with fake_gpu.shared():
        model, optimizer = wrap(Stack(around=computed_again, parts=12), "memory", units=units_of_modules(Stack()), **GPU)
        expected = gradients()
        for _ in range(2):
            handle = model.layers[4].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                gradients()
            handle.remove()
            assert innermost() is None
            assert same(gradients(), expected)
        sluice.torch.close(model, values=False)
        del optimizer
        gc.collect()
