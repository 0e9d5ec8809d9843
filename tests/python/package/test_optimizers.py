"""Every optimizer, through the whole engine on disk, agrees with its independent reference, and keeps what it must."""

import itertools
import pathlib

import numpy as np
import pytest
import torch
from support import rounding
from support.sluice_package import widened
from support.torch_muon import MuonWithAdamW
from transformers.optimization import Adafactor

import sluice
import sluice.torch

UNITS = [
    sluice.Unit("a", [sluice.Parameter("a.weight", (40, 100)), sluice.Parameter("a.bias", (100,), 1)]),
    sluice.Unit("b", [sluice.Parameter("b.weight", (3000,)), sluice.Parameter("b.kernel", (3, 20, 70))]),
]
PARAMETERS = [parameter for unit in UNITS for parameter in unit.parameters]
DECAY = (0.1, 0.0)  # the two groups' weight decay
LONGEST_SUM = 3000  # elements of the largest parameter, whose mean square Adafactor takes
# The size of a step, whose roundings are relative to it: the learning rate; Muon's polynomial makes small singular values,
# and their roundings, 3.4445 times as large in each of five iterations.
STEP_SIZE = {"muon": 1e-2 * 3.4445**5, "muon_rms": 1e-3 * 3.4445**5}


def start_of(parameter):
    return np.random.default_rng(parameter.elements).uniform(-0.5, 0.5, parameter.shape).astype(np.float32)


def gradient_of(wide, step):
    """A gradient that changes its sign now and then."""
    noise = np.random.default_rng(step).normal(0, 0.1, wide.shape).astype(np.float32)
    return np.float32(0.1) * wide + noise


def make_engine(tmp_path, optimizer, place="disk", units=UNITS, threads=2, **options):
    if any(isinstance(group, sluice.Muon) for group in optimizer):
        options = {"sgemm": sluice.torch.sgemm()} | options
    given = sluice.Options(memory="4GiB", disk=tmp_path, optimizer=optimizer, place=place, threads=threads, **options)
    return sluice.Engine(units, given)


def set_start(engine, units=UNITS):
    for unit in units:
        engine.set_values(unit.name, {p.name: start_of(p) for p in unit.parameters})


def train(engine, steps, units=UNITS, **settings):
    for _ in range(steps):
        engine.begin_step()
        for unit in units:
            with engine.acquire(unit.name, gradient=True):
                for p in unit.parameters:
                    engine.add_gradient(p.name, gradient_of(widened(engine.parameter(p.name), engine.options.dtype), engine.steps))
        engine.step(**settings)


def values_of(engine):
    return {name: np.array(values) for unit in UNITS for name, values in engine.get_values(unit.name).items()}


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def torch_trained(make, steps):
    """The values after `steps` steps of an optimizer of torch.optim, in f64."""
    tensors = {p.name: torch.tensor(start_of(p), dtype=torch.float64, requires_grad=True) for p in PARAMETERS}
    groups = [
        {"params": [tensors[p.name] for p in PARAMETERS if p.group == group], "weight_decay": decay}
        for group, decay in enumerate(DECAY)
    ]
    optimizer = make(groups)
    for step in range(1, steps + 1):
        for tensor in tensors.values():
            tensor.grad = torch.tensor(gradient_of(tensor.detach().numpy().astype(np.float32), step)).double()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


