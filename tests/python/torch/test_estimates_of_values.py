"""A model that chooses by integers, flags or its arguments what it computes is estimated: these have values in an estimate."""

import pytest
import torch
from support import fake_gpu

import sluice
import sluice.torch
from sluice.torch._estimate import estimate

WIDTH, ROWS = 16, 64
MIB = 1 << 20


class Chooses(torch.nn.Module):
    """Computes one linear layer on what `choose` makes of the rows."""

    def __init__(self, choose):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.choose = choose
        self.register_buffer("places", torch.arange(ROWS))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, ids):
        self.seen += 1
        return self.layer(self.choose(self, x, ids)).square().mean()


def by_flags_that_are_written(_, x, ids):
    chosen = torch.zeros(len(ids), dtype=torch.bool)
    chosen[ids > 0] = True
    return x[chosen]


CHOICES = {
    "mask": lambda _, x, ids: x[ids > 0],
    "places": lambda _, x, ids: x.index_select(0, (ids > 0).nonzero().squeeze(1)),
    "places of a buffer": lambda model, x, ids: x[model.places[ids > 0]],
    "masked_select": lambda _, x, ids: x.masked_select((ids > 0)[:, None]).view(-1, WIDTH),
    "a number": lambda _, x, ids: x[: (ids > 0).sum().item()],
    "numbers": lambda _, x, ids: torch.cat([x[place : place + 1] for place in (ids > 0).nonzero().flatten().tolist()]),
    "a tensor of numbers": lambda _, x, ids: x[torch.tensor([place for place in (ids > 0).nonzero().flatten()])],
    "lengths": lambda _, x, ids: x.split([int((ids > 0).sum()), int((ids <= 0).sum())])[0],
    "repeats": lambda _, x, ids: x.repeat_interleave((ids > 0).long(), dim=0),
    "the numbers of an argument": lambda _, x, ids: x[(x != 0).any(dim=1)],
    "flags that are written": by_flags_that_are_written,
}


def batch(chosen, rows=ROWS):
    """So many rows, of which the first ones are chosen, and not zeros."""
    ids = (torch.arange(rows) < chosen).long()
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)) * ids[:, None], ids


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_what_is_chosen_by_values_is_estimated(choose):
    """More rows that are chosen take more; the model, its buffers and its arguments stay as they are."""
    model = Chooses(choose).train()
    given = batch(8)
    kept = [tensor.clone() for tensor in given]
    few, many = (estimate(model, batch(chosen), True).peak for chosen in (8, ROWS))
    estimate(model, given, True)
    assert many - few >= (ROWS - 8) * WIDTH * 4, "the product of the rows that were chosen"
    assert model.seen == 0 and torch.equal(model.places, torch.arange(ROWS))
    assert all(map(torch.equal, given, kept))


def check_losses(make, losses_of):
    """Checks that a wrapped model has those of a plain one: its calls' estimates change nothing."""
    losses = []
    for is_wrapped in (False, True):
        torch.manual_seed(1)
        model = make()
        if is_wrapped:
            model, _ = sluice.torch.wrap(model, sluice.AdamW(lr=1e-3), memory="2GiB")
        torch.manual_seed(2)
        losses.append([loss.item() for loss in losses_of(model.train())])
    assert losses[0] == losses[1]


@fake_gpu.cpu_alone("on a GPU calls are not estimated")
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_wrapped_model_chooses_as_a_plain_one(choose):
    def losses(model):
        yield from (model(*batch(chosen)) for chosen in (8, 40))
        assert model.seen == 2

    check_losses(lambda: Chooses(choose), losses)


def test_what_a_call_writes_to_an_argument_is_not_written_by_its_estimate():
    def choose(_, x, ids):
        ids[:4] = 0
        x[0] = 1
        return x[ids > 0]

    model, given = Chooses(choose).train(), batch(8)
    kept = [tensor.clone() for tensor in given]
    few, many = (estimate(model, batch(chosen), True).peak for chosen in (8, ROWS))
    estimate(model, given, True)
    assert many > few and all(map(torch.equal, given, kept))


def test_generators_of_the_models_own_are_left_alone():
    """Otherwise the real call would draw other numbers."""
    own = torch.Generator().manual_seed(3)

    def choose(_, x, ids):
        places = torch.randperm(len(x), generator=own) + torch.randint(0, 1, (len(x),), generator=own)
        return x[places] * torch.rand(1, generator=own)

    before = own.get_state()
    estimate(Chooses(choose), batch(8), True)
    assert torch.equal(own.get_state(), before)


def test_results_and_statistics_that_are_written_into_arguments_are_those_of_the_call():
    """An estimate writes them nowhere, also where a schema does not tell that something is written."""

    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x, out, mean, variance, counts):
            torch.mul(x, 2, out=out)
            counts.view(-1)[:1].add_(1)
            return torch.nn.functional.batch_norm(self.layer(x), mean, variance, training=True).square().mean() + out.sum()

    given = [torch.ones(4, WIDTH), torch.ones(4, WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH), torch.zeros(2, dtype=torch.long)]
    kept = [tensor.clone() for tensor in given]
    estimate(Writes().train(), tuple(given), True)
    assert all(map(torch.equal, given, kept))


def test_a_tensor_is_made_of_numbers_as_pytorch_does():
    shapes = []

    def choose(_, x, ids):
        made = torch.tensor([ids[:1] + 7, ids[1:2], ids.sum()])
        shapes.append((made.shape, made.tolist()))
        return x

    estimate(Chooses(choose), batch(8), True)
    assert shapes == [((3,), [8, 1, 8])]


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch was built without CUDA, and does not compare a GPU's tensors")
def test_places_for_a_gpu_are_there(monkeypatch):
    """An estimate for a GPU takes the values of tensors on the CPU, and those that it makes are on the GPU. (Backward needs one.)"""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    for name in ("places", "masked_select", "a number", "numbers", "repeats"):
        model = Chooses(CHOICES[name]).train()
        few, many = (estimate(model, batch(chosen), False, torch.device("cuda", 0)).peak for chosen in (8, ROWS))
        assert many > few


