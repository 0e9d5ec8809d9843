"""The loss curve of `sluice train` against torch.optim.AdamW on models of transformers, on the same windows of text.

The order of the windows is made here from docs/formats/tokens.md, and the learning rate from what the flags say:
nothing of the reference comes from the program.
"""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import rounding
from support.perturbed import gpt2, llama, make_model, qwen2
from support.sluice_process import train

LENGTH, BATCH, ACCUMULATE, STEPS, SEED = 16, 2, 2, 20, 0x1234567890
ROWS = LENGTH * BATCH * ACCUMULATE  # tokens of a step
WINDOWS = 30  # 80 samples are two epochs and a part, whose borders lie within steps
PEAK, WARMUP, FINAL_SHARE = 4e-3, 5, 0.1
DECAY, CLIP, BETAS, EPSILON = 0.3, 1.0, (0.9, 0.95), 1e-8

CASES = {
    "gpt2": gpt2(n_positions=32, n_embd=64),
    "llama": llama(hidden_size=64, intermediate_size=112),
    "qwen2-tied": qwen2(hidden_size=64, intermediate_size=112, tie_word_embeddings=True),
}


def philox(counter, key):
    """Philox4x32-10 of Salmon and others (SC11)."""
    mask = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & mask, (a >> 32) ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def halves(number):
    return [number & 0xFFFFFFFF, number >> 32]


def window_of(sample, windows=WINDOWS, seed=SEED):
    epoch, value = divmod(sample, windows)
    h = max(4, math.ceil(math.log2(windows) / 2))
    while True:
        left, right = value >> h, value & ((1 << h) - 1)
        for r in range(8):
            left, right = right, left ^ (philox([right, r, *halves(epoch)], halves(seed))[0] & ((1 << h) - 1))
        value = left << h | right
        if value < windows:
            return value


def learning_rate(step):
    if step <= WARMUP:
        return PEAK * step / WARMUP
    left = 0.5 * (1 + math.cos(math.pi * (step - WARMUP - 1) / (STEPS - WARMUP - 1)))
    return PEAK * (FINAL_SHARE + (1 - FINAL_SHARE) * left)


def make_text(vocabulary):
    """Makes tokens that can be learned: each has two followers. None is 0, which no text holds."""
    random = np.random.default_rng(7)
    followers = random.integers(1, vocabulary, (vocabulary, 2))
    tokens = [1]
    while len(tokens) < WINDOWS * LENGTH + 1 + LENGTH // 2:  # the last window is not whole
        tokens.append(followers[tokens[-1], random.integers(2)])
    return np.array(tokens)


def write_text(folder, tokens, vocabulary):
    """Writes tokens as text where they are bytes, otherwise as nanoGPT's raw uint16."""
    path = folder / ("text.txt" if vocabulary == 256 else "text.bin")
    tokens.astype("u1" if vocabulary == 256 else "<u2").tofile(path)
    return path


class Reference:
    """20 steps of torch.optim.AdamW on f32 values, while `model` computes in its own type."""

    def __init__(self, model, decays=lambda p: p.dim() >= 2, window=window_of, clip=CLIP, scale=1):
        self.model, self.window, self.clip, self.scale = model, window, clip, scale
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        groups = [
            dict(params=[m for m in self.masters.values() if decays(m)], weight_decay=DECAY),
            dict(params=[m for m in self.masters.values() if not decays(m)], weight_decay=0.0),
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)

    def micro_batch(self, tokens, first):
        rows = [self.window(first + i) * LENGTH for i in range(BATCH)]
        windows = torch.tensor(np.stack([tokens[r : r + LENGTH + 1] for r in rows]).astype(np.int64))
        logits = self.model(windows[:, :-1]).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def step(self, tokens, number):
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        total = 0.0
        for k in range(ACCUMULATE):
            loss = self.micro_batch(tokens, ((number - 1) * ACCUMULATE + k) * BATCH) / ACCUMULATE
            total += loss.item()
            self.model.zero_grad()
            (loss * self.scale).backward()
            for name, parameter in self.model.named_parameters():
                self.masters[name].grad += parameter.grad.float() / self.scale
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip).item()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        return total, norm

    def train(self, tokens):
        return np.array([self.step(tokens, number) for number in range(1, STEPS + 1)]).T