class Lion(torch.optim.Optimizer):
    """The optimizer of Chen et al. 2023, algorithm 2."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= group["lr"] * ((0.9 * m + 0.1 * p.grad).sign() + group["weight_decay"] * p)
                m.mul_(0.99).add_(0.01 * p.grad)


CASES = {
    "adamw": (lambda d: sluice.AdamW(lr=1e-3, weight_decay=d), lambda g: torch.optim.AdamW(g, lr=1e-3)),
    "adam": (lambda d: sluice.Adam(lr=1e-3, weight_decay=d), lambda g: torch.optim.Adam(g, lr=1e-3)),
    "lion": (lambda d: sluice.Lion(lr=1e-3, weight_decay=d), Lion),
    "sgd": (lambda d: sluice.SGD(lr=1e-2, weight_decay=d), lambda g: torch.optim.SGD(g, lr=1e-2)),
    "momentum": (
        lambda d: sluice.SGD(lr=1e-2, momentum=0.9, weight_decay=d),
        lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9),
    ),
    "nesterov": (
        lambda d: sluice.SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=d),
        lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, nesterov=True),
    ),
    "adafactor": (
        lambda d: sluice.Adafactor(lr=1e-2, weight_decay=d),
        lambda g: Adafactor(g, lr=1e-2, relative_step=False),
    ),
    "adafactor_relative": (
        lambda d: sluice.Adafactor(lr=1.0, relative_step=True, clip_threshold=0.5, weight_decay=d),
        lambda g: Adafactor(g, clip_threshold=0.5),
    ),
    "adafactor_momentum": (
        lambda d: sluice.Adafactor(lr=1e-3, beta1=0.9, scale_parameter=False, weight_decay=d),
        lambda g: Adafactor(g, lr=1e-3, beta1=0.9, relative_step=False, scale_parameter=False),
    ),
    "muon": (lambda d: sluice.Muon(lr=1e-2, weight_decay=d), lambda g: MuonWithAdamW(g, lr=1e-2)),
    "muon_rms": (
        lambda d: sluice.Muon(lr=1e-3, momentum=0.8, nesterov=False, adjust_lr_fn="match_rms_adamw", weight_decay=d),
        lambda g: MuonWithAdamW(g, lr=1e-3, momentum=0.8, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    ),
}


@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_its_reference(tmp_path, case, steps):
    make, reference = CASES[case]
    expected = torch_trained(reference, steps)
    with make_engine(tmp_path, [make(decay) for decay in DECAY]) as engine:
        set_start(engine)
        train(engine, steps)
        for name, found in values_of(engine).items():
            allowed = rounding.of_roundings(20 * steps + LONGEST_SUM) * (np.abs(expected[name]) + STEP_SIZE.get(case, 1e-2))
            # Lion's step jumps where its direction changes sign, which f32 may do a step sooner.
            far = np.abs(found - expected[name]) > allowed
            assert far.mean() <= (1e-3 if case == "lion" else 0), name


WITHOUT_ARRAYS = ["sgd", "adafactor", "adafactor_relative"]  # by elements, which could have a type


@pytest.mark.parametrize("case", WITHOUT_ARRAYS)
def test_a_type_of_state_that_there_is_not_is_refused(tmp_path, case):
    for state in ("bf16", "8bit"):
        with pytest.raises(sluice.InvalidArgumentError, match=f"state of type {state} was asked for, but without momentum"):
            make_engine(tmp_path, [CASES[case][0](0.0)] * 2, dtype="bf16", state=state)


def combinations():
    """Every optimizer with every pair of types; by default with one, so that each narrow state comes with each type of values."""
    types = [("f32", "f32"), ("bf16", "f32"), ("bf16", "none"), ("f16", "f32")]
    f32, narrow = (list(itertools.product(types, states)) for states in (["f32"], ["bf16", "8bit"]))
    chosen = dict(zip([case for case in CASES if case not in WITHOUT_ARRAYS], narrow)) | dict(zip(WITHOUT_ARRAYS, f32))
    for case in CASES:
        for of_values, state in f32 + (narrow if case not in WITHOUT_ARRAYS else []):
            yield pytest.param(case, *of_values, state, marks=() if chosen[case] == (of_values, state) else pytest.mark.long)


@pytest.mark.parametrize("case, dtype, master, state", list(combinations()))
def test_the_same_bits_wherever_they_lie_and_after_a_checkpoint(tmp_path, case, dtype, master, state):
    kinds = {"dtype": dtype, "master": master, "state": state, "seed": 3}
    groups = [CASES[case][0](decay) for decay in DECAY]
    results = []
    for threads, place in enumerate(("memory", "disk"), 1):
        with make_engine(tmp_path, groups, place, threads=threads, **kinds) as engine:
            set_start(engine)
            train(engine, 2)
            saved = engine.save(tmp_path / place)
            train(engine, 2)
            results.append(values_of(engine))
    with make_engine(tmp_path, groups, **kinds) as engine:
        engine.load(saved)
        train(engine, 2)
        results.append(values_of(engine))
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert (pathlib.Path(saved) / "optimizer.master.safetensors").exists() == (dtype != "f32" and master == "f32")


@pytest.mark.parametrize("optimizer", [sluice.AdamW(), sluice.Muon()], ids=lambda optimizer: optimizer.name)
def test_state_of_one_type_is_loaded_into_the_other(tmp_path, optimizer):
    saved = {}
    for state in ("f32", "bf16", "8bit"):
        with make_engine(tmp_path, [optimizer] * 2, state=state) as engine:
            set_start(engine)
            train(engine, 3)
            saved[state] = engine.save(tmp_path / state)
    narrow = pathlib.Path(saved["bf16"]) / "optimizer.exp_avg.safetensors"
    assert b'"BF16"' in narrow.read_bytes()[:500]
    codes = pathlib.Path(saved["8bit"]) / "optimizer.exp_avg.safetensors"
    assert b'"U8"' in codes.read_bytes()[:500]
    assert (codes.parent / "optimizer.exp_avg.scales.safetensors").exists()

    def goes_on(made, state):
        with make_engine(tmp_path, [optimizer] * 2, state=state) as engine:
            engine.load(saved[made])
            train(engine, 1)
            return values_of(engine)

    # An f32 array can have all values of a narrow one, and the first update reads them before it rounds them again.
    for narrow in ("bf16", "8bit"):
        assert same(goes_on(narrow, "f32"), goes_on(narrow, narrow))
    for made, state, near in (("f32", "bf16", 1e-4), ("f32", "8bit", 1e-3), ("bf16", "8bit", 1e-3)):
        expected, found = goes_on(made, "f32"), goes_on(made, state)
        assert all(np.allclose(expected[name], found[name], atol=near) for name in expected)


@pytest.mark.parametrize(
    "made, asked, match",
    [
        (sluice.AdamW(), sluice.Adam(), "'adamw'.*'adam'"),
        (sluice.SGD(), sluice.SGD(momentum=0.9), "holds of optimizer state nothing, and sgd needs optimizer.momentum_buffer.safetensors;"),
        (sluice.SGD(momentum=0.9), sluice.Muon(), "'sgd'.*'muon'"),
        (sluice.SGD(momentum=0.9), sluice.SGD(), "holds of optimizer state optimizer.momentum_buffer.safetensors, and sgd needs nothing;"),
    ],
)
def test_another_optimizers_checkpoint_is_refused_by_name(tmp_path, made, asked, match):
    with make_engine(tmp_path, [made] * 2) as engine:
        set_start(engine)
        saved = engine.save(tmp_path / "out")
    with make_engine(tmp_path, [asked] * 2) as engine:
        with pytest.raises(sluice.InvalidArgumentError, match=match):
            engine.load(saved)
        set_start(engine)  # the engine goes on
        train(engine, 1)


def test_muon_stays_near_torchs_own_which_iterates_in_bfloat16(tmp_path):
    lr, steps = 1e-2, 30
    expected = torch_trained(lambda g: MuonWithAdamW(g, exact=False, lr=lr), steps)
    with make_engine(tmp_path, [sluice.Muon(lr=lr, weight_decay=decay) for decay in DECAY]) as engine:
        set_start(engine)
        train(engine, steps)
        found = values_of(engine)
    # The reference rounds each product of an iteration to 8 bits, with an error of half the last one.
    apart, moved = (found["a.weight"] - other for other in (expected["a.weight"], start_of(PARAMETERS[0])))
    assert np.linalg.norm(apart) < 2**-8 * np.linalg.norm(moved)
    assert np.abs(apart).max() < 2**-7 * np.abs(moved).max()
    assert np.linalg.norm(apart) > 0, "the two are not alike"


def test_settings_that_cannot_be(tmp_path):
    for make, wrong in (
        (sluice.SGD, {"momentum": 1.0}),
        (sluice.SGD, {"nesterov": True}),
        (sluice.SGD, {"lr": -1.0}),
        (sluice.Lion, {"betas": (0.9, 1.0)}),
        (sluice.Adam, {"eps": -1e-8}),
        (sluice.Adam, {"weight_decay": float("inf")}),
        (sluice.Adafactor, {"beta1": 1.0}),
        (sluice.Adafactor, {"eps": (0.0, 1e-3)}),
        (sluice.Adafactor, {"clip_threshold": 0.0}),
        (sluice.Adafactor, {"relative_step": "no"}),
        (sluice.Adafactor, {"scale_parameter": 1}),
        (sluice.SGD, {"nesterov": "no"}),
        (sluice.Muon, {"momentum": 1.0}),
        (sluice.Muon, {"adjust_lr_fn": "large"}),
        (sluice.Muon, {"adamw_lr": -1.0}),
        (sluice.Muon, {"adamw_betas": (0.9, 1.0)}),
        (sluice.Muon, {"adamw_eps": 1e39}),
    ):
        with pytest.raises(sluice.InvalidArgumentError, match=next(iter(wrong))):
            make(**wrong)
    with pytest.raises(sluice.InvalidArgumentError, match="only lr, weight_decay and momentum"):
        make_engine(tmp_path, [sluice.SGD(), sluice.Lion()])
    with pytest.raises(sluice.InvalidArgumentError, match="its own"):
        make_engine(tmp_path, [sluice.Lion()] * 2, master="none")
    with pytest.raises(sluice.InvalidArgumentError, match="master is 'bf16'"):
        make_engine(tmp_path, [sluice.Lion()] * 2, master="bf16")
    with pytest.raises(sluice.InvalidArgumentError, match="state is 'f16'.*bf16, 8bit"):
        make_engine(tmp_path, [sluice.Lion()] * 2, state="f16")
    with make_engine(tmp_path, [sluice.SGD()] * 2) as engine:
        set_start(engine)
        with pytest.raises(sluice.InvalidArgumentError, match="only lr, weight_decay and momentum"):
            train(engine, 1, optimizer=[sluice.SGD(momentum=0.5)] * 2)
        engine.step([sluice.SGD(lr=0.5)] * 2)
