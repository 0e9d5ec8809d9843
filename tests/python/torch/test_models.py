"""Small models of the kinds that users have: the same bits in memory, on disk and partly on disk, and plain PyTorch's losses."""

import tempfile

import pytest
import torch
import transformers
from support import fake_gpu
from support.user_models import SHOWN, STEPS, text_loss
from support.wrapped_models import plain_optimizer, same_values, train, units_of_modules, values_of, wrap

import sluice
import sluice.torch

def trained(shown, place):
    """Trains. Returns losses, values and buffers, and touches. Place None stands for plain PyTorch."""
    torch.manual_seed(7)
    model = shown.make()
    optimizer = plain_optimizer(model) if place is None else wrap(model, place, units=units_of_modules(model))[1]
    losses = train(model, optimizer, shown.loss, steps=STEPS, rows=shown.rows)
    touches = sluice.torch.engine_of(model).counters().touches if place is not None else 0
    values = values_of(model) | {name: b.clone() for name, b in model.named_buffers()}
    if place is not None:
        sluice.torch.close(model)
    return losses, values, touches


@pytest.mark.parametrize("name", SHOWN)
def test_twins_and_plain_pytorch(name):
    plain, _, _ = trained(SHOWN[name], None)
    memory, values, touches = trained(SHOWN[name], "memory")
    assert memory.close_to(plain), (memory.values, plain.values)
    assert touches == 0, "a parameter is used that no hook has foreseen"
    found, values_there, touches = trained(SHOWN[name], "disk")
    assert memory.values == found.values and same_values(values, values_there) and touches == 0


@fake_gpu.cpu_alone("its budgets are of the memory in which the CPU computes; what is between on a GPU is in test_gpu.py")
def test_a_budget_between_puts_some_units_on_disk():
    """The bits stay the same for a model that is much larger than the frames of its units."""

    def run(**given):
        torch.manual_seed(1)
        config = transformers.GPT2Config(
            n_layer=8, n_head=4, n_embd=256, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config).eval()
        given = {"memory": "6GiB", "disk": tempfile.gettempdir(), "reserve": "64MiB", "held_units": 1} | given
        plans = {p: sluice.torch.plan(model, sluice.AdamW(), **given | {"place": p}) for p in ("memory", "disk")}
        if "place" not in given:
            least, most = (plans[p]["predicted_peak"] for p in ("disk", "memory"))
            assert most - least > 16 << 20
            given["memory"] = (least + most) // 2
        _, optimizer = sluice.torch.wrap(model, sluice.AdamW(lr=1e-3), **given)
        found = sluice.torch.engine_of(model).plan()["disk"]
        losses = train(model, optimizer, text_loss, steps=2)
        return losses.values, values_of(model), found / plans["disk"]["disk"]

    memory, values, _ = run(place="memory")
    between, values_between, share = run()
    assert 0.1 < share < 0.9
    assert memory == between and same_values(values, values_between)
