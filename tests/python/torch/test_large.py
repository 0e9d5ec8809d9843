"""Models that are larger than memory, and the memory of wrapped ones: the meta device, folders, the plan."""

import warnings

import pytest
import torch
import transformers
from support import fake_gpu
from support.processes import measures_the_process, run_big
from support.wrapped_models import on_meta, update

import sluice
import sluice.torch

HOST = fake_gpu.cpu_alone("it plans for what PyTorch takes of the host's memory")


@pytest.mark.parametrize("own_file", [True, False])
def test_a_folder_gives_the_model_that_transformers_gives(own_file, tmp_path):
    torch.manual_seed(1)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0, resid_pdrop=0.5
    ))  # fmt: skip
    plain.generation_config.max_new_tokens = 7
    plain.save_pretrained(tmp_path)
    if not own_file:
        (tmp_path / "generation_config.json").unlink()
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace("{", '{"max_new_tokens": 5,', 1))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(5)[None]
    for optimizer in (None, sluice.AdamW()):
        model, _ = sluice.torch.from_pretrained(tmp_path, optimizer, **fake_gpu.placed(True, memory="6GiB", sample_batch=ids))
        assert not model.training and not any(module.training for module in model.modules())
        for name, value in expected.generation_config.to_dict().items():
            assert (getattr(model.generation_config, name) or None) == (value or None), name
        assert torch.equal(model.generate(ids, do_sample=False), expected.generate(ids, do_sample=False))


@HOST
def test_the_plan_says_what_pytorch_takes_without_taking_it():
    model = on_meta(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2)))
    ids = torch.zeros(4, 256, dtype=torch.long)
    adamw = sluice.AdamW()
    one = {"input_ids": ids[:1], "labels": ids[:1]}
    small = sluice.torch.plan(model, adamw, memory="8GiB", sample_batch=one)
    large = sluice.torch.plan(model, adamw, memory="8GiB", sample_batch={"input_ids": ids, "labels": ids})
    logits = 4 * 256 * 50257 * 4
    assert large["pytorch"]["peak"] - small["pytorch"]["peak"] > 3 * (logits * 3 // 4)
    assert large["pytorch"]["reserve"] > large["pytorch"]["peak"]
    reading = sluice.torch.plan(model, memory="8GiB", sample_batch={"input_ids": ids})
    assert logits <= reading["pytorch"]["peak"] < large["pytorch"]["peak"] / 2
    with pytest.raises(sluice.BudgetError):
        sluice.torch.plan(model, adamw, memory="1GiB", sample_batch=ids)
    assert all(p.is_meta for p in model.parameters())


def test_what_is_estimated_is_what_lives():
    """By hand, the count is the input and the output of the second layer."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 10))
    assert sluice.torch.estimate(model, torch.zeros(64, 1000), train=False).peak == 4 * 64 * 2 * 2000
    training = sluice.torch.estimate(model, torch.zeros(64, 1000), train=True).peak
    assert training >= 4 * (64 * 2000 + 1000 * 2000), "an activation, and the first layer's gradient"


def big_activations(taken):
    """A model whose activations take so many bytes, and a batch and a step of it."""
    rows = taken // (4 * 4 * 512)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(2)])
    batch = torch.ones(rows, 512)

    def step(wrapped, optimizer):
        update(optimizer, wrapped(batch).square().mean())

    return model, batch, step


@measures_the_process
def test_what_pytorch_took_is_held_against_what_was_planned():
    """The test has a process of its own, which must not have been larger before."""
    finished = run_big("""
        import warnings
        from test_large import big_activations
        model, batch, step = big_activations(250 << 20)
        wrapped, optimizer = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", reserve="128MiB")
        plan = sluice.torch.engine_of(model).plan
        assert plan()["pytorch"] == {"peak": None, "reserve": 128 << 20, "measured": None}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step(wrapped, optimizer)
            step(wrapped, optimizer)
        measured = plan()["pytorch"]["measured"]
        assert 200 << 20 < measured < 700 << 20, measured >> 20
        [warning] = [w for w in warned if w.category is RuntimeWarning]
        print(str(warning.message))
        assert f"reserve='{(measured >> 20) + 1}MiB'" in str(warning.message)
        sluice.torch.close(model)
    """)
    assert finished.returncode == 0, finished.stderr
    assert "MiB in the first step, and 128 MiB were planned for it" in finished.stdout


@measures_the_process
def test_a_batch_whose_values_take_more_than_is_stated_is_told_of_once():
    """The test has a process of its own."""
    finished = run_big("""
        import warnings, torch
        class Chosen(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(512, 512)
            def forward(self, x, chosen):
                return self.layer(x[chosen]).square()
        memory = 700 << 20
        model, optimizer = sluice.torch.wrap(Chosen(), sluice.AdamW(), memory=memory)
        x, chosen = torch.ones(100_000, 512), torch.zeros(100_000, dtype=torch.bool)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for rows in (64, 64, 100_000, 100_000):
                chosen[:rows] = True
                if rows == 64:
                    torch.ones(200 << 20)  # memory of others, between steps
                model(x, chosen).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        [warning] = [w for w in warned if w.category is RuntimeWarning]
        print(str(warning.message))
        sluice.torch.close(model)
    """)
    assert finished.returncode == 0, finished.stderr
    assert "in a later step than the first, and " in finished.stdout


@fake_gpu.cpu_alone("what PyTorch takes of the fake GPU, where the CPU stands in for it, cannot be measured")
def test_what_was_estimated_is_enough_for_the_first_step():
    model, batch, step = big_activations(100 << 20)
    wrapped, optimizer = sluice.torch.wrap(model, sluice.AdamW(), **fake_gpu.placed(memory="4GiB", sample_batch=batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        step(wrapped, optimizer)
    found = sluice.torch.engine_of(model).plan()["pytorch"]
    assert 0 < found["measured"] <= found["reserve"] and found["peak"] < found["reserve"]
    sluice.torch.close(model)
