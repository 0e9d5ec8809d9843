"""Models that are wrapped on a GPU: the fake one of the tests, whose memory the CPU shares, so that PyTorch's CPU is the GPU. The
reference is the same model, wrapped on the CPU; nothing may differ by a bit."""

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, check_twin, least, loss_of, trained
from support.wrapped_models import language_loss, on_meta, same, small_gpt2, units_of_modules, wrap

import sluice
import sluice.torch


HERE = {"places": ["memory"]}
TWINS = {
    "any place": (Layers, {}),
    "micro-batches and a norm": (Layers, HERE | {"accumulate": 2, "clip": 0.05}),
    "blocks computed again": (lambda: Layers(recompute=True), {"places": ["disk"], "steps": 2}),
    "updates by the CPU": (Layers, HERE | {"on_gpu_only": {"updates": "cpu"}}),
    "updates by the GPU": (Layers, HERE | {"on_gpu_only": {"updates": "gpu"}}),
    "updates in backward by the CPU": (Layers, HERE | {"update_in_backward": True, "on_gpu_only": {"updates": "cpu"}}),
    "updates in backward by the GPU": (Layers, HERE | {"update_in_backward": True, "on_gpu_only": {"updates": "gpu"}}),
    "masters": (lambda: Layers().bfloat16(), HERE | {"state": "bf16"}),
    "Adafactor": (Layers, HERE | {"optimizer": sluice.Adafactor(lr=1e-3), "steps": 2}),
}


@pytest.mark.parametrize("make, options", TWINS.values(), ids=TWINS)
def test_a_gpu_gives_the_bits_of_the_cpu(make, options):
    check_twin(make, loss_of, **options)


def test_a_gradient_that_is_not_finite_is_found_at_the_step():
    """The GPU leaves out the updates of backward, and nobody waits to learn of it before optimizer.step()."""
    with fake_gpu.shared(schedule="late"):
        model, optimizer = wrap(Layers(), "memory", update_in_backward=True, updates="gpu", **GPU)
        with sluice.torch.full_parameters(model):
            before = [p.detach().clone() for p in model.parameters()]
        (loss_of(model, 0) * float("nan")).backward()
        with pytest.raises(sluice.NotFiniteError, match="is not finite; its unit was not updated"):
            optimizer.step()
        with sluice.torch.full_parameters(model):
            assert same([p.detach().clone() for p in model.parameters()], before)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        sluice.torch.close(model)


def test_it_does_with_budgets_for_a_part_on_each_tier(tmp_path):
    def make():
        return Layers(blocks=6, width=256)

    def plan(device_memory=4 << 30, memory=6 << 30):
        given = {"units": units_of_modules(make()), "held_units": 3, "disk": tmp_path, "reserve": "64MiB", "device_facts": fake_gpu.FACTS}
        return sluice.torch.plan(make(), sluice.AdamW(lr=1e-3), device_memory=device_memory, memory=memory, **given)

    expected = trained(make, loss_of, "memory", steps=2)
    with fake_gpu.shared():
        most = sum(plan()["bytes"]["device"].values()) >> 20
        on_gpu = (least(plan, most) + most) // 2 << 20
        peak = plan(on_gpu)["predicted_peak"] >> 20
        on_host = (least(lambda memory: plan(on_gpu, memory), peak) + peak) // 2 << 20
        units = plan(on_gpu, on_host)["units"]
        assert {unit[part] for unit in units for part in ("parameters", "gradient", "state")} == {"device", "memory", "disk"}
        gpu = GPU | {"device_memory": on_gpu, "memory": on_host, "disk": tmp_path}
        assert same(trained(make, loss_of, None, gpu, steps=2), expected)


def test_gpt2_of_transformers_has_them_with_muon_and_its_state_on_disk():
    """Muon reads chunks of state several times, and the CPU computes with them on a thread of its own."""
    check_twin(small_gpt2, language_loss, places=["disk"], optimizer=sluice.Muon(lr=1e-2), steps=2)


def test_what_lies_outside_of_units_belongs_to_the_model():
    """The scale is used after the last block."""
    names = [name for name, _ in Layers().named_parameters()]
    units = {"scale": ["scale"]} | {name: [name] for name in names if name != "scale"}
    check_twin(Layers, loss_of, places=["memory"], units=units, held_units=4, steps=3)


class UsesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale  # and not save_for_backward()
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, gradient.sum(0)


def test_units_are_there_in_the_backward_of_their_modules_too():
    class Kept(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.scale = torch.nn.Parameter(torch.linspace(1, 2, 8))

        def forward(self, x):
            return self.last(UsesInBackward.apply(self.first(x), self.scale))

    def loss(model, step):
        return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()

    units = {name: [name] for name, _ in Kept().named_parameters()}
    check_twin(Kept, loss, places=["memory"], units=units, held_units=3, steps=3)


def test_full_parameters_are_read_and_written():
    with fake_gpu.shared():
        torch.manual_seed(5)
        plain, model = Layers(), Layers()
        model.load_state_dict(plain.state_dict())
        model, _ = wrap(model, "disk", units=units_of_modules(model), **GPU)
        with sluice.torch.full_parameters(model):
            assert same([p.clone() for p in model.parameters()], list(plain.parameters()))
            model.scale.detach().mul_(2)
            state = {name: value.clone() for name, value in model.state_dict().items()}
        plain.scale.data.mul_(2)
        assert same(list(state.values()), list(plain.state_dict().values()))
        with torch.no_grad():
            assert torch.equal(loss_of(model, 0), loss_of(plain, 0))
        sluice.torch.close(model)
        assert same(list(model.parameters()), list(plain.parameters()))


class Own(torch.nn.Parameter):
    pass


def with_parameters_of_a_class_of_their_own():
    model = Layers()
    model.scale = Own(torch.linspace(0.5, 1.5, 96))
    return model


def test_parameters_may_be_of_a_class_of_their_own():
    units = {name: [name] for name, _ in Layers().named_parameters()}
    check_twin(with_parameters_of_a_class_of_their_own, loss_of, places=["memory"], units=units, held_units=4, steps=3)


def test_a_model_on_the_meta_device_gets_first_values_on_the_gpu():
    with fake_gpu.shared():
        model = on_meta(lambda: torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 4)))
        torch.manual_seed(7)
        model, _ = wrap(model, "disk", device="cuda", **GPU)
        torch.manual_seed(7)
        plain = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 4))
        x = torch.randn(5, 8)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        sluice.torch.close(model, values=False)
