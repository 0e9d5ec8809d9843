"""wrap() and plan() refuse with what to do, and leave the model as it was; so do their estimates."""

import copy

import pytest
import torch
from support.chain import Chain, Keeping, loss_of, plain_loop
from support.wrapped_models import check_as_plain, on_meta, plain_optimizer, same_values, train, units_of_modules, values_of, wrap
from torch.utils.checkpoint import checkpoint

import sluice
import sluice.torch
from sluice.torch import _units


def failing_at(monkeypatch, unit, also=()):
    """Makes the engine fail to take the values of a unit, and to return those of the units in `also`."""
    taking, giving = sluice.Engine.set_values, sluice.Engine.get_values

    def set_values(engine, name, values):
        if name == unit:
            raise sluice.SystemIOError("the disk is gone")
        return taking(engine, name, values)

    def get_values(engine, name, into=None):
        if name in also:
            raise sluice.SystemIOError("the disk is gone")
        return giving(engine, name, into)

    monkeypatch.setattr(sluice.Engine, "set_values", set_values)
    monkeypatch.setattr(sluice.Engine, "get_values", get_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_wrap_that_fails_midway_gives_the_values_back(dtype, place, monkeypatch):
    model = Chain().to(dtype)
    own, values = dict(model.named_parameters()), values_of(model)
    with monkeypatch.context() as fault:
        failing_at(fault, "last")
        with pytest.raises(sluice.SystemIOError, match="the disk is gone"):
            wrap(model, place, units=units_of_modules(model))
    assert all(p is own[name] for name, p in model.named_parameters())
    assert same_values(values_of(model), values)
    copy.deepcopy(model).half()
    wrap(model, place)
    assert same_values(values_of(model), values)


def test_a_wrap_whose_engine_fails_names_what_is_lost(monkeypatch):
    model = Chain()
    values = values_of(model)
    with monkeypatch.context() as fault:
        failing_at(fault, "last", also=["middle"])
        with pytest.raises(sluice.StateError, match=r"the disk is gone.*'middle.weight', 'middle.bias'; they are on"):
            wrap(model, "disk", units=units_of_modules(model))
    assert [name for name, p in model.named_parameters() if p.is_meta] == ["middle.weight", "middle.bias"]
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters() if not p.is_meta)


# ---- units ----


def units_in(model):
    return {unit.name: [p.name for p in unit.parameters] for unit in sluice.torch.engine_of(model).units}


def test_units_that_the_user_names_keep_their_names():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].bias.requires_grad_(False)
    wrap(model, "memory", units={"1": ["1"], "1 (frozen)": ["0.weight"]})
    assert units_in(model) == {
        "1": ["1.weight"], "1 (frozen)": ["0.weight"], "1 (frozen) (2)": ["1.bias"], "0": ["0.bias"],
    }  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    wrap(model, "memory", units={"0": ["0.weight"]})
    assert units_in(model) == {"0": ["0.weight"], "0 (2)": ["0.bias"]}


def test_modules_that_the_user_lists_are_units_of_their_own():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    wrap(model, "memory", units=["2", "0"])
    assert units_in(model) == {"2": ["2.weight", "2.bias"], "0": ["0.weight", "0.bias"], "1": ["1.weight", "1.bias"]}


def test_many_small_modules_are_each_counted_a_few_times(monkeypatch):
    counted, bytes_of = [], _units._bytes
    monkeypatch.setattr(_units, "_bytes", lambda p: counted.append(p) or bytes_of(p))
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(500)))
    (whole,) = _units.find_units(model)
    assert len(whole.parameters) == 1000 and len(counted) <= 4 * 1000


def test_either_name_of_a_tied_parameter_will_do():
    model = Chain()
    model.last.weight = model.first.weight
    units, groups = {"tied": ["last.weight"]}, [{"params": "last.weight", "lr": 0.5}]
    _, optimizer = wrap(model, "memory", units=units, param_groups=groups)
    assert units_in(model)["tied"] == ["first.weight"]
    assert [p is model.first.weight for p in optimizer.param_groups[0]["params"]] == [True]
    sluice.torch.close(model)
    _, optimizer = wrap(model, "memory", units={"all": ["first", "last"]}, param_groups=[{"params": model.last.weight}])
    assert units_in(model)["all"] == ["first.weight", "first.bias", "last.bias"]


