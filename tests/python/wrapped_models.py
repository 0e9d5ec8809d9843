"""What the tests of sluice.torch share: small models, a loop as users have it, and the same loop on plain PyTorch."""

import tempfile

import sluice_package  # noqa: F401: finds the package
import torch
import transformers

import sluice
import sluice.torch

transformers.logging.set_verbosity_error()
torch.set_num_threads(2)


def small_gpt2(seed=1):
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=3, n_head=4, n_embd=128, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip


def tokens(step, rows=2):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (rows, 32), generator=generator)


def language_loss(model, step):
    ids = tokens(step)
    return model(ids, labels=ids).loss


def wrap(model, place, optimizer=None, **options):
    """Wrapped, everything in memory or on disk."""
    given = {"memory": "6GiB", "disk": tempfile.gettempdir(), "place": place, "reserve": "256MiB"} | options
    return sluice.torch.wrap(model, optimizer or sluice.AdamW(lr=1e-3), **given)


def units_of_modules(model):
    """Every module that has parameters of its own is a unit, so that a small model has many."""
    taken, units = set(), {}
    for name, module in model.named_modules():
        own = {f"{name}.{n}" if name else n: p for n, p in module.named_parameters(recurse=False) if id(p) not in taken}
        taken.update(id(p) for p in own.values())
        if own:
            units[name or "model"] = list(own)
    return units


def values_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_values(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Losses:
    """What each step of a run gave, held against another's."""

    def __init__(self, values):
        self.values = values

    def close_to(self, other, tolerance=1e-5):
        return len(self.values) == len(other.values) and all(
            abs(a - b) <= tolerance * abs(b) for a, b in zip(self.values, other.values, strict=True)
        )


def train(model, optimizer, loss_of, steps=20, accumulate=1, clip=None, scheduler=None):
    """The user's loop."""
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
    return Losses(seen)


def plain_optimizer(model, lr=1e-3):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def outcome(place, make, loop, **options):
    """What `loop(model, optimizer, note)` notes, and the parameters and buffers after it, as one flat list of tensors.
    Place None: plain PyTorch."""
    torch.manual_seed(3)
    model = make()
    if place is None:
        optimizer = plain_optimizer(model)
    else:
        optimizer = wrap(model, place, **({"units": units_of_modules(model), "held_units": 2} | options))[1]
    noted = []
    loop(model, optimizer, lambda value: noted.append(torch.as_tensor(value).detach().clone()))
    noted += [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    if place is not None:
        sluice.torch.close(model)
    return noted


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_as_plain(make, loop, **options):
    """In memory and on disk the same bits, and what plain PyTorch gives."""
    plain = outcome(None, make, loop)
    memory = outcome("memory", make, loop, **options)
    assert same(memory, outcome("disk", make, loop, **options))
    assert len(memory) == len(plain)
    for found, expected in zip(memory, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
