"""Every optimizer, through the whole engine on disk, agrees with its independent reference, and keeps what it must."""

import dataclasses
import itertools
import pathlib
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
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


def make_engine(tmp_path, optimizer, place="disk", units=UNITS, **options):
    if any(isinstance(group, sluice.Muon) for group in optimizer):
        options = {"sgemm": sluice.torch.sgemm()} | options
    given = sluice.Options(memory="4GiB", disk=tmp_path, optimizer=optimizer, place=place, threads=2, **options)
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


@pytest.mark.parametrize("kind", [sluice.AdamW, sluice.Lion])
def test_betas_of_zero_are_no_defaults(kind):
    units = [sluice.Unit("u", [sluice.Parameter("p", (2,))])]
    options = sluice.Options(memory="1GiB", optimizer=kind(lr=0.1, betas=(0.0, 0.0), weight_decay=0.0))
    with sluice.Engine(units, options) as engine:
        engine.set_values("u", {"p": np.ones(2, np.float32)})
        for size in (1e4, -1e-3, -1e-3):
            engine.begin_step()
            with engine.acquire("u", gradient=True):
                engine.add_gradient("p", np.array([size, -size], np.float32))
            engine.step()
        assert engine.get_values("u")["p"] == pytest.approx([1.1, 0.9], rel=1e-4)


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
    for place in ("memory", "disk"):
        with make_engine(tmp_path, groups, place, **kinds) as engine:
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


def test_state_takes_what_the_optimizer_keeps_and_no_more(tmp_path):
    elements = 3 << 18
    units = [sluice.Unit("u", [sluice.Parameter("p", (elements,))])]

    def arrays(optimizer, dtype, state="f32", master="f32"):
        kinds = {"dtype": dtype, "state": state, "master": master}
        options = sluice.Options(memory="4GiB", disk=tmp_path, optimizer=optimizer, place="disk", **kinds)
        plan = sluice.plan(units, options)
        assert plan["state_bytes_per_parameter"] * elements == plan["bytes"]["disk"]["optimizer state"]
        return plan["state_bytes_per_parameter"] / 4

    kept = {sluice.AdamW(): 2, sluice.Adam(): 2, sluice.Lion(): 1, sluice.SGD(momentum=0.5): 1, sluice.SGD(): 0}
    assert {optimizer: arrays(optimizer, "f32") for optimizer in kept} == kept
    assert {optimizer: arrays(optimizer, "bf16") - 1 for optimizer in kept} == kept
    del kept[sluice.SGD()]  # it has no state that could have a type
    assert {optimizer: 2 * (arrays(optimizer, "bf16", "bf16") - 1) for optimizer in kept} == kept
    assert {optimizer: 2 * arrays(optimizer, "bf16", "bf16", "none") for optimizer in kept} == kept
    codes = 4 / (1 + 4 / 256)  # bytes: a byte, and a scale for each 256 of them
    assert {optimizer: codes * arrays(optimizer, "f32", "8bit") for optimizer in kept} == kept
    assert {optimizer: codes * (arrays(optimizer, "bf16", "8bit") - 1) for optimizer in kept} == kept
    assert {optimizer: codes * arrays(optimizer, "bf16", "8bit", "none") for optimizer in kept} == kept


def test_stochastic_rounding_follows_its_seed_and_stays_near_the_masters(tmp_path):
    def trained(**kinds):
        with make_engine(tmp_path, [sluice.AdamW(lr=1e-3)] * 2, dtype="bf16", **kinds) as engine:
            set_start(engine)
            train(engine, 20)
            return values_of(engine)

    with_masters, one, other = trained(), trained(master="none", seed=1), trained(master="none", seed=2)
    assert same(one, trained(master="none", seed=1, place="memory")) and not same(one, other)
    for name, expected in with_masters.items():
        assert np.abs(one[name] - expected).max() < 0.02 and abs((one[name] - expected).mean()) < 3e-4, name


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
        (sluice.SGD(), sluice.SGD(momentum=0.9), r"\[\].*\[optimizer.momentum_buffer.safetensors\]"),
        (sluice.SGD(momentum=0.9), sluice.Muon(), "'sgd'.*'muon'"),
        (sluice.SGD(momentum=0.9), sluice.SGD(), r"\[optimizer.momentum_buffer.safetensors\].*\[\]"),
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


def test_adafactors_learning_rate_where_none_is_given():
    assert sluice.Adafactor().rates == (1e-3, 0)
    assert sluice.Adafactor(relative_step=True).rates == (1, 0)  # lr is a factor, as on the command line
    assert sluice.Adafactor(relative_step=True, lr=0.5).rates == (0.5, 0)


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


