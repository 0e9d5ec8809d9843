"""wrap() with nothing stated but memory and disk: each call is estimated before it computes, and keeps to the budget or is
refused."""

import collections
import contextlib
import tempfile
import textwrap

import pytest
import torch
import transformers
from support import fake_gpu
from support.chain import Chain, loss_of
from support.processes import run_python
from support.wrapped_models import language_loss, on_meta, same_values, small_gpt2, tokens, train, update, values_of
from torch.utils.checkpoint import checkpoint

import sluice
import sluice.torch
from sluice.torch import _estimate

pytestmark = fake_gpu.cpu_alone("on a GPU the plan is made once, for a reserve that is stated or for a sample_batch")
MIB = 1 << 20
WIDTH, FACTORS = 1024, 24


@pytest.fixture(autouse=True)
def less_is_assumed(monkeypatch):
    """At first 320 MiB are assumed, and not 512, so that small models show what follows."""
    monkeypatch.setattr(_estimate, "_RESERVES", (320 * MIB, _estimate._FIXED))


class Wide(torch.nn.Module):
    """A model with 32 MiB of parameters (with AdamW 128), and 0.75 MiB of activations for each row."""

    def __init__(self, checkpointed=False, layers=8):
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.register_buffer("factors", torch.linspace(0.5, 2, FACTORS))
        self.checkpointed, self.calls = checkpointed, []

    def forward(self, x):
        self.calls.append(len(x))
        for layer in self.layers:
            inside = lambda y, layer=layer: (layer(y)[..., None] * self.factors).tanh().mean(-1)  # noqa: E731
            x = checkpoint(inside, x, use_reentrant=False) if self.checkpointed else inside(x)
        return x


def rows(count, seed=0):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def many(count):
    """A tensor of so many rows, without memory of its own."""
    return torch.ones(1, WIDTH).expand(count, -1)


def step(model, optimizer, count, seed=0):
    loss = model(rows(count, seed)).square().mean()
    update(optimizer, loss)
    return loss.item()


def wrapped(memory, make=Wide, optimizer=None, **options):
    return sluice.torch.wrap(
        make(), optimizer or sluice.AdamW(lr=1e-3), memory=memory, disk=tempfile.gettempdir(), **options
    )


def everything(reserve, make=Wide):
    """The budget in which everything is in memory, with so much for PyTorch."""
    model = on_meta(make)
    return sluice.torch.plan(model, sluice.AdamW(lr=1e-3), memory="16GiB", reserve=reserve)["predicted_peak"]


def plan_of(model):
    return sluice.torch.engine_of(model).plan()


# ---- the plan follows the calls ----


def test_the_first_call_and_larger_ones_change_the_plan_and_no_bits():
    """At first 320 MiB are assumed, and the first batch needs less, so that more of the engine moves into memory. Larger
    batches move some of it out again."""
    reference, other = sluice.torch.wrap(
        Wide(), sluice.AdamW(lr=1e-3), memory="8GiB", place="memory", sample_batch=rows(160)
    )
    model, optimizer = wrapped(everything("310MiB"))
    assert plan_of(model)["pytorch"] == {"peak": None, "reserve": 320 * MIB, "measured": None}
    seen = [plan_of(model)["disk"]]
    for count in (16, 160, 16, 192):
        assert step(model, optimizer, count, count) == step(reference, other, count, count)
        seen.append(plan_of(model)["disk"])
        assert plan_of(model)["predicted_peak"] <= plan_of(model)["budget"]["memory"]
    assert seen[0] > 0 and seen[1] == 0, "what was assumed was too much"
    assert 0 < seen[2] == seen[3] < seen[4]
    assert model.calls == reference.calls, "an estimate leaves nothing"
    assert same_values(values_of(model), values_of(reference))


def test_what_is_refused_leaves_everything_as_it_was():
    model, optimizer = wrapped(everything("300MiB"))
    step(model, optimizer, 16)
    before, calls, plan = values_of(model), list(model.calls), plan_of(model)
    for _ in range(2):
        with pytest.raises(sluice.BudgetError, match=r"this call of Wide is not begun: .*MiB are left for it.*stated.*smaller"):
            model(many(20000))
    assert (model.calls, plan_of(model)) == (calls, plan) and same_values(values_of(model), before)
    assert sluice.torch.engine_of(model).steps == 1
    step(model, optimizer, 16)
    with torch.no_grad():
        model(rows(16))
        with pytest.raises(sluice.BudgetError, match="not begun"):
            model(many(200000))
    model.checkpointed = True
    step(model, optimizer, 16)


