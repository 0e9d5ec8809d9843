"""What the stages of a pipeline do together in tests: each function is called on every rank (support.rank_pool). Results are what
JSON has."""

import contextlib
import hashlib
import os
import tempfile

import torch
import transformers
from support import sluice_package  # noqa: F401: skips where the library is not built
from torch import nn

import sluice
import sluice.torch
from sluice.torch import _together

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
STEPS, ROWS = 3, 12


def layers():
    """Layers with buffers, with one that writes to its input, and some without parameters."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 24), nn.ReLU(inplace=True), nn.Linear(24, 4)
    )  # fmt: skip


def convolutional():
    return [
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.Sequential(nn.Flatten(), nn.Linear(8, 4)),
    ]  # fmt: skip


class Nested(nn.Module):
    """A layer that takes and gives dicts, lists, tuples, None and numbers. Of two tensors the next layer uses one."""

    def __init__(self, first=False, last=False):
        super().__init__()
        self.first, self.last = first, last
        self.wide, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value):
        x, count = (value, 0) if self.first else (value["x"][0], value["count"])
        if not self.first:
            assert value["x"][1] is value["x"][0] and value["none"] == (None, "text", 0.5) and value["ids"].dtype == torch.int64
            x = x + 0.5 * value["x"][1]
        x = self.wide(x).tanh()
        if self.last:
            return x[:, :4] * count
        return {"x": [x, x], "other": self.unused(x), "none": (None, "text", 0.5), "count": count + 1, "ids": torch.arange(3), "empty": x[:0]}


def nested():
    return [Nested(first=True), Nested(), Nested(), Nested(last=True)]


def gpt2(tied=False):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=4, n_head=2, n_embd=32, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
            max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip


MODELS = {"layers": layers, "convolutional": convolutional, "nested": nested, "gpt2": gpt2, "llama": llama}


def made(name, dtype="float32"):
    torch.manual_seed(3)
    model = MODELS[name]()
    parts = model if isinstance(model, list) else [model]
    for part in parts:
        part.to(getattr(torch, dtype))
    return model


def batch_of(name, step, dtype="float32", rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    if name in ("gpt2", "llama"):
        ids = torch.randint(0, 128, (rows, 8), generator=generator)
        mask = torch.ones(rows, 8, dtype=torch.int64)
        mask[:, :2] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    shape = (rows, 1, 8, 8) if name == "convolutional" else (rows, 16)
    x = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    return x, torch.randn(rows, 4, generator=generator).to(x.dtype)


def loss_fn(output, targets):
    return (output - targets).float().square().mean()


def _loss_of(model, name, part):
    return model(**part).loss if isinstance(part, dict) else loss_fn(model(part[0]), part[1])


def digests(model):
    return {
        name: hashlib.sha256(t.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in model.state_dict().items()
    }


def units_of(model):
    """Every module with parameters of its own is a unit."""
    return {name or "model": [name] for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False)) and name}


def _options(model, place, update, **options):
    made = {"memory": "4GiB", "disk": tempfile.gettempdir(), "place": place, "reserve": "128MiB", "units": units_of(model), "held_units": 2}
    kinds = {"SGD": {"momentum": 0.9}}
    return getattr(sluice, update)(lr=1e-2, **kinds.get(update, {})), made | options


def _scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def _parts(batch, count):
    cut = {k: v.chunk(count) for k, v in batch.items()} if isinstance(batch, dict) else [t.chunk(count) for t in batch]
    return [{k: v[i] for k, v in cut.items()} if isinstance(cut, dict) else tuple(t[i] for t in cut) for i in range(count)]


def whole(name, micro_batches, clip=None, dtype="float32", place="memory", update="AdamW", load=None, save=None, steps=STEPS, first=0, **options):
    """The twin: this process wraps the whole model, and adds up the micro-batches' gradients."""
    model = made(name, dtype)
    model = nn.Sequential(*model) if isinstance(model, list) else model
    settings, given = _options(model, place, update, **options)
    model, optimizer = sluice.torch.wrap(model, settings, ranks=False, **given)
    scheduler, losses, norms = _scheduler(optimizer), [], []
    if load is not None:
        sluice.torch.engine_of(model).load(load)
    for step in range(first, first + steps):
        total = None
        for part in _parts(batch_of(name, step, dtype), micro_batches):
            loss = _loss_of(model, name, part) / micro_batches
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        losses.append(total.item())
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if save is not None and RANK == 0:
        sluice.torch.engine_of(model).save(save)
    found = {"losses": losses, "norms": norms, "values": digests(model)}
    sluice.torch.close(model)
    return found


@contextlib.contextmanager
def _links(kind):
    opened = _together._opened
    if kind == "gloo":
        _together._opened = lambda group: None
    try:
        yield
    finally:
        _together._opened = opened


def piped(
    name, micro_batches, clip=None, dtype="float32", place="memory", update="AdamW", pipeline="1f1b", links=None, load=None, save=None,
    steps=STEPS, first=0, recompute=False, **options
):  # fmt: skip
    """Trains a stage."""
    model = made(name, dtype)
    layers = nn.Sequential(*model) if isinstance(model, list) else model
    settings, given = _options(layers, place, update, **options)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with _links(links):
        pipe = sluice.torch.Pipeline(model, settings, micro_batches=micro_batches, pipeline=pipeline, **given)
    scheduler, losses, norms = _scheduler(pipe.optimizer), [], []
    if load is not None:
        pipe.load(load)
    for step in range(first, first + steps):
        batch = batch_of(name, step, dtype)
        if clip is None:
            losses.append(pipe.train_step(batch, None if isinstance(batch, dict) else loss_fn).item())
        else:
            losses.append(pipe.forward_backward(batch, None if isinstance(batch, dict) else loss_fn).item())
            norms.append(pipe.clip_grad_norm_(clip).item())
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
        scheduler.step()
    if save is not None:
        pipe.save(save)
    found = {"losses": losses, "norms": norms, "values": digests(pipe), "stage": [pipe.stage, pipe.stages]}
    pipe.close()
    return found