WITH_TABLE = [*UNITS, sluice.Unit("c", [sluice.Parameter("c.table", (50, 40), by_elements=True)])]  # no matrix to Muon
KEPT = {  # elements of each array, in the order of the arrays
    "adafactor": {
        "exp_avg_sq_row": {"a.weight": 40, "b.kernel": 60, "c.table": 50},
        "exp_avg_sq_col": {"a.weight": 100, "b.kernel": 210, "c.table": 40},
        "exp_avg_sq": {"a.bias": 100, "b.weight": 3000},
    },
    "muon": {
        "momentum_buffer": {"a.weight": 4000},
        "exp_avg": {"a.bias": 100, "b.weight": 3000, "b.kernel": 4200, "c.table": 2000},
        "exp_avg_sq": {"a.bias": 100, "b.weight": 3000, "b.kernel": 4200, "c.table": 2000},
    },
}


@pytest.mark.parametrize("optimizer, state", [
    (sluice.Adafactor(), "f32"), (sluice.Muon(), "f32"), (sluice.Muon(), "bf16"), (sluice.Muon(), "8bit"),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_what_is_kept_is_read_and_written_and_in_checkpoints(tmp_path, optimizer, state):
    kept = KEPT[optimizer.name]

    def make():
        return make_engine(tmp_path, [optimizer] * 2, units=WITH_TABLE, state=state)

    def state_of(engine):
        parts = {}
        for unit in WITH_TABLE:
            engine.get_state(unit.name, lambda p, array, first, values: parts.setdefault((p, array), []).append(np.array(values)))
        return {key: np.concatenate(values) for key, values in parts.items()}

    def put(p, array, first, values):
        values[:] = found[p, array][first : first + len(values)]

    with make() as engine:
        set_start(engine, WITH_TABLE)
        train(engine, 3, WITH_TABLE)
        assert engine.state_arrays() == tuple(kept)
        found = state_of(engine)
        saved = pathlib.Path(engine.save(tmp_path / "out"))
    assert {key: values.size for key, values in found.items()} == {(p, array): n for array, of in kept.items() for p, n in of.items()}
    assert all(np.abs(values).max() > 0 for values in found.values())
    for array, of in kept.items():
        with safe_open(saved / f"optimizer.{array}.safetensors", "np") as file:
            assert set(file.keys()) == set(of)
            assert state != "f32" or all(np.array_equal(file.get_tensor(p).reshape(-1), found[p, array]) for p in of)
    with make() as engine:
        engine.load(saved)
        assert same(state_of(engine), found)
    with make() as engine:
        set_start(engine, WITH_TABLE)
        for unit in WITH_TABLE:
            engine.set_state(unit.name, put)
        assert same(state_of(engine), found)


def test_adafactors_memory_is_planned():
    large = [sluice.Unit("u", [sluice.Parameter("p", (3000, 2000))])]
    plan = sluice.plan(large, sluice.Options(memory="4GiB", optimizer=sluice.Adafactor()))
    assert plan["state_bytes_per_parameter"] == 4 * 5000 / 6_000_000
    assert plan["bytes"]["host"]["optimizer state"] == 2 << 20  # one huge page


def test_muons_memory_is_planned_and_charged(tmp_path):
    units = [sluice.Unit("u", [sluice.Parameter("p", (3000, 2000)), sluice.Parameter("q", (2000,))])]
    given = sluice.Options(memory="4GiB", disk=tmp_path, optimizer=sluice.Muon(), sgemm=sluice.torch.sgemm())
    plan = sluice.plan(units, given)
    assert plan["state_bytes_per_parameter"] == pytest.approx(4, rel=1e-3)
    # There are the matrix, two Gram matrices, and 2,096 of 3,000 rows, which a product writes at once.
    needed = 4 * (3000 * 2000 + 2 * 2000 * 2000 + 2096 * 2000)
    planned = plan["bytes"]["host"]["workspace"]
    assert needed <= planned < needed + (2 << 20)
    with sluice.Engine(units, given) as engine:
        lines = {line.purpose: line.peak for line in engine.ledger() if line.tier == "host"}
        assert lines["workspace"] == planned
    with pytest.raises(sluice.BudgetError, match="smaller units") as short:
        sluice.plan(units, dataclasses.replace(given, memory="100MiB"))
    enough = int(re.search(r"memory=(\d+)MiB", str(short.value))[1])
    for short_by in (3, 60):  # the error names up to a MiB more than is needed
        with pytest.raises(
            sluice.BudgetError, match=r"muon updates 'p' \(3000 x 2000\) as a whole.*, or use an"
        ) as short:
            sluice.plan(units, dataclasses.replace(given, memory=f"{enough - short_by}MiB"))
        assert abs(int(re.search(r"memory=(\d+)MiB", str(short.value))[1]) - enough) < 16  # the process has grown


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