class Raises(Wide):
    def forward(self, x, how="own"):
        if how == "own":
            raise UserError("of the model's own")
        if how == "cond":
            one, other = self.layers[0].weight, self.layers[1].weight
            return torch.cond(x.sum() > 0, lambda x: x @ one, lambda x: x @ other, (super().forward(x),))
        if how == "key":
            return {}["no such key"]
        if how == "key in a branch":
            return torch.cond(x.sum() > 0, lambda x: {}["no such key"], lambda x: x, (x,))
        if how == "values":
            try:
                return x * super().forward(x).sum().item()
            except RuntimeError as error:
                raise UserError("of what came before") from error
        return super().forward(x)


class UserError(Exception):
    pass


def test_an_exception_of_the_models_own_comes_as_it_is():
    """Before anything is computed, and the model goes on. What comes of missing values is a refusal that says what to state."""
    model, optimizer = wrapped("2GiB", Raises)
    for how, error in (("own", UserError), ("key", KeyError), ("key in a branch", KeyError)):
        with pytest.raises(error, match="own|no such key"):
            model(rows(2), how=how)
    with pytest.raises(TypeError, match="forward.* missing 1 required positional argument: 'x'"):
        model()
    with pytest.raises(sluice.InvalidArgumentError, match=r"cannot be estimated.*wrap\(reserve="):
        model(rows(2), how="values")
    with pytest.raises(UserError):
        sluice.torch.plan(Raises(), sluice.AdamW(), memory="2GiB", sample_batch=rows(2))
    with pytest.raises(sluice.InvalidArgumentError, match=r"in Raises an operator with bodies \(torch.cond, .*wrap\(reserve="):
        model(rows(2), how="cond")
    model(rows(2), how="none").mean().backward()
    optimizer.step()


def test_anomaly_detection_is_for_what_is_computed():
    """The gradients of an estimate have no values to look at."""
    model, optimizer = wrapped("2GiB")
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        for count in (2, 20):
            step(model, optimizer, count)
        with pytest.raises(RuntimeError, match="returned nan values"):
            (model(rows(2)) - 2).sqrt().mean().backward()


def test_without_disk_a_call_that_does_not_fit_is_refused():
    model, optimizer = sluice.torch.wrap(Wide(), sluice.AdamW(), memory=everything("300MiB"))
    step(model, optimizer, 16)
    with pytest.raises(sluice.BudgetError, match="not begun.*no disk is given"):
        model(many(200))
    step(model, optimizer, 16)
    sluice.torch.close(model)


def test_a_sample_is_what_the_first_plan_is_for_and_no_bound():
    model, optimizer = wrapped(everything("300MiB"), sample_batch=rows(16))
    first = plan_of(model)
    step(model, optimizer, 16)
    assert first["disk"] == 0 == plan_of(model)["disk"]
    step(model, optimizer, 160)
    assert plan_of(model)["disk"] > 0 and plan_of(model)["pytorch"]["reserve"] > first["pytorch"]["reserve"]


def test_a_reserve_is_the_users_word(monkeypatch):
    monkeypatch.setattr("sluice.torch._demand.estimate_call", None)
    model, _ = wrapped("6GiB", Chain, reserve="16MiB")
    loss_of(model, 0).backward()
    assert plan_of(model)["pytorch"]["reserve"] == 16 * MIB


def test_calls_before_one_backward_are_added():
    model, optimizer = wrapped(everything("230MiB"))
    losses = []
    needs = []
    for seed in range(2):
        losses.append(model(rows(64, seed)).square().mean())
        needs.append(plan_of(model)["pytorch"]["reserve"])
    assert needs[0] + 32 * MIB < needs[1]
    update(optimizer, sum(losses))
    plain = Wide()
    sum(plain(rows(64, seed)).square().mean() for seed in range(2)).backward()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    other.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert plan_of(model)["pytorch"]["reserve"] == needs[1]
    step(model, optimizer, 64)


def test_graphs_that_are_gone_do_not_count():
    """Evaluation with gradients leaves such graphs, and so do losses that are kept after their backward pass."""
    model, optimizer = wrapped(everything("400MiB"))
    held = []
    for seed in range(3):
        model(rows(64, seed))
        held.append(model(rows(64, seed)).square().mean())
        held[-1].backward()
        if seed == 0:
            reserve = plan_of(model)["pytorch"]["reserve"]
        with pytest.raises(RuntimeError, match="64x7"):
            model(rows(64)[:, :7])
    optimizer.step()
    optimizer.zero_grad()
    assert plan_of(model)["pytorch"]["reserve"] == reserve


def test_gradients_are_in_the_way_of_another_plan():
    # The reserve is less than the estimate for 256 rows, some 470 MiB. The budget has room for that once units move to disk,
    # and for what earlier tests have left in this process.
    model, optimizer = wrapped(everything("400MiB"))
    model(rows(16)).square().mean().backward()
    before = [p.grad.square().sum() for p in model.parameters()]
    with pytest.raises(sluice.BudgetError, match=r"not begun.*there are gradients"):
        model(rows(256))
    assert all(p.grad.square().sum() == square for p, square in zip(model.parameters(), before, strict=True))
    update(optimizer, model(rows(16)).square().mean())
    step(model, optimizer, 256)


