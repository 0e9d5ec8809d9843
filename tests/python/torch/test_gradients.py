"""p.grad of a wrapped parameter means what it means in PyTorch."""

import gc
import math

import numpy
import pytest
import torch
from support import fake_gpu
from support.chain import Chain, drawn, loss_of
from support.wrapped_models import check_as_plain, readable, units_of_modules, wrap

import sluice.torch


def with_gradients(edit, steps=2, zero=None):
    """A loop in which `edit(model, note)` changes gradients between backward and step."""

    def loop(model, optimizer, note):
        for step in range(steps):
            loss_of(model, step).backward()
            edit(model, note)
            for p in model.parameters():
                note(torch.zeros(()) if p.grad is None else p.grad)
            optimizer.step()
            (zero or (lambda o: o.zero_grad()))(optimizer)

    return loop


def read(model, note):
    gradient = model.first.weight.grad
    copy = gradient.clone()
    assert torch.equal(copy, gradient) and copy.shape == gradient.shape and copy.dtype == gradient.dtype
    assert copy.tolist() == gradient.tolist() and (copy.numpy() == gradient.numpy()).all()
    note(gradient.sum())
    note(gradient * 2 + 1)
    note(gradient[1, ::3])
    note(gradient @ gradient.t())
    note(torch.cat([p.grad.flatten() for p in model.parameters()]))
    note(torch.stack([p.grad.abs().max() for p in model.parameters()]).max())


def write(model, note):
    model.first.weight.grad.clamp_(-1e-3, 1e-3)
    model.first.bias.grad.copy_(torch.arange(24.0).index_fill(0, torch.tensor([3]), math.nan))
    model.first.bias.grad.nan_to_num_(7.0)
    model.middle.weight.grad += 0.1
    model.middle.bias.grad.add_(model.last.bias.grad, alpha=0.5)
    model.last.weight.grad.div_(torch.tensor(3.0))
    model.last.weight.grad.fill_(0.25)
    model.last.bias.grad.copy_(model.last.bias.grad.sign())


def with_parameters(model, note):
    """The gradient that is added lies in a parameter's memory, which may be absent."""
    with torch.no_grad(), readable(model):
        model.first.weight.grad.add_(model.last.weight.detach())
        model.middle.weight.grad += model.middle.weight
        model.last.bias.grad = model.first.bias.detach()
        note(model.last.bias.grad.clone())
        model.last.bias.grad = None  # it is first.bias, which plain PyTorch changes in the middle of the step


def take_away(model, note):
    model.first.weight.grad = None


def give(model, note):
    model.first.weight.grad = torch.full((24, 24), 0.25)
    model.last.weight.grad = model.middle.weight.grad
    model.middle.bias.grad = model.middle.bias.grad * 2


def by_data(model, note):
    model.first.weight.grad.data = torch.full((24, 24), 0.25)
    model.middle.weight.grad.data = model.middle.weight.grad.data * 3.0
    model.last.weight.grad.data.mul_(0.5)


def norms(model, note):
    for order in (1.0, 2.0, 3.0, float("inf")):
        note(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order))
        note(model.first.weight.grad.norm(order))
    note(model.first.weight.grad.norm(dim=1))
    note(torch.linalg.matrix_norm(model.first.weight.grad))


def clip(order, **settings):
    def edit(model, note):
        note(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, order, **settings))

    return edit


def clip_by_value(model, note):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def in_lists(model, note):
    gradients = [p.grad for p in model.parameters()]
    mine = [gradient.clone() for gradient in gradients]
    torch._foreach_mul_(mine, gradients)
    torch._foreach_add_(mine, gradients)
    torch._foreach_mul_(mine, [float(i + 1) for i in range(len(mine))])
    torch._foreach_clamp_max_(mine, [1e-3 * i for i in range(len(mine))])
    torch._foreach_clamp_min_(mine, [gradient / 2 for gradient in gradients])
    torch._foreach_div_(mine, torch.tensor(3.0))
    torch._foreach_mul_(gradients, torch.tensor(0.5))
    torch._foreach_div_([mine[0], *gradients], 4.0)
    torch._foreach_clamp_max_(gradients, 1e-4)
    for each in (*mine, *torch._foreach_mul(gradients, mine)):
        note(each)


def clip_with_gradients_of_the_users_own(model, note):
    model.first.weight.grad = torch.full((24, 24), 0.25)
    clip(2.0)(model, note)


@pytest.mark.parametrize(
    "edit",
    [read, write, with_parameters, take_away, give, by_data, norms, clip_by_value, in_lists, clip_with_gradients_of_the_users_own,
     clip(2.0), clip(1.0), clip(float("inf")), clip(2.0, foreach=False), clip(2.0, foreach=True)],
)  # fmt: skip
def test_gradients_between_backward_and_step(edit):
    check_as_plain(Chain, with_gradients(edit))


@pytest.mark.parametrize(
    "zero", [lambda o: None, lambda o: o.zero_grad(set_to_none=False)], ids=["kept", "set to zero"]
)
def test_gradients_that_stay_after_the_step(zero):
    check_as_plain(Chain, with_gradients(lambda model, note: None, zero=zero))


