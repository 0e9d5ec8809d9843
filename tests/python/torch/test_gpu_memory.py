"""PyTorch may take a stated share of a GPU's memory, and gives an error where that is not enough."""

import pytest
import torch
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of
from support.wrapped_models import wrap
from torch._subclasses.fake_tensor import FakeTensor

import sluice
import sluice.torch

MIB = 1 << 20


def test_where_nothing_is_stated_pytorch_gets_a_large_part_and_what_is_left():
    with fake_gpu.shared():
        model, _ = wrap(Layers(), None, **GPU | {"reserve": None})
        plan = sluice.torch.engine_of(model).plan()
        assert plan["pytorch"]["reserve"] == 512 * MIB + plan["budget"]["device"] - plan["device"] > 900 * MIB
        loss_of(model, 0).backward()
        sluice.torch.close(model)
        del model, _


# ---- no memory ----


class Lacks(Layers):
    """PyTorch has no memory for it in forward, or in backward, but for fakes of an estimate."""

    where = None

    def forward(self, ids):
        out = super().forward(ids)
        if isinstance(out, FakeTensor):
            return out
        if self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB")
        return Ends.apply(out, self.where == "backward")


class Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB")
        return gradient, None


@pytest.mark.parametrize("where, reserve, device_memory, advice", [
    ("forward", "1MiB", "1GiB", r"and the call takes 1\d\d MiB by an estimate. Wrap the model with reserve='1\d\dMiB', for which there is room"),
    ("forward", "200MiB", "1GiB", r"and the call takes 1\d\d MiB by an estimate. Wrap the model with reserve='251MiB', for which there is room"),
    ("forward", "1MiB", "32MiB", r"With reserve='1\d\dMiB' the model itself has no room any more: .* Or give less at once"),
    ("backward", "200MiB", "1GiB", r"beside the model \(reserve\). Wrap the model with reserve='251MiB', for which there is room"),
])  # fmt: skip
def test_pytorchs_error_says_what_to_state(where, reserve, device_memory, advice):
    with fake_gpu.shared():
        model, optimizer = wrap(Lacks(), "memory", device_memory=device_memory, reserve=reserve, device_facts=fake_gpu.FACTS)
        expected = [loss_of(model, step).item() for step in range(2)]
        model.where = where
        with pytest.raises(sluice.BudgetError, match=advice) as caught:
            loss_of(model, 0).backward()
        assert isinstance(caught.value, torch.OutOfMemoryError), "who catches PyTorch's error catches this"
        text = str(caught.value)
        assert f"of a call of Lacks: CUDA out of memory. Tried to allocate 20.00 MiB. Of" in text or where == "forward"
        assert "this call of Lacks: CUDA out of memory. Tried to allocate 20.00 MiB. Of" in text or where == "backward"
        assert f"GPU 0 it may take {reserve[:-3]} MiB beside the model (reserve)" in text and "139.80" not in text
        model.where = None
        optimizer.zero_grad()
        assert [loss_of(model, step).item() for step in range(2)] == expected, "the model goes on"
        loss_of(model, 1).backward()
        optimizer.step()
        plain = torch.ones(1, requires_grad=True)
        with pytest.raises(torch.OutOfMemoryError) as other:
            Ends.apply(plain, True).backward()
        assert not isinstance(other.value, sluice.Error), "it is a model's own that awaits no pass"
        sluice.torch.close(model)
        del model, optimizer, caught, other


def test_a_call_that_cannot_be_estimated_says_the_rest():
    class Depends(Lacks):
        def forward(self, ids):
            return super().forward(ids[:, : 8 + int(torch.rand(2).sum()) % 2])

    with fake_gpu.shared():
        model, _ = wrap(Depends(), "memory", **GPU)
        model.where = "forward"
        with pytest.raises(sluice.BudgetError, match=r"may take 64 MiB beside the model \(reserve\). Wrap the model with reserve='81MiB'"):
            model(torch.zeros(2, 12, dtype=torch.long))
        sluice.torch.close(model)
        del model, _