# ---- what may come before the first call, and be in force in it ----


def test_everything_that_may_come_before_the_first_call(tmp_path):
    trained, optimizer = wrapped("6GiB", small_gpt2)
    train(trained, optimizer, language_loss, steps=3)
    checkpoint = sluice.torch.engine_of(trained).save(tmp_path / "run")
    states = trained.state_dict(), optimizer.state_dict()
    expected = train(trained, optimizer, language_loss, steps=2).values

    def as_checkpoint(model, _):
        sluice.torch.engine_of(model).load(checkpoint)

    def as_state_dicts(model, optimizer):
        model.load_state_dict({name: value.clone() for name, value in saved.items()})
        optimizer.load_state_dict(states[1])
        with sluice.torch.full_parameters(model):
            model.lm_head.weight.data.add_(0)
        assert model.lm_head.weight.norm() > 0 and optimizer.state_dict()["param_groups"]
        model.zero_grad()

    sluice.torch.engine_of(trained).load(checkpoint)
    saved = values_of(trained) | {"lm_head.weight": trained.lm_head.weight.detach().clone()}
    for resume in (as_checkpoint, as_state_dicts):
        model, optimizer = wrapped(everything("400MiB", lambda: small_gpt2(seed=7)), lambda: small_gpt2(seed=7))
        addresses = [p.data_ptr() for p in model.parameters()]
        views = [p.detach() for p in model.parameters()]
        resume(model, optimizer)
        model.generate(tokens(0)[:, :8], do_sample=False, max_new_tokens=8)
        assert train(model, optimizer, language_loss, steps=2).values == expected, resume.__name__
        assert addresses == [p.data_ptr() for p in model.parameters()]
        assert all(torch.equal(p, view) for p, view in zip(model.parameters(), views, strict=True))


def test_evaluation_first():
    model, optimizer = wrapped(everything("400MiB"))
    plain = Wide()
    first = plan_of(model)
    with torch.no_grad():
        assert torch.equal(model(rows(64)), plain(rows(64)))
    assert plan_of(model)["pytorch"]["reserve"] == first["pytorch"]["reserve"], "training is still to come"
    step(model, optimizer, 64)
    assert plan_of(model)["pytorch"]["reserve"] < first["pytorch"]["reserve"]
    reading, _ = sluice.torch.wrap(Wide(), memory="6GiB")
    assert torch.equal(reading(rows(64)), plain(rows(64)))
    assert plan_of(reading)["pytorch"]["peak"] < 4 * 64 * WIDTH * FACTORS * 4


def test_checkpointing_and_autocast_count():
    def reserve(checkpointed=False, autocast=False):
        model, _ = wrapped("6GiB", lambda: Wide(checkpointed))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(rows(96))  # planned for before it computes
        return plan_of(model)["pytorch"]["reserve"]

    plain = reserve()
    assert reserve(checkpointed=True) < plain - 32 * MIB
    assert reserve(autocast=True) != plain


@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "inside of forward"])
def test_casts_are_kept_where_they_fit_beside_all_else(inside):
    """The plan has them then, and a quarter more: those of all layers but the first, whose input has no gradient."""

    def make():
        model = Wide(layers=16)
        if inside:
            model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
        return model

    def keeps(count):
        with contextlib.nullcontext() if inside else torch.autocast("cpu", dtype=torch.bfloat16):
            model(rows(count)).float().square().mean().backward()
        model.zero_grad()
        return session.presence.keeps_casts

    model, _ = wrapped("6GiB", make)
    session = sluice.torch._wrap.session_of(model)
    first, casts = session.presence.first_step, 15 * 2 * MIB
    assert keeps(16)
    (found,) = session.demand.in_flight.known.values()
    assert found.casts == casts and first.reserve - session.demand._need(found) >= casts * 5 // 4
    first.room = first.reserve - MIB
    assert not keeps(16)
    first.room = first.reserve
    assert keeps(16)
    assert keeps(80) and first.room > 4 << 30  # by another plan


