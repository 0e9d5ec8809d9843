"""sluice.torch.plan() returns wrap()'s plan for the same arguments, and refuses what wrap() refuses."""

import re
import tempfile

import pytest
import torch
from support import fake_gpu
from support.chain import Chain, loss_of
from support.wrapped_models import small_gpt2, tokens, units_of_modules

import sluice
import sluice.torch

MIB = 1 << 20
OF_HOST = fake_gpu.cpu_alone("its budgets are of the memory in which the CPU computes; test_gpu.py has some of a GPU's")


def wide():
    """A model with 96 MiB of parameters: with AdamW 384 MiB, with SGD 192."""
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])


def without_process(plan):
    """The plan without the process's own size, which differs at each call."""
    memory = {purpose: size for purpose, size in plan["bytes"]["host"].items() if purpose != "base"}
    others = [plan["bytes"].get(tier) for tier in ("device", "disk")]
    return memory, others, plan["units"], plan["prefetch"], plan["state_bytes_per_parameter"]


BATCH = {"input_ids": tokens(0), "labels": tokens(0)}
GIVEN = [
    (sluice.AdamW(), {"place": "memory"}),
    (sluice.AdamW(), {"place": "disk", "sample_batch": BATCH}),
    (sluice.AdamW(), {"place": "disk", "state": "8bit", "held_units": 5, "prefetch": 2}),
    (sluice.AdamW(), {"place": "disk", "update_in_backward": True, "clip_value": 1.0}),
    (sluice.SGD(lr=0.1), {"place": {"parameters": "memory", "state": "disk", "gradients": "disk"}}),
    (sluice.Muon(adamw_lr=1e-3), {"place": "disk", "param_groups": [{"params": ["lm_head.weight"], "lr": 0.1}]}),
    (None, {"place": "disk", "sample_batch": BATCH, "units": units_of_modules(small_gpt2())}),
]


@pytest.mark.parametrize("optimizer, options", GIVEN)
def test_a_plan_is_that_of_the_wrapped_model(optimizer, options):
    given = fake_gpu.placed(memory="6GiB", disk=f"{tempfile.gettempdir()}:2GiB", **options)
    model = small_gpt2()
    planned = sluice.torch.plan(model, optimizer, **given)
    sluice.torch.wrap(model, optimizer, **given)
    made = sluice.torch.engine_of(model).plan()
    sluice.torch.close(model)
    assert without_process(planned) == without_process(made)
    assert planned["pytorch"] == made["pytorch"]
    assert made["budget"]["disk"] == 2 << 30


@OF_HOST
def test_a_budget_that_is_enough_for_one_optimizer_is_none_for_another():
    model, batch = wide(), torch.zeros(2, 2048)
    least = {}
    for optimizer in (sluice.SGD(), sluice.AdamW()):
        made = sluice.torch.plan(model, optimizer, memory="8GiB", sample_batch=batch)
        least[optimizer] = made["predicted_peak"]
    sgd, adamw = least.values()
    assert adamw - sgd >= 2 * 96 * MIB
    between = (sgd + adamw) // 2
    sluice.torch.plan(model, sluice.SGD(), memory=between, sample_batch=batch)
    sluice.torch.plan(model, sluice.AdamW(), memory=between, sample_batch=batch, state="8bit")
    with pytest.raises(sluice.BudgetError) as refused:
        sluice.torch.plan(model, sluice.AdamW(), memory=between, sample_batch=batch)
    assert "memory is short by" in str(refused.value)
    wrapped, _ = sluice.torch.wrap(model, sluice.SGD(), memory=between, sample_batch=batch)
    with pytest.raises(sluice.StateError, match=r"wrapped already.*engine_of\(model\).plan\(\) is its plan"):
        sluice.torch.plan(model, sluice.SGD(), memory=between)
    sluice.torch.close(wrapped)


@OF_HOST
def test_a_refusal_speaks_of_what_a_wrapped_model_has():
    with pytest.raises(sluice.BudgetError) as refused:
        sluice.torch.plan(wide(), sluice.AdamW(), memory="300MiB", reserve="64MiB", disk=tempfile.gettempdir())
    assert "with everything on disk that can be it needs" in str(refused.value)
    assert "micro-batch" not in str(refused.value)
    with pytest.raises(sluice.BudgetError, match="64.0 MiB are reserved for what the process takes beside the engine, which is more than the memory of 2 B: state more"):
        sluice.torch.plan(wide(), sluice.AdamW(), memory=2, reserve="64MiB")


@OF_HOST
def test_the_memory_that_a_refusal_names_is_enough_or_it_says_why_not():
    model, rows, given = wide(), torch.zeros(2000, 2048), {"memory": "500MiB", "disk": tempfile.gettempdir()}
    for call in (sluice.torch.plan, sluice.torch.wrap):
        with pytest.raises(sluice.BudgetError, match=r"memory is short by .*\. What PyTorch takes in a call is known .*give sample_batch="):
            call(model, sluice.AdamW(), **given)
    with pytest.raises(sluice.BudgetError, match=r"memory=\d+MiB") as refused:
        sluice.torch.wrap(model, sluice.AdamW(), sample_batch=rows, **given)
    assert "sample_batch=" not in str(refused.value)
    enough = re.search(r"memory=(\d+MiB)", str(refused.value)).group(1)
    model, optimizer = sluice.torch.wrap(model, sluice.AdamW(), sample_batch=rows, **given | {"memory": enough})
    model(rows).mean().backward()
    optimizer.step()
    sluice.torch.close(model, values=False)