def test_a_gradient_may_be_written_after_the_step():
    def loop(model, optimizer, note):
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            model.first.weight.grad.mul_(0.5)  # the pending update has the gradient as it was before
            model.middle.weight.grad.fill_(0.25)
            note(model.middle.weight.grad)
            note(model.first.weight.grad)

    check_as_plain(Chain, loop)


def test_other_writes_are_refused():
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    loss_of(model, 0).backward()
    gradient = model.first.weight.grad
    for write in (gradient.sign_, lambda: gradient.masked_fill_(gradient > 0, 0.0), gradient.t_):
        with pytest.raises(sluice.StateError, match=r"gradient of 'first.weight' is written by aten.*copy_\(\) that"):
            write()
    for write, others in [
        (torch._foreach_mul_, [2.0, 3.0]), (torch._foreach_mul_, [gradient, gradient]), (torch._foreach_mul_, [torch.ones(24)] * 2),
        (torch._foreach_div_, [0.5, 0.5]), (torch._foreach_clamp_min_, [0.0, 1.0]), (torch._foreach_clamp_max_, [gradient, gradient]),
    ]:  # fmt: skip
        with pytest.raises(sluice.StateError, match=r"_foreach_(\w+_)\(\) writes .* takes one number.*; call p.grad.\1\(\) of each"):
            write([torch.ones(24, 24), gradient], others)
    row = gradient[0]
    gradient.mul_(2.0)
    row.zero_()
    with pytest.raises(sluice.StateError, match=r"a view of the gradient of 'first.weight' was written, which is a copy.*copy_\(\) that"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()


def test_a_gradient_that_was_given_up_is_an_error():
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    loss_of(model, 0).backward()
    kept, view = model.first.weight.grad, model.first.weight.grad[0]
    values = kept.clone()
    optimizer.zero_grad()
    assert torch.equal(kept, values), "zero_grad() ends the parameter's reference, not this one"
    loss_of(model, 1).backward()
    with pytest.raises(sluice.StateError, match="gradient of 'first.weight' was given up.*clone"):
        kept.sum()
    assert torch.equal(view, values[0])


def test_a_gradient_that_only_the_user_keeps_is_no_part_of_the_step():
    def loop(model, optimizer, note):
        loss_of(model, 0).backward()
        kept = [p.grad for p in model.first.parameters()]
        optimizer.zero_grad()
        model.last(drawn(1)).sum().backward()
        optimizer.step()
        del kept

    check_as_plain(Chain, loop)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_the_collector_may_end_a_gradient_inside_of_a_call():
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    loss_of(model, 0).backward()
    ring = [model.first.weight.grad]
    ring.append(ring)
    model.first.weight.grad = None
    del ring
    sluice.torch.engine_of(model).get_values("first", lambda *_: gc.collect())
    optimizer.step()
    sluice.torch.close(model)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_refused():
    model, optimizer = wrap(Chain(), "disk")
    of_gradient = r"gradient of '\w+\.\w+' has a graph.*create_graph.*autograd.grad"
    said = of_gradient if fake_gpu.asked() is None else r"makes a graph \(create_graph=True\).*wrap the model on the CPU"
    with pytest.raises(sluice.StateError, match=said):
        loss_of(model, 0).backward(create_graph=True)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()


def test_what_would_write_to_memory_that_is_nobodys_is_refused():
    model, optimizer = wrap(Chain(), "disk")
    loss_of(model, 0).backward()
    gradient = model.first.weight.grad
    with pytest.raises(ValueError, match="read-only"):
        gradient.numpy()[0] = 5.0
    alone = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
    for use in (
        gradient.data_ptr, lambda: torch.from_dlpack(gradient), lambda: numpy.from_dlpack(gradient), gradient.share_memory_,
        lambda: torch.distributed.all_reduce(gradient), lambda: torch.distributed.all_gather([torch.ones(24, 24)], gradient),
    ):  # fmt: skip
        with pytest.raises(sluice.StateError, match=r"gradient of 'first.weight'.*address.*clone\(\).*copy_\(\)"):
            use()
    torch.distributed.destroy_process_group()
    for change in (lambda: setattr(gradient, "data", torch.ones(3)), lambda: gradient.set_(torch.ones(3))):
        with pytest.raises(sluice.InvalidArgumentError, match=r"\(24, 24\).*\(3,\).*its shape"):
            change()
    assert torch.equal(torch.from_dlpack(gradient.clone()), gradient)
    optimizer.step()


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [float("inf"), float("nan")]])
def test_norms_of_what_is_not_finite_are_those_of_pytorch(values, order):
    def run(model):
        loss_of(model, 0).backward()
        changed = model.first.weight.grad.clone()
        changed.view(-1)[: len(values)] = torch.tensor(values)
        model.first.weight.grad.copy_(changed)
        each = [torch.linalg.vector_norm(p.grad, order) for p in model.parameters()]
        return [*each, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, order)]

    torch.manual_seed(0)
    plain = run(Chain())
    torch.manual_seed(0)
    model, optimizer = wrap(Chain(), "memory")
    found = run(model)
    assert [norm.isnan().item() for norm in found] == [norm.isnan().item() for norm in plain]
    assert [norm.isinf().item() for norm in found] == [norm.isinf().item() for norm in plain]
    with pytest.raises(sluice.NotFiniteError, match="'first.weight'"):
        optimizer.step()
