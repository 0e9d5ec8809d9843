"""Edits of parameters between steps change the model's values and the optimizer's masters."""

import pytest
import torch
import torch.multiprocessing
from support import fake_gpu
from support.chain import Chain, loss_of, plain_loop
from support.wrapped_models import check_as_plain, readable, same_values, units_of_modules, values_of, wrap

import sluice.torch

REFUSED = fake_gpu.cpu_alone("what uses a parameter on a GPU between steps, and not within full_parameters(), is a StateError")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(99)) * 0.1


@torch.no_grad()
def copy(model):
    model.first.weight.copy_(drawn(24, 24))


@torch.no_grad()
def in_place(model):
    model.first.weight.mul_(0.5)
    model.last.bias.add_(model.middle.bias)
    model.middle.weight[3].fill_(0.25)


def by_data(model):
    model.first.weight.data.copy_(drawn(24, 24))
    model.middle.bias.data[2:5] = 0.5
    model.last.weight.data.mul_(1.5)


def by_init(model):
    torch.manual_seed(5)
    torch.nn.init.xavier_uniform_(model.middle.weight)
    torch.nn.init.zeros_(model.last.bias)
    torch.nn.init.trunc_normal_(model.first.weight)


def by_state_dict(model):
    torch.manual_seed(6)
    model.load_state_dict(Chain().to(model.first.weight.dtype).state_dict())


@torch.no_grad()
def element_by_element(model):
    for i in range(24):
        model.first.weight[i, i] = 0.125 * i
        model.last.bias[i] -= 0.01


EDITS = [copy, in_place, by_data, by_init, by_state_dict, element_by_element]


def test_edits_between_steps():
    def loop(model, optimizer, note):
        for edit in EDITS:
            plain_loop(model, optimizer, note, steps=1)
            with readable(model):
                edit(model)
            for value in values_of(model).values():
                note(value)

    check_as_plain(Chain, loop)


@pytest.mark.parametrize("dtype, place", [(torch.float32, "memory"), (torch.bfloat16, "disk")])
def test_the_masters_are_edited_too(dtype, place):
    """A step with a rate of 0 writes the masters over the parameters, and changes nothing else."""
    model, optimizer = wrap(Chain().to(dtype), place, units=units_of_modules(Chain()), held_units=2)
    engine = sluice.torch.engine_of(model)

    def step(lr):
        model(torch.randn(6, 24).to(dtype)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

    for edit in EDITS:
        step(lr=1e-3)
        before = values_of(model)
        with sluice.torch.full_parameters(model):
            edit(model)
        edited = values_of(model)
        assert any(not torch.equal(before[name], edited[name]) for name in edited)
        step(lr=0.0)
        assert same_values(values_of(model), edited), edit.__name__
        for unit in engine.units:
            for name, values in engine.get_values(unit.name).items():
                master = torch.frombuffer(values.cast("B"), dtype=torch.float32).view(values.shape)
                changed = before[name] != edited[name]
                assert torch.equal(master.to(dtype), edited[name])
                assert torch.equal(master[changed], edited[name].float()[changed]), f"{edit.__name__}: a master of {name} was not edited"
    sluice.torch.close(model)


def test_an_edit_between_forward_and_backward_or_before_the_first_step():
    def loop(model, optimizer, note):
        with readable(model):
            copy(model)
        plain_loop(model, optimizer, note, steps=1)
        loss_of(model, 3).backward()
        with readable(model):
            in_place(model)  # comes after backward, so that the step changes the edited values
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            note(loss_of(model, 4))
        with readable(model):
            copy(model)
            in_place(model)
        plain_loop(model, optimizer, note, steps=1)

    check_as_plain(Chain, loop)


@pytest.mark.parametrize(
    "replace",
    [
        lambda p: setattr(p, "data", torch.zeros(24, 24)),
        pytest.param(torch.no_grad()(lambda p: p.set_(torch.zeros(24, 24))), marks=REFUSED),
        lambda p: torch.nn.utils.vector_to_parameters(torch.zeros(24 * 24), [p]),
    ],
    ids=[".data =", "set_", "vector_to_parameters"],
)
@pytest.mark.parametrize("then", ["forward", "step"])
def test_a_parameter_that_is_given_other_memory(replace, then):
    model, optimizer = wrap(Chain(), "disk")
    loss_of(model, 0).backward()
    said = r"was given other memory.*copy_\(\)" if fake_gpu.asked() is None else "is used by an assignment to .data"
    with pytest.raises(sluice.StateError, match=f"'middle.weight' {said}"):
        replace(model.middle.weight)
        loss_of(model, 1) if then == "forward" else optimizer.step()


def send(p):
    torch.multiprocessing.get_context("spawn").SimpleQueue().put({"weight": p.detach()})


@fake_gpu.cpu_alone("CUDA's memory is shared between processes where it is, and only the CPU's moves")
@pytest.mark.parametrize("share, then", [
    (lambda p: p.share_memory_(), "forward"), (lambda p: p.share_memory_(), "backward"), (send, "step"),
], ids=["forward", "backward", "step"])  # fmt: skip
def test_a_parameter_that_is_moved_into_shared_memory(share, then):
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    plain_loop(model, optimizer, lambda value: None, steps=1)
    loss = loss_of(model, 0)
    if then == "step":
        loss.backward()
    before = values_of(model)
    share(model.middle.weight)
    with pytest.raises(sluice.StateError, match=r"'middle.weight' was given .*share.*close\(\) .*wrap it again"):
        loss_of(model, 1) if then == "forward" else loss.backward() if then == "backward" else optimizer.step()
    sluice.torch.close(model)
    assert same_values(before, values_of(model))
    optimizer = wrap(model, "disk")[1]
    plain_loop(model, optimizer, lambda value: None, steps=1)
    assert not torch.equal(before["middle.weight"], model.middle.weight)