@pytest.mark.parametrize(
    "given, options, what",
    [
        (torch.ones(6, 24), {}, r"(?s)the optimizer is tensor.*sluice.AdamW.*sample_batch="),
        (sluice.AdamW(), {"held_units": -5}, "held_units is -5; it is a whole number"),
        (sluice.AdamW(), {"prefetch": 10**6}, "prefetch is 1000000; it is a whole number from 0 to 64"),
        (sluice.AdamW(), {"units": {"a": 3}}, r"the unit 'a' has 3; names .*\['head.weight'\]"),
        (sluice.AdamW(), {"units": {"a": ["first", 3]}}, r"the unit 'a' has \['first', 3\]; names"),
        (None, {"update_in_backward": True}, "update_in_backward is given without an optimizer"),
        (None, {"param_groups": []}, "param_groups are given without an optimizer"),
    ],
)
def test_what_cannot_be_wrapped_cannot_be_planned(given, options, what):
    model = Chain()
    for function in (sluice.torch.plan, sluice.torch.wrap):
        with pytest.raises(sluice.InvalidArgumentError, match=what):
            function(model, given, **fake_gpu.placed(memory="6GiB", **options))
    assert not any(hasattr(p, "_sluice") for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_named():
    scripted = torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(2, 4))
    for model, what in ((scripted, "the model is a TopLevelTracedModule"), (torch.nn.Sequential(scripted), "'0' is a")):
        with pytest.raises(sluice.InvalidArgumentError, match=f"{what}.*wrap what it was made of"):
            sluice.torch.wrap(model, sluice.AdamW(), **fake_gpu.placed(memory="6GiB"))


def test_a_model_of_inference_mode_is_not_trained_nor_used_elsewhere():
    with torch.inference_mode():
        made_inside = Chain()
    model, _ = sluice.torch.wrap(Chain(), **fake_gpu.placed(memory="6GiB"))
    with torch.inference_mode():
        assert model(torch.ones(6, 24)).isfinite().all()
        with pytest.raises(sluice.InvalidArgumentError, match=r"inside torch.inference_mode\(\).*outside of that"):
            sluice.torch.wrap(Chain(), sluice.AdamW(), **fake_gpu.placed(memory="6GiB"))
    sluice.torch.close(model)
    for optimizer in (sluice.AdamW(), None):
        with pytest.raises(sluice.InvalidArgumentError, match=r"'first.weight' was made inside torch.inference_mode\(\)"):
            sluice.torch.wrap(made_inside, optimizer, **fake_gpu.placed(memory="6GiB"))


@pytest.mark.parametrize("size", [2, 1000])
@fake_gpu.cpu_alone("several ranks are refused on a GPU")
def test_any_number_of_ranks_can_be_planned_for(monkeypatch, size):
    for name, value in {"RANK": size - 1, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sluice.ranks, "shared_memory", None)
    plan = sluice.torch.plan(wide(), sluice.AdamW(), memory="8GiB", stage=1)
    assert plan["ranks"] == size
    assert plan["bytes"]["host"]["optimizer state"] < 320 * MIB // size + 12 * MIB


@fake_gpu.cpu_alone("several ranks are refused on a GPU")
def test_ranks_that_could_not_find_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for make in (sluice.torch.plan, sluice.torch.wrap):
        with pytest.raises(sluice.InvalidArgumentError, match="WORLD_SIZE=2, and no MASTER_ADDR, MASTER_PORT, .*torchrun"):
            make(Chain(), sluice.AdamW(), memory="8GiB")
    assert sluice.torch.plan(Chain(), sluice.AdamW(), memory="8GiB", ranks=False)["ranks"] == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert sluice.torch.plan(Chain(), sluice.AdamW(), memory="8GiB")["ranks"] == 1
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(sluice.InvalidArgumentError, match=r"has started 4 processes \(SLURM_STEP_NUM_TASKS\), .*init_process_group"):
        sluice.torch.plan(Chain(), sluice.AdamW(), memory="8GiB")
    assert sluice.torch.plan(Chain(), sluice.AdamW(), memory="8GiB", ranks=False)["ranks"] == 1


def test_a_refusal_names_the_module():
    class Choosing(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.max() > 0 else x

    model = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Sequential(Choosing(24, 24)))
    sluice.torch.wrap(model, sluice.AdamW(), memory="6GiB")
    with pytest.raises(sluice.InvalidArgumentError, match=r"in '1.0' \(Choosing\) its operations depend on values"):
        loss_of(model, 0)