def test_experts_in_f32_are_estimated():
    """PyTorch's own rule for fakes refuses a _grouped_mm that the CPU takes."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, num_local_experts=4,
    )  # fmt: skip
    model, optimizer = wrapped("6GiB", lambda: transformers.MixtralForCausalLM(config))
    assert len(train(model, optimizer, language_loss, steps=1).values) == 1
    assert plan_of(model)["pytorch"]["peak"] > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_leaves_out_what_is_padded_is_estimated():
    """In evaluation it makes nested tensors, of which there are no fakes."""

    def encoder():
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2).eval()

    (model, _), padded = wrapped("6GiB", encoder), torch.arange(6).expand(2, 6) > 3
    inputs = torch.randn(2, 6, 32)
    with torch.no_grad():
        assert torch.equal(model(inputs, src_key_padding_mask=padded), encoder()(inputs, src_key_padding_mask=padded))
    assert torch.backends.mha.get_fastpath_enabled()


def test_transforms_of_functions_are_not_estimated():
    model, _ = wrapped("6GiB", lambda: torch.nn.Linear(4, 1))
    weight, x = model.weight.detach().clone(), torch.randn(4)
    for call in (lambda: torch.func.vmap(model)(x.expand(2, 4)), lambda: torch.func.jvp(model, (x,), (x,))):
        call()
    assert torch.equal(torch.func.jacfwd(model)(x), weight)


class Batch(collections.namedtuple("Batch", "x")):
    """A class of its own, of which a namedtuple is the base."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sizes_of_all_kinds_of_arguments_are_told_apart():
    module, rows = torch.nn.Linear(4, 4), lambda n: torch.zeros(n, 4)
    kinds = (rows, lambda n: [rows(n)], lambda n: {"x": rows(n)}, lambda n: Batch(rows(n)), lambda n: n,
             lambda n: torch.nn.utils.rnn.pack_sequence([rows(n)]), lambda n: torch.nested.nested_tensor([rows(n), rows(2)]))  # fmt: skip
    for make in kinds:
        (kind, sizes), (same_kind, others) = (_estimate.kind_of(module, (make(n),), {}, True) for n in (3, 5))
        assert kind == same_kind and len(sizes) == len(others) and sizes != others, make(3)


def test_generation_keeps_its_cache_and_estimates_seldom(monkeypatch):
    runs = []
    from sluice.torch import _demand

    estimate = _demand.estimate_call
    monkeypatch.setattr(_demand, "estimate_call", lambda *given, **named: runs.append(1) or estimate(*given, **named))
    plain = small_gpt2()
    model, _ = wrapped("6GiB", small_gpt2)
    ids = tokens(0)[:, :4]
    assert torch.equal(
        model.generate(ids, do_sample=False, max_new_tokens=28), plain.generate(ids, do_sample=False, max_new_tokens=28)
    )
    assert 1 <= len(runs) < 20


# ---- the process's resident peak ----

PROGRAM = """
import faulthandler, tempfile, warnings
import torch
from test_demand import Wide, rows, sluice, step
faulthandler.enable()
def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
warnings.simplefilter("error", RuntimeWarning)
torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)).sum().backward()
"""


@pytest.mark.parametrize("count, extra", [pytest.param(8, 300, marks=pytest.mark.long), (400, 740)])
def test_the_resident_peak_stays_within_what_was_stated(count, extra):
    """The peak keeps to the budget with activations far above what is assumed at first, and far below."""
    program = f"""
        model = Wide()
        memory = status("VmRSS") + ({extra} << 20)
        model, optimizer = sluice.torch.wrap(model, sluice.AdamW(), memory=memory, disk=tempfile.gettempdir())
        step(model, optimizer, {count})
        plan = sluice.torch.engine_of(model).plan()
        print(status("VmHWM") <= memory, plan["pytorch"], (memory - status("VmHWM")) >> 20)
    """
    finished = run_python(PROGRAM + textwrap.dedent(program))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("True"), finished.stdout


@pytest.mark.filterwarnings("ignore:PyTorch took:RuntimeWarning")
def test_the_process_is_looked_at_between_operations_of_one_module(monkeypatch):
    """A loss, or attention, may take and free much between two calls of modules."""

    class Sines(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            for _ in range(20):
                x = (x * self.scale).sin()
            return x.sum()

    model, _ = sluice.torch.wrap(Sines(), sluice.AdamW(), memory="1GiB")
    presence, looks = sluice.torch._wrap.session_of(model).presence, []
    monkeypatch.setattr(presence.keeper, "look", lambda: looks.append(1))
    output = model(torch.ones(4))
    in_forward = len(looks)
    output.backward()
    assert in_forward >= 20 and len(looks) - in_forward >= 20


def test_a_first_step_that_takes_more_than_was_estimated_mends_the_plan():
    """The process takes more for a tensor of the user's, which no estimate sees."""
    model, optimizer = wrapped(everything("200MiB"))
    loss = model(rows(16)).square().mean()
    unseen = torch.ones(52 * MIB)
    loss.backward()
    optimizer.step()
    del unseen
    optimizer.zero_grad()
    taken = plan_of(model)["pytorch"]
    assert taken["measured"] > taken["reserve"]
    step(model, optimizer, 16)
    assert plan_of(model)["pytorch"]["reserve"] >= taken["measured"]
