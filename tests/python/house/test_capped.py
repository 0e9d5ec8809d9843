"""scripts/capped.sh runs a command as on a CPU with narrower vectors; the bounds of tests/python/support/rounding.py allow
roundings and find errors."""

import subprocess

import pytest
import torch
from support import rounding
from support.sluice_process import SOURCE
from support.wrapped_models import TERMS, language_loss, plain_optimizer, small_gpt2, train, values_of

CAPPED = SOURCE / "scripts" / "capped.sh"


@pytest.mark.parametrize("cap, isa", [("avx2", "AVX2"), ("avx512", "AVX512_CORE")])
def test_the_loops_are_capped(cap, isa):
    variables = subprocess.run([CAPPED, cap, "env"], capture_output=True, text=True, check=True).stdout
    assert {f"SLUICE_MAX_TARGET={cap}", f"ONEDNN_MAX_CPU_ISA={isa}"} <= set(variables.splitlines())


@pytest.mark.parametrize("words, told", [([], "is not a cap"), (["amx", "true"], "'amx'"), (["avx2"], "no command is given")])
def test_other_words_are_refused(words, told):
    done = subprocess.run([CAPPED, *words], capture_output=True, text=True)
    assert done.returncode == 2 and told in done.stderr


# ---- the bounds of comparisons ----


def trained(change=lambda model, optimizer: None, steps=10):
    model = small_gpt2()
    optimizer = plain_optimizer(model)
    change(model, optimizer)
    return train(model, optimizer, language_loss, steps=steps), values_of(model)


@pytest.fixture(scope="module")
def plain():
    return trained()


def without_a_bias(model, optimizer):
    model.transformer.h[1].attn.c_proj.bias.requires_grad_(False)


def set_to(**settings):
    return lambda model, optimizer: optimizer.param_groups[0].update(settings)


def differs(found, expected):
    """Whether one of the two comparisons of training finds a difference."""
    start, epsilon = values_of(small_gpt2()), expected[0].epsilon
    off = not found[0].close_to(expected[0])
    for name, value in expected[1].items():
        try:
            rounding.assert_moved_alike(found[1][name], value, start[name], epsilon, name)
        except AssertionError:
            off = True
    return off


@pytest.mark.parametrize(
    "wrong",
    [without_a_bias, set_to(lr=1.02e-3), set_to(eps=1e-6), set_to(weight_decay=0.0), set_to(betas=(0.88, 0.999))],
    ids=["no-update", "lr", "eps", "no-decay", "beta1"],
)
def test_what_trained_alike_tells(wrong, plain):
    assert differs(trained(wrong), plain)


def test_what_near_tells():
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    rounding.assert_near(expected.double().float() * (1 + 1e-7), expected, rounding.of_roundings(16))
    for wrong in (expected * (1 + 1e-5), expected.roll(1, 0), expected * (torch.arange(4096).reshape(64, 64) != 5)):
        with pytest.raises(AssertionError, match="of its size"):
            rounding.assert_near(wrong, expected, rounding.of_roundings(16), terms=TERMS)