WRITES = {
    "copied": lambda flags, found: flags.copy_(found),
    "copied into a view": lambda flags, found: flags.view(-1).copy_(found),
    "set at a place": lambda flags, found: flags.__setitem__(slice(4), found[:4]),
    "set by a mask": lambda flags, found: flags[:32].masked_fill_(found[:32], True),
    "computed into": lambda flags, found: torch.logical_or(found, found, out=flags),
    "set in a part": lambda flags, found: flags.split(ROWS // 2)[0].copy_(found[: ROWS // 2]),
    "set as data": lambda flags, found: setattr(flags, "data", found),
}


def after(write):
    """Chooses by flags into which something unknown was written, as all tensors of that memory see it."""

    def choose(model, x, ids):
        flags = torch.zeros(ROWS, dtype=torch.bool)
        other = flags.view(-1)
        write(flags, model.layer(x).sum(1) > 0)
        return x[flags if write is WRITES["set as data"] else other]

    return choose


def by_a_loop_that_waits(model, x, ids):
    done = torch.zeros(2, dtype=torch.bool)
    while not done.all():
        for row in range(2):
            done[row] = model.layer(x)[row].norm() < 1e9
    return x


def by_infinities(model, x, ids):
    scores = model.layer(x).masked_fill(ids[:, None] > 0, -torch.inf)
    return x[(scores == -torch.inf).all(1)]


def by_the_last_of_many_tensors(_, x, ids):
    """With all that it keeps an estimate takes some tens of MiB."""
    kept = [torch.full((1 << 20,), step) for step in range(100)]
    return x[: int(kept[-1][0])]


UNKNOWN = {
    "results": lambda model, x, ids: x[: int(model.layer(x).sum())], "a loop that waits": by_a_loop_that_waits, "infinities": by_infinities,
    "the last of many tensors": by_the_last_of_many_tensors, **{name: after(write) for name, write in WRITES.items()},
}  # fmt: skip


@pytest.mark.parametrize("choose", UNKNOWN.values(), ids=UNKNOWN)
def test_what_depends_on_unknown_values_is_refused(choose):
    with pytest.raises(sluice.InvalidArgumentError, match="in Chooses its operations depend on values"):
        estimate(Chooses(choose), batch(8), True)


def test_large_masks_have_no_values():
    """An estimate takes little memory itself."""
    rows = 3000
    assert rows * rows > 8 * MIB
    with pytest.raises(sluice.InvalidArgumentError, match="depend on values"):
        estimate(Chooses(lambda _, x, ids: x[(ids[:, None] > ids[None]).any(dim=1)]), batch(8, rows), True)


def test_an_operation_that_a_gpu_alone_has_is_estimated_without_values():
    """It has a rule for its shapes, as all that is estimated, and nothing for the CPU."""

    @torch.library.custom_op("sluice_tests::places", mutates_args=(), device_types="cuda")
    def places(ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @places.register_fake
    def _(ids):
        return torch.empty_like(ids)

    with pytest.raises(NotImplementedError):
        places(torch.ones(4, dtype=torch.int64))
    assert estimate(Chooses(lambda _, x, ids: x + places(ids)[:, None]), batch(8), True).peak > 0
    with pytest.raises(sluice.InvalidArgumentError, match="depend on values"):
        estimate(Chooses(lambda _, x, ids: x[: int(places(ids).sum())]), batch(8), True)


class Listens(torch.nn.Module):
    """A loss over lengths (CTC), and layers that chance leaves out."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, targets, lengths):
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                x = x + layer(x)
        steps = torch.full((x.shape[1],), len(x))
        return {"loss": torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, steps, lengths)}


@fake_gpu.cpu_alone("on a GPU calls are not estimated")
def test_a_loss_over_lengths_and_layers_left_out_by_chance_are_estimated():
    x, targets = torch.randn(20, 3, WIDTH), torch.randint(1, WIDTH, (3, 6))
    check_losses(Listens, lambda model: [model(x, targets, torch.tensor([6, 2, 4]))["loss"]])
    short, long = (estimate(Listens().train(), (x, targets, torch.full((3,), n)), True).peak for n in (1, 6))
    assert long > short


def llava():
    import transformers as t

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    vision = t.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    model = t.LlavaForConditionalGeneration(
        t.LlavaConfig(vision_config=vision, text_config=t.LlamaConfig(**sizes, vocab_size=100), image_token_index=99, image_token_id=99)
    )
    ids = torch.randint(0, 90, (2, 12))
    ids[:, 2:6] = 99
    return model, dict(input_ids=ids, pixel_values=torch.randn(2, 3, 16, 16), labels=ids, attention_mask=torch.ones_like(ids))


def longformer():
    import transformers as t

    sizes = dict(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = t.LongformerForSequenceClassification(t.LongformerConfig(**sizes, attention_window=8, max_position_embeddings=70))
    ids = torch.randint(2, 90, (2, 32))
    return model, dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1]))


@fake_gpu.cpu_alone("on a GPU calls are not estimated")
@pytest.mark.parametrize("make", [llava, longformer])
def test_models_that_the_guide_names_need_no_reserve(make):
    _, given = make()
    check_losses(lambda: make()[0], lambda model: [model(**given).loss])