class WithNone(Chain):
    """A model that has parameters without elements."""

    def __init__(self):
        super().__init__()
        self.none = torch.nn.Parameter(torch.empty(0, 24))
        self.no_features = torch.nn.Linear(24, 0)

    def forward(self, x):
        x = torch.cat([x, self.none])
        return super().forward(torch.cat([x, self.no_features(x)], dim=1))

    def reset_parameters(self):
        pass


def test_parameters_without_elements_stay_as_they_are():
    check_as_plain(WithNone, plain_loop, units=None)
    model = on_meta(WithNone)
    wrap(model, "disk")
    assert loss_of(model, 0).isfinite() and not any(p.is_meta for p in model.parameters())
    with pytest.raises(sluice.InvalidArgumentError, match="no parameters with elements"):
        wrap(WithNone().no_features, "disk")


# ---- what is given ----


OF_BIAS = {"params": ["first.bias"]}
WITHOUT_FEATURES = torch.nn.Sequential(torch.nn.Linear(4, 0), torch.nn.Linear(4, 4))


@pytest.mark.parametrize(
    "model, options, what",
    [
        (lambda x: x, {}, "no torch.nn.Module"),
        (torch.nn.ReLU(), {}, r"\(ReLU\) has no parameters"),
        (Chain().double(), {}, "'first.weight' is of torch.float64"),
        (Chain(), {"units": {"a": ["fourth"]}}, "unit 'a' names 'fourth'"),
        (Chain(), {"units": {"a": ["first"], "b": ["first.weight"]}}, "unit 'b' has no parameters that no other unit has"),
        (WITHOUT_FEATURES, {"units": {"a": ["0"]}}, "unit 'a' has parameters without elements alone"),
        (WITHOUT_FEATURES, {"units": {"b": ["1"], "a": ["1", "0"]}}, "unit 'a' has no parameters that no other unit has"),
        (Chain(), {"param_groups": [{"params": [torch.nn.Parameter(torch.zeros(3))]}]}, "no parameter of the model"),
        (Chain(), {"param_groups": [{"params": ["fourth.weight"]}]}, "'fourth.weight'.*no parameter of the model"),
        (Chain(), {"param_groups": [OF_BIAS, OF_BIAS]}, "two parameter groups"),
        (Chain(), {"param_groups": [OF_BIAS | {"momentum": 0.9}]}, "momentum is 0.9.*does not have.*leave it out"),
        (torch.nn.Sequential(torch.nn.LazyLinear(4)), {}, "'0.weight' has no shape yet.*call the model once"),
        (Chain(), {"units": "first"}, "units are 'first'; names of modules are needed, such as"),
        (Chain(), {"units": ["first", ["last"]]}, r"units are \['first', \['last'\]\]; names of modules are needed"),
        (Chain(), {"param_groups": [{"lr": 1}]}, "a parameter group is {'lr': 1}.*'params'"),
        (Chain(), {"param_groups": ["first"]}, "a parameter group is 'first'.*a dict"),
        (Chain(), {"param_groups": [{"params": [(1, 2, 3)]}]}, r"a parameter group has \(1, 2, 3\), which is no parameter"),
        (Chain(), {"patience": 10**10}, "patience is 10000000000; it is a number of seconds above 0 and below 1e9"),
        (Chain(), {"param_groups": [{"params": None}]}, "a parameter group has None, which is no parameter"),
        (Chain(), {"param_groups": [OF_BIAS | {"lr": "x"}]}, "lr is 'x'; a number"),
    ],
)
def test_what_is_given_wrongly_is_named(model, options, what):
    with pytest.raises(sluice.InvalidArgumentError, match=what):
        wrap(model, "memory", **options)


# ---- two parameters over one memory ----


