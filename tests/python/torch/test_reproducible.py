"""wrap(reproducible=True): the same bits at any number of ranks."""

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.over_ranks_models import Normed

import sluice
import sluice.torch
from sluice.torch._gradients import Arrived
from sluice.torch._session import Session

ALL = 6  # micro-batches of a step


def trained(pool, name="gpt2", steps=2, accumulate=ALL, **options):
    """Returns the results that all ranks have alike, with their losses in the order of the micro-batches."""
    ranks = pool.call("train", name=name, steps=steps, accumulate=accumulate, reproducible=True, **options)
    assert len({(each["digest"], tuple(each["norms"]), each["scale"]) for each in ranks}) == 1
    share = accumulate // len(ranks)
    losses = [loss for step in range(steps) for each in ranks for loss in each["losses"][step * share :][:share]]
    return ranks[0] | {"losses": losses}


class Hidden(torch.autograd.Function):
    """Computes a loss, and its backward pass, out of autograd's sight."""

    @staticmethod
    def forward(ctx, x, model):
        with torch.enable_grad():
            ctx.loss = model(x.detach()).square().mean()
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.loss.backward(gradient)
        return None, None


def test_a_backward_pass_within_an_unknown_one_is_refused_and_not_counted():
    torch.manual_seed(1)
    x = torch.ones(4, 16, requires_grad=True)

    def values(hidden):
        torch.manual_seed(2)
        model, optimizer = sluice.torch.wrap(
            torch.nn.Linear(16, 4), sluice.SGD(lr=0.1), memory="4GiB", reserve="64MiB", reproducible=True, accumulate=1
        )
        for _ in range(hidden):
            with pytest.raises(sluice.StateError, match="within another one of which Sluice knew nothing"):
                Hidden.apply(x, model).backward()
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sluice.torch.close(model)
        return model.weight.detach().clone()

    assert torch.equal(values(2), values(0))


@pytest.mark.parametrize("of, method", [(Arrived, "begin_pass"), (Session, "end_backward")])
def test_where_a_failed_backward_pass_is_handled_the_model_trains_on_and_is_closed(of, method, monkeypatch):
    """The error's traceback has the variables of what runs when a pass begins or ends."""
    proper, left = getattr(of, method), [sluice.StateError("rank 1 is gone")]

    def failing_once(self):
        if left:
            raise left.pop()
        proper(self)

    monkeypatch.setattr(of, method, failing_once)
    model, optimizer = sluice.torch.wrap(
        torch.nn.Linear(16, 4), sluice.SGD(lr=0.1), memory="4GiB", reserve="64MiB", reproducible=True, accumulate=1
    )
    with pytest.raises(ValueError, match="handled"):
        try:
            model(torch.ones(4, 16)).square().mean().backward()
        except sluice.StateError as error:
            optimizer.zero_grad()
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            sluice.torch.close(model)
            raise ValueError("handled") from error


def test_any_number_of_ranks_gives_the_same_bits_at_every_stage(pools):
    expected = trained(pools[1], clip=0.1)
    assert expected["digest"] != pools[1].call("train", steps=2, accumulate=ALL, clip=0.1)[0]["digest"]  # another order
    for size, stage, place in ((1, None, "disk"), (2, 3, "disk"), (3, 1, "memory")):
        found = trained(pools[size], clip=0.1, place=place, **({} if stage is None else {"stage": stage}))
        assert found == expected, f"{size} ranks, stage {stage}, {place}"


@pytest.mark.parametrize("options", [
    {"name": "llama", "update": "Adafactor"},
    {"name": "experts", "to_none": False},
    {"update": "SGD", "clip": 0.5, "infinite": 1},
    pytest.param({"name": "mixtral", "state": "8bit"}, marks=pytest.mark.long),
    pytest.param({"update": "Muon"}, marks=pytest.mark.long),
])  # fmt: skip
def test_every_optimizer_and_experts_give_the_same_bits(pools, options):
    assert trained(pools[3], stage=3, **options) == trained(pools[1], **options)


def test_gloo_gives_the_same_bits(pools):
    assert trained(pools[3], links="gloo", stage=1, clip=0.1) == trained(pools[1], clip=0.1)


