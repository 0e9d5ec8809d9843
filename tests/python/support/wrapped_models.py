"""Small models for the tests of sluice.torch, a user's loop, and the same loop on plain PyTorch."""

import contextlib
import tempfile

import torch
import transformers
from support import fake_gpu, rounding
from support import sluice_package  # noqa: F401: skips where the library is not built

import sluice
import sluice.torch

transformers.logging.set_verbosity_error()
TERMS = 0.1  # the size of the terms, which may cancel, in sums of small models' gradients
torch.set_num_threads(2)


def small_gpt2(seed=1, n_layer=3, n_embd=128):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=n_layer, n_head=4, n_embd=n_embd, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def on_meta(make):
    with torch.device("meta"):
        return make()


def update(optimizer, loss):
    """Does with a loss what a user's loop does."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tokens(step, rows=2):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (rows, 32), generator=generator)


def language_loss(model, step):
    ids = tokens(step)
    return model(ids, labels=ids).loss


def wrap(model, place, optimizer=None, **options):
    """Wraps a model, with everything in memory or on disk."""
    given = {"memory": "6GiB", "disk": tempfile.gettempdir(), "place": place, "reserve": "256MiB"} | options
    on_meta = isinstance(model, torch.nn.Module) and all(p.is_meta for p in model.parameters())
    return sluice.torch.wrap(model, optimizer or sluice.AdamW(lr=1e-3), **fake_gpu.placed(on_meta, **given))


def units_of_modules(model):
    """Makes every module with parameters of its own a unit, so that a small model has many."""
    taken, units = set(), {}
    for name, module in model.named_modules():
        own = {f"{name}.{n}" if name else n: p for n, p in module.named_parameters(recurse=False) if id(p) not in taken}
        taken.update(id(p) for p in own.values())
        if own:
            units[name or "model"] = list(own)
    return units


def readable(model):
    """A `with` in which the model's parameters can be read and written between steps: on a GPU full_parameters()."""
    sessions = [p._sluice for p in model.parameters() if hasattr(p, "_sluice") and p._sluice.engine.gpu is not None]
    return sluice.torch.full_parameters(sessions[0].model()) if sessions else contextlib.nullcontext()


def values_of(model):
    with readable(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_values(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Losses:
    """Compares what each step of a run noted with another's. epsilon: that of the model that was trained."""

    def __init__(self, values, epsilon):
        self.values, self.epsilon = values, epsilon

    def close_to(self, other):
        return rounding.near(self.values, other.values, rounding.of_losses(self.epsilon))


def train(model, optimizer, loss_of, steps=8, accumulate=1, clip=None, scheduler=None, rows=64, dtype=None):
    """A user's loop. rows and dtype: for rounding.of_model; losses are means over rows."""
    seen = []
    for step in range(steps):
        for part in range(accumulate):
            loss = loss_of(model, step * accumulate + part) / accumulate
            loss.backward()
            seen.append(loss.item())
        if clip is not None:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    epsilon = rounding.of_model(model, rows)
    return Losses(seen, epsilon if dtype is None else rounding.of_mean(rounding.of_model(model, rows, dtype), rows))


def plain_optimizer(model, lr=1e-3):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def outcome(place, make, loop, **options):
    """Returns what `loop(model, optimizer, note)` notes, and the parameters and buffers after it, as one flat list of tensors. Place
    None stands for plain PyTorch."""
    torch.manual_seed(3)
    model = make()
    if place is None:
        optimizer = plain_optimizer(model)
    else:
        optimizer = wrap(model, place, **({"units": units_of_modules(model), "held_units": 2} | options))[1]
    noted = []
    loop(model, optimizer, lambda value: noted.append(torch.as_tensor(value).detach().clone()))
    noted += [*values_of(model).values()] + [b.clone() for b in model.buffers()]
    if place is not None:
        sluice.torch.close(model)
    return noted


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_as_plain(make, loop, **options):
    """Checks that memory and disk give the same bits, and nearly those of plain PyTorch: both compute with the same
    kernels, so that they differ by the last bits of updates, and by what follows from these."""
    plain = outcome(None, make, loop)
    memory = outcome("memory", make, loop, **options)
    assert same(memory, outcome("disk", make, loop, **options))
    torch.manual_seed(3)
    model = make()
    epsilon = rounding.of_model(model, rows=16)
    start = [p.detach().clone() for p in model.parameters()]
    after = len(plain) - len(start) - len(list(model.buffers()))
    assert len(memory) == len(plain)
    for i, (found, expected) in enumerate(zip(memory, plain, strict=True)):
        if 0 <= i - after < len(start):
            rounding.assert_moved_alike(found, expected, start[i - after], epsilon, f"parameter {i - after}")
        else:
            rounding.assert_near(found, expected, rounding.of_losses(epsilon), terms=TERMS, what=f"value {i}")


def check_steps(model, optimizer, plain, loss_of, steps, rows, lr=1e-3):
    """A wrapped model beside a plain one, step by step from the same values: the losses and gradients agree as far as their
    type goes, and AdamW by PyTorch, over f32 copies and with the wrapped model's gradients, makes the same values of them.
    So no step's rounding is fed into the next, where bf16 would make hundreds of times as much of it."""
    names = [name for name, p in plain.named_parameters() if p.requires_grad]
    theirs = dict(plain.named_parameters())
    masters = {name: theirs[name].detach().float() for name in names}
    reference = torch.optim.AdamW(masters.values(), lr=lr)
    epsilon = rounding.of_model(plain, rows)
    for step in range(steps):
        found, expected = loss_of(model, step), loss_of(plain, step)
        found.backward()
        expected.backward()
        assert rounding.near(found.item(), expected.item(), rounding.of_mean(epsilon, rows))
        ours = dict(model.named_parameters())
        for name in names:
            gradient = (ours[name].grad + 0).to(theirs[name].dtype)
            rounding.assert_near(gradient, theirs[name].grad, epsilon, what=f"step {step}, gradient of {name}")
            masters[name].grad = gradient.float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        plain.zero_grad()
        for name, value in values_of(model).items():
            if name not in masters:
                assert torch.equal(value, theirs[name]), f"{name} is frozen"
                continue
            made = masters[name].to(value.dtype)
            rounding.assert_updated_alike(value, made, step + 1, lr, f"step {step}, {name}")
            theirs[name].data.copy_(value)