def over(make):
    """A model of two layers whose weights share memory; `make` makes both."""
    model = Chain()
    model.first.weight, model.last.weight = (torch.nn.Parameter(part) for part in make(torch.rand(48, 24)))
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: (m[:24], m[:24]),
        lambda m: (m[:24], m[:24].t()),
        lambda m: (m[:24], m[23:47]),
        lambda m: (m.view(24, 48)[:, 1:25], m.view(24, 48)[:, 24:]),
        lambda m: (m.view(24, 48)[:, :24], m.view(24, 48)[:, 24:]),
    ],
)
def test_two_parameters_over_one_memory_are_refused(make, device):
    model = over(lambda m: make(m.to(device)))
    values = values_of(model)
    with pytest.raises(
        sluice.InvalidArgumentError, match="'(last|first).weight' and '(last|first).weight'.*make them one"
    ):
        wrap(model, "disk")
    assert device == "meta" or same_values(values_of(model), values)
    model.last.weight = model.first.weight
    wrap(model, "disk")
    assert model.last.weight is model.first.weight


# ---- what is found out about a model leaves nothing in it ----


class Reentrant(Chain):
    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))


class Broken(Keeping):
    def forward(self, x):
        super().forward(x)
        raise ArithmeticError("in the middle")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", [Reentrant, Keeping])
def test_an_estimate_leaves_nothing_in_the_model(make):
    def begun():
        torch.manual_seed(3)
        return make()

    def states(model):
        return [
            {name: list(value) if isinstance(value, list) else value for name, value in vars(module).items()}
            for module in model.modules()
        ]

    model = begun()
    before, parameters = states(model), dict(model.named_parameters())
    sluice.torch.plan(model, sluice.AdamW(), memory="6GiB", sample_batch=torch.ones(6, 24))
    assert states(model) == before
    assert all(p is parameters[name] and p.grad is None for name, p in model.named_parameters())
    plain = begun()
    expected = train(plain, plain_optimizer(plain), loss_of, steps=3)
    model, optimizer = wrap(model, "disk", reserve=None, sample_batch=torch.ones(6, 24))
    assert train(model, optimizer, loss_of, steps=3).close_to(expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_an_estimate_that_fails_leaves_nothing_either():
    model = Broken()
    with pytest.raises(ArithmeticError, match="in the middle"):
        sluice.torch.plan(model, sluice.AdamW(), memory="6GiB", sample_batch=torch.ones(6, 24))
    assert (model.table, model.calls, model.seen, list(model.by_kind)) == (None, 0, [], ["last"])
    assert model.by_kind["last"][0] is model.last.weight


@pytest.mark.parametrize(
    "forward, batch, what",
    [
        (lambda self, x: self.first(x[self.first(x)[:, 0] > 0]), torch.ones(6, 24), "depend on values.*DynamicOutputShape"),
        (lambda self, x: x if self.first(x).sum() > 0 else x + 1, torch.ones(6, 24), "depend on values.*DataDependent"),
        (lambda self, x: self.first(x + x.numpy().sum()), torch.ones(6, 24), "numpy"),
        (Chain.forward, torch.ones(6, 7), r"\[6, 7\] X \[24, 24\]"),
    ],
)
def test_what_cannot_be_estimated_says_what_to_give_instead(forward, batch, what, monkeypatch):
    model = Chain()
    monkeypatch.setattr(Chain, "forward", forward)
    with pytest.raises(sluice.InvalidArgumentError, match=f"(?s){what}.*reserve"):
        sluice.torch.plan(model, sluice.AdamW(), memory="6GiB", sample_batch=batch)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
def test_a_weight_that_hooks_make_is_of_its_own_after_a_call():
    model, x = torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4))), torch.ones(2, 4)
    with pytest.raises(sluice.InvalidArgumentError, match="call the model once before it is wrapped"):
        wrap(model, "memory")
    with torch.no_grad():
        model(x)
    plain = copy.deepcopy(model)
    model, _ = wrap(model, "memory")
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
    sluice.torch.close(model)