def test_a_backward_pass_within_another_is_no_micro_batch(pools):
    assert trained(pools[2], name="reentrant", clip=0.1, stage=2) == trained(pools[1], clip=0.1)


@pytest.mark.parametrize("what, says", [
    ("early", "gradients are used after 1 micro-batches of rank 0, and a step has 2 of each rank"),
    ("late", "is added after this rank's 2 micro-batches of the step have ended"),
    ("writes", "is to be written, and the model was wrapped with reproducible=True"),
    ("sets", "is to be written, and the model was wrapped with reproducible=True"),
    ("adds", "StateError"),
    ("kept", "is added to one that was used or kept over a step"),
])  # fmt: skip
def test_what_depends_on_the_ranks_is_refused(pools, what, says):
    for text, goes_on in pools[2].call("unreproducible", what=what):
        assert text is not None and text.startswith("StateError") and says in text and goes_on


@pytest.mark.parametrize("options, says", [
    ({"reproducible": True}, "options.micro_batches is 0 with options.reproducible"),
    ({"reproducible": True, "accumulate": 3}, "options.micro_batches is 3"),
    ({"accumulate": 3}, "options.micro_batches is 3"),
    ({"accumulate": -2}, "accumulate"),
    ({"reproducible": True, "accumulate": 4, "update_in_backward": True}, "update_in_backward"),
])  # fmt: skip
def test_what_cannot_be_is_refused(pools, options, says):
    for text, same in pools[2].call("refusal", **options):
        assert same and says in text


def test_ranks_that_compute_otherwise_are_refused(pools):
    for text in pools[2].call("other_threads"):
        assert "torch.get_num_threads(), with reproducible=True, is '2' on rank 1, and '1' on rank 0" in text


def test_running_statistics_are_refused():
    given = {"memory": "4GiB", "reserve": "64MiB", "reproducible": True, "accumulate": 4}
    with pytest.raises(sluice.InvalidArgumentError, match="'norm' .BatchNorm1d. keeps running statistics"):
        sluice.torch.wrap(Normed(), sluice.AdamW(), **given)
    model, _ = sluice.torch.wrap(Normed().eval(), sluice.AdamW(), **given)
    model(torch.ones(4, 16))
    with pytest.raises(sluice.InvalidArgumentError, match="'norm' .BatchNorm1d. keeps running statistics"):
        model.train()(torch.ones(4, 16))
    sluice.torch.close(model)


class Counting(torch.nn.Linear):
    """Counts its calls in a buffer, in one of several ways."""

    def __init__(self, how, persistent=True):
        super().__init__(16, 16)
        self.how = how
        self.register_buffer("calls", torch.zeros(1), persistent=persistent)

    def forward(self, x):
        if self.how == "writes":
            self.calls += 1
        elif self.how == "replaces":
            self.calls = self.calls + 1
        return super().forward(x)


def wrapped_last(module, train=True):
    """A model whose last module that is, with one micro-batch of each step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), module)
    model[1].train(train)
    given = {"memory": "4GiB", "reserve": "64MiB", "reproducible": True, "accumulate": 1}
    return sluice.torch.wrap(model, sluice.AdamW(), **given)


@pytest.mark.parametrize("make, says", [
    (lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 16)),
     "'1.parametrizations.weight.0' ._SpectralNorm. has changed its buffer '_[uv]'"),
    (lambda: Counting("writes"), "'1' .Counting. has changed its buffer 'calls'"),
    (lambda: Counting("replaces"), "'1' .Counting. has changed its buffer 'calls'"),
])  # fmt: skip
def test_buffers_that_a_forward_pass_changes_are_refused_while_it_trains(make, says):
    model, _ = wrapped_last(make())
    with pytest.raises(sluice.InvalidArgumentError, match=says):
        model(torch.ones(4, 16))
    model.eval()
    model(torch.ones(4, 16))
    sluice.torch.close(model)


@pytest.mark.parametrize("how", ["saved", "kept", "alike"])
def test_buffers_that_differ_are_refused_on_all_ranks(pools, how):
    for text in pools[2].call("buffer_of_rank", how=how):
        if how == "alike":
            assert text is None
        else:
            assert text.startswith("StateError: the buffer 'transformer.changed' of 'transformer' (GPT2Model) has other values on rank 1")
