"""The contract of a model that is wrapped on a GPU, as users meet it: what a unit is, several models and several calls in one loss, and
full_parameters(). The GPU is the fake one of the tests; the bits are those of the CPU."""

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, check_twin
from support.wrapped_models import same, units_of_modules, update, wrap

import sluice
import sluice.torch
from sluice.torch import _units

WIDTH = 16


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- units ----


class Experts(torch.nn.Module):
    """Computes each row by the expert that its router chooses."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, 4)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen, made = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                made = made.index_put((rows,), expert(x[rows]) * weights[rows][:, number : number + 1])
        return x + made


def of_experts():
    return torch.nn.Sequential(*[Experts() for _ in range(3)])


def test_units_have_parameters_of_one_block_alone(monkeypatch):
    """Blocks are cut here, and an expert's last part would fit into a unit with the next block's first one."""
    monkeypatch.setattr(_units, "_LARGEST", 5000)
    monkeypatch.setattr(_units, "_SMALLEST", 1200)
    model = of_experts()
    groups = _units.find_units(model, by_calls=True)
    assert [group.name for group in groups] == [f"{i}.{part}" for i in range(3) for part in ("router", *(f"experts.{n}" for n in range(4)))]
    check_twin(of_experts, lambda model, step: model(drawn(step, 6, WIDTH)).square().mean(), ["memory"], units=None, held_units=1, steps=3)


class UsesAnothers(torch.nn.Module):
    """Uses a weight of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.first(x) @ self.last.weight


def test_what_a_module_uses_of_another_one_is_named_in_one_unit_with_it():
    def loss(model, step):
        return model(drawn(step, 5, WIDTH)).square().mean()

    with fake_gpu.shared():
        model, _ = wrap(UsesAnothers(), "memory", units=units_of_modules(UsesAnothers()), **GPU)
        with pytest.raises(sluice.StateError, match=r"'last.weight' is used by .* calls of 'last' \(Linear\).*name both in one unit"):
            loss(model, 0)
        sluice.torch.close(model)
    check_twin(UsesAnothers, loss, places=["memory"], units={"both": ["first", "last"]}, held_units=1, steps=3)


# ---- several models, and several calls ----


def layers(inputs, outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, outputs)
    )


def trained_against_each_other(freezes, gpu=None):
    """A generator and a discriminator, which two losses call twice."""
    torch.manual_seed(5)
    wrapped = []
    for model in (layers(4, 8), layers(8, 1)):
        wrapped.append(wrap(model, "memory", units=units_of_modules(model), held_units=1, **(gpu or {})))
    (generator, of_generator), (judge, of_judge) = wrapped
    seen = []
    for step in range(3):
        made = generator(drawn(step, 5, 4))
        loss = torch.nn.functional.softplus(-judge(drawn(step, 5, 8))).mean() + torch.nn.functional.softplus(judge(made.detach())).mean()
        loss.backward()
        of_judge.step()
        of_judge.zero_grad()
        judge.requires_grad_(not freezes)
        fooled = torch.nn.functional.softplus(-judge(made)).mean()
        fooled.backward()
        judge.requires_grad_(True)
        of_generator.step()
        for optimizer in (of_generator, of_judge):
            optimizer.zero_grad()
        seen += [loss.detach().clone(), fooled.detach().clone()]
    for model in (generator, judge):
        sluice.torch.close(model)
    return seen + [p.detach().clone() for model in (generator, judge) for p in model.parameters()]


@pytest.mark.parametrize("freezes", [False, True])
def test_two_models_train_against_each_other(freezes):
    expected = trained_against_each_other(freezes)
    with fake_gpu.shared(schedule="late"):
        assert same(trained_against_each_other(freezes, GPU), expected)


# ---- full_parameters() ----


def test_what_is_not_written_keeps_its_masters():
    """A master has bits that its bfloat16 parameter does not show; they would be lost if all were written back."""

    def stepped(edits):
        model, optimizer = wrap(layers(4, 8).bfloat16(), "memory", units=None, **GPU)
        for step in range(2):
            update(optimizer, model(drawn(step, 5, 4).bfloat16()).square().mean())
        if edits:
            with torch.no_grad(), sluice.torch.full_parameters(model):
                model[4].bias.copy_(torch.full((8,), -0.0))
        state = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items() if isinstance(value, torch.Tensor)}
        with sluice.torch.full_parameters(model[4], writeback=False):
            bias = model[4].bias.detach().clone()
        sluice.torch.close(model, values=False)
        return state, bias

    with fake_gpu.shared():
        torch.manual_seed(5)
        before, _ = stepped(edits=False)
        torch.manual_seed(5)
        after, bias = stepped(edits=True)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        assert torch.equal(bias.view(torch.int16), torch.full((8,), -0.0, dtype=torch.bfloat16).view(torch.int16))


def test_what_full_parameters_cannot_take_back_is_an_error_that_keeps_the_values():
    with fake_gpu.shared():
        model, _ = wrap(layers(4, 8), "memory", units=None, **GPU)
        x = drawn(0, 5, 4)
        with torch.no_grad():
            before = model(x)
            with pytest.raises(sluice.StateError, match=r"'0.bias' was given torch.float32 of shape \(3,\) within full_parameters"):
                with sluice.torch.full_parameters(model[0]):
                    model[0].bias.data = torch.ones(3)
            assert torch.equal(model(x), before)
            with sluice.torch.full_parameters(model):
                model[0].bias.data = torch.ones(WIDTH)
                with pytest.raises(sluice.StateError, match="is called within .*full_parameters"):
                    model(x)
            assert not torch.equal(model(x), before)
        for module in (model[0], model):  # the model has no unit of its own
            hook = module.register_forward_hook(lambda *_: sluice.torch.full_parameters(model).__enter__())
            with pytest.raises(sluice.StateError, match=r"full_parameters\(\) is called within a call of the model"):
                model(x)
            hook.remove()
        sluice.torch.close(model)
        assert torch.equal(model[0].bias, torch.ones(WIDTH))


# ---- the end ----


def test_modules_that_were_compiled_in_place_go_on_after_the_end():
    with fake_gpu.shared():
        model = layers(4, 8)
        for layer in model:
            layer.compile(backend="eager")
        expected = model(drawn(0, 5, 4))
        model, _ = wrap(model, "memory", units=units_of_modules(model), **GPU)
        assert torch.equal(model(drawn(0, 5, 4)), expected)
        sluice.torch.close(model)
        assert torch.equal(model(drawn(0, 5, 4)), expected)