class Run:
    """20 steps of the program."""

    def __init__(self, folder, case, dtype="f32"):
        self.model = make_model(CASES, case)
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.save_pretrained(folder / "model")
        vocabulary = self.model.config.vocab_size
        self.tokens = make_text(vocabulary)
        self.lines, self.checkpoint = train(
            model=folder / "model", data=write_text(folder, self.tokens, vocabulary), out=folder / "out",
            seq=LENGTH, batch=BATCH, accumulate=ACCUMULATE, steps=STEPS, seed=SEED, held_out=0, dtype=dtype,
            lr=PEAK, warmup=WARMUP, schedule="cosine", final_lr=FINAL_SHARE, clip=CLIP, weight_decay=DECAY,
            beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, threads=2,
        )  # fmt: skip
        self.losses, self.norms = (np.array([line[key] for line in self.lines]) for key in ("loss", "gradient_norm"))

    def stored(self, file="model"):
        return load_file(self.checkpoint / f"{file}.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = {}

    def get(case, dtype="f32"):
        if (case, dtype) not in made:
            made[case, dtype] = Run(tmp_path_factory.mktemp("run"), case, dtype)
        return made[case, dtype]

    return get


def epsilon_of(case, dtype=None):
    return rounding.of_model(make_model(CASES, case), ROWS, dtype)


def relative(found, expected):
    return np.max(np.abs(found / expected - 1))


def change_errors(found, reference, start):
    """The distance of each tensor from the reference, relative to how far the reference moved."""
    errors = {}
    for name, expected in reference.masters.items():
        difference, change = found[name] - expected, expected - start[name]
        if name.endswith("attn.c_attn.bias"):
            # A bias of keys shifts all scores of a query alike, so that its gradient is nothing but rounding.
            queries_and_values = [t.chunk(3)[i] for t in (difference, change) for i in (0, 2)]
            difference, change = torch.cat(queries_and_values[:2]), torch.cat(queries_and_values[2:])
        errors[name] = (difference.norm() / change.norm()).item()
    return errors


@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_is_that_of_torch(case, run):
    found = run(case)
    reference = Reference(make_model(CASES, case))
    losses, norms = reference.train(found.tokens)
    assert losses[-1] < 0.9 * losses[0]
    assert norms.max() > CLIP, "clipping had nothing to do"
    assert [line["learning_rate"] for line in found.lines] == pytest.approx([learning_rate(i + 1) for i in range(STEPS)])
    epsilon = epsilon_of(case)
    assert relative(found.losses, losses) < rounding.of_losses(epsilon)
    assert relative(found.norms[0], norms[0]) < epsilon
    assert relative(found.norms, norms) < rounding.of_changes(epsilon)
    errors = change_errors(found.stored(), reference, found.start)
    assert max(errors.values()) < rounding.of_changes(epsilon), errors
    assert set(errors) == set(found.stored())


@pytest.mark.parametrize(
    "wrong",
    [
        dict(window=lambda sample: sample % WINDOWS),
        dict(window=lambda sample: window_of(sample, seed=SEED & 0xFFFFFFFF)),
        dict(decays=lambda p: True),
        dict(decays=lambda p: False),
        dict(clip=math.inf),
    ],
    ids=["order", "seed", "all-decay", "no-decay", "no-clip"],
)
def test_another_training_has_another_curve(wrong, run):
    found = run("gpt2")
    losses, _ = Reference(make_model(CASES, "gpt2"), **wrong).train(found.tokens)
    assert relative(found.losses, losses) > rounding.of_losses(epsilon_of("gpt2"))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_narrow_type_follows_f32_and_keeps_f32_masters(dtype, run, case="gpt2"):
    torch_type, scale = {"bf16": (torch.bfloat16, 1), "f16": (torch.float16, 65536)}[dtype]
    found = run(case, dtype)
    epsilon = epsilon_of(case, torch_type)
    of_losses = rounding.of_losses(rounding.of_mean(epsilon, ROWS))
    assert relative(found.losses, run(case).losses) < of_losses
    assert np.any(found.losses != run(case).losses)
    reference = Reference(make_model(CASES, case).to(torch_type), scale=scale)
    with torch.no_grad():
        for name, parameter in make_model(CASES, case).named_parameters():
            reference.masters[name].copy_(parameter)
    losses, norms = reference.train(found.tokens)
    assert relative(found.losses, losses) < of_losses
    assert relative(found.norms, norms) < rounding.of_losses(epsilon)
    assert [line.get("loss_scale") for line in found.lines] == [scale if dtype == "f16" else None] * STEPS
    parameters, masters = found.stored(), found.stored("optimizer.master")
    errors = change_errors(masters, reference, found.start)
    assert max(errors.values()) < rounding.of_changes(epsilon), errors
    for name, master in masters.items():
        assert master.dtype == torch.float32 and parameters[name].dtype == torch_type
        assert torch.equal(master.to(torch_type), parameters[name]), name
        assert not torch.equal(master.to(torch_type).float(), master), name
    assert set(masters) == set(parameters)
