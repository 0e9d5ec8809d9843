#!/usr/bin/env python3
"""Compares two ranks of one thread each that share out the layers of a Llama: `sluice train --mesh tensor=2`, and PyTorch's
parallelize_module() over Gloo, as torchtitan's parallelize_llama() calls it; and beside them one rank of Sluice with two threads, which
computes as much and sends nothing (goal: two ranks take at most 1.10 of its time).

    alone            one rank of Sluice with as many threads as there are ranks
    sluice           ranks of Sluice along tensor, which choose what they partition
    sluice stage 3   the same with parameters, gradients and the optimizer's state partitioned, as those of PyTorch's ranks are
    torch            queries, keys, values, gate and up by columns, the layers after them by rows; embedding and head by the vocabulary, with
                     loss_parallel(); norms by each rank alike
    torch sequence   the same with SequenceParallel norms: a rank has its part of each sequence there
    sluice half      with the disk, and half of the memory that a rank of "torch" took in this round as the budget
    sluice narrow    with --dtype bf16: parameters and the optimizer's state in bf16 without masters
    torch narrow     with --dtype bf16: the same, which is the least that PyTorch can do
    products         with f32: the matrix products of the linear layers alone, by oneDNN: what a step cannot go below

With bf16 the other sides keep f32 values: Sluice as masters; PyTorch computes by autocast, as torchtitan does for such ranks.

    llama      12 layers of 768, 12 heads, hidden layers of 2048, a vocabulary of 32,000
    llama-gqa  the same with 4 heads of keys and values
    tiny       2 layers of 128: it shows that the bench works, and no time

Sides begin with the same values, have the same AdamW and clipping, and train in each step on the same windows, which are all of the data, so
that their losses must agree: each within 1e-4 of the first side's with f32, and within 2e-2 with bf16, whose products are rounded to 8 bits;
else the exit status is 1. Sides take turns; each round has processes of its own, whose first step is not counted. Figures are medians. Memory
is the greatest peak of a rank (VmHWM), for PyTorch in its steps alone. --json prints JSON, whose "run" is for docs/benchmarks/runs.json.

    .venv/bin/python bench/python/tensor_vs_peers.py --case llama-gqa --dtype bf16 --rounds 3 --steps 4
"""
import contextlib
import gc
import json
import sys
import time

from products_alone import products_side
from side_by_side import (add_half, forget_peak, medians, options_of, parser_of, peak_bytes, ran_by_turns, run_entry, sluice_ranks, tell,
                          temporary_folder, torch_ranks)

RANKS = 2
LR, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
# Layers, width, heads, heads of keys and values, width of the hidden layers, words of the vocabulary.
CASES = {"llama": (12, 768, 12, 12, 2048, 32000), "llama-gqa": (12, 768, 12, 4, 2048, 32000), "tiny": (2, 128, 4, 2, 352, 512)}
# The tolerance of a loss: sums in other orders, and with bf16 products of rounded values, differ by at most that.
LOSS_TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}
ALONG_TENSOR = ("--mesh", f"tensor={RANKS}", "--threads", 1)
NARROW = ("--state", "bf16", "--master", "none")
OF_SLUICE = {"alone": ("--threads", RANKS), "sluice": ALONG_TENSOR, "sluice stage 3": (*ALONG_TENSOR, "--stage", 3),
             "sluice narrow": (*ALONG_TENSOR, *NARROW)}
OF_TORCH = ("torch", "torch sequence", "torch narrow")
OF_ALL = ("alone", "torch", "torch sequence", "products")
PEERS = {"torch": ("products",), "sluice": OF_ALL, "sluice stage 3": OF_ALL, "sluice half": OF_ALL, "sluice narrow": ("torch narrow",)}


def sides_of(dtype):
    """Returns the names of the sides with this type, in the order of their turns."""
    names = ("alone", "sluice", "torch", "sluice half", "sluice stage 3", "torch sequence")
    return (*names, "products") if dtype == "f32" else (*names, "sluice narrow", "torch narrow")


def arguments():
    parser = parser_of(__doc__, batch=4, seq=256, rounds=3, steps=4, memory="8GiB")
    parser.add_argument("--case", choices=CASES, default="llama", help="the shape, by default llama")
    parser.add_argument("--dtype", choices=LOSS_TOLERANCE, default="f32", help="type of what is computed, by default f32")
    parser.add_argument("--sides", default="", help="only these, separated by commas, as in \"alone,sluice,torch\"")
    a = parser.parse_args()
    known = sides_of(a.dtype)
    a.sides = a.sides.split(",") if a.sides else list(known)
    if unknown := [side for side in a.sides if side not in known]:
        parser.error(f"--sides: '{unknown[0]}' is none; with {a.dtype} there are {', '.join(known)}")
    if "sluice half" in a.sides and "torch" not in a.sides:
        parser.error("--sides: 'sluice half' has half of the memory of 'torch', which must be there, too")
    return a


def write_first_values(case, seq, folder):
    """Writes the model with which all sides begin, as a folder of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    layers, width, heads, kv_heads, hidden, words = CASES[case]
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads,
                                 intermediate_size=hidden, vocab_size=words, max_position_embeddings=seq, rms_norm_eps=1e-5,
                                 tie_word_embeddings=False)).save_pretrained(folder)


def write_windows(a, path):
    """Writes the tokens of all windows of a step: each ends with the token with which the next one begins."""
    import torch

    tokens = torch.randint(CASES[a.case][-1], (a.batch * a.seq + 1,), generator=torch.Generator().manual_seed(1))
    path.write_bytes(tokens.to(torch.uint16).numpy().tobytes())


def windows(path, batch, seq):
    """Returns the inputs and targets of a step."""
    import numpy
    import torch

    tokens = torch.from_numpy(numpy.fromfile(path, "<u2").astype("int64"))
    return tokens[:-1].view(batch, seq), tokens[1:].view(batch, seq)


def sluice_side(a, folder, more, memory=None):
    return sluice_ranks(folder, "--model", folder / "model", "--data", folder / "tokens.bin", "--held-out", 0, "--memory", memory or a.memory,
                        *options_of(a, "batch", "seq", "dtype"), "--steps", a.steps + 1, "--optimizer", "adamw", "--lr", LR,
                        "--beta1", BETAS[0], "--beta2", BETAS[1], "--warmup", 0, "--schedule", "constant", "--weight-decay", WEIGHT_DECAY,
                        "--clip", CLIP, *more)


def torch_side(a, folder, side):
    return torch_ranks(__file__, RANKS, {"side": side, "dtype": a.dtype, "batch": a.batch, "seq": a.seq, "steps": a.steps,
                                         "model": str(folder / "model"), "tokens": str(folder / "tokens.bin")})


def linears_of(a):
    """Returns the linear layers of a rank, as products_side() takes them."""
    layers, width, heads, kv_heads, hidden, words = CASES[a.case]
    rows, keys = a.batch * a.seq, width // heads * kv_heads
    return [(layers, rows, outputs // RANKS, width) for outputs in (width, keys, keys, hidden, hidden)] + [
        (layers, rows, width, inputs // RANKS) for inputs in (width, hidden)] + [(1, rows, words // RANKS, width)]


def load(folder, dtype):
    """Returns the model of transformers with PyTorch's own norms, as torchtitan has them, of which a DTensor takes less time. Their weights
    are copies, since one tensor in the mapped file keeps all of the file in memory."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)

    def norm_like(given):
        norm = torch.nn.RMSNorm(given.weight.shape[0], eps=given.variance_epsilon)
        norm.weight = torch.nn.Parameter(given.weight.detach().clone())
        return norm

    for block in model.model.layers:
        block.input_layernorm, block.post_attention_layernorm = map(norm_like, (block.input_layernorm, block.post_attention_layernorm))
    model.model.norm = norm_like(model.model.norm)
    return model


def share_out(model, is_sequence):
    """Lets the ranks share out the layers, as parallelize_llama() of torchtitan does. With `is_sequence` the tensors between blocks are cut
    along the sequence, else they are whole on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

    between = Shard(1) if is_sequence else Replicate()
    # A layer's input becomes a DTensor once, so that a rank adds up its own gradients before they are summed over ranks.
    plan = {
        "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        **{name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
    if is_sequence:
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        ends["model.norm"] = SequenceParallel()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, ends)


class Torch:
    """A rank of parallelize_module()."""

    def __init__(self, a):
        import torch

        is_narrow = a["side"] == "torch narrow"
        self.model = load(a["model"], torch.bfloat16 if is_narrow else torch.float32)
        self.is_cast = a["dtype"] == "bf16" and not is_narrow
        share_out(self.model, a["side"] == "torch sequence")
        self.kinds = [[p for p in self.model.parameters() if p.dim() > 1], [p for p in self.model.parameters() if p.dim() == 1]]
        self.optimizer = torch.optim.AdamW([{"params": kind, "weight_decay": decay} for kind, decay in zip(self.kinds, (WEIGHT_DECAY, 0.0))],
                                           lr=LR, betas=BETAS, fused=True)

    def logits(self, inputs):
        import torch

        inner = self.model.model
        x = inner.embed_tokens(inputs)
        positions = inner.rotary_emb(x, torch.arange(inputs.shape[1])[None])
        for block in inner.layers:
            x = block(x, position_embeddings=positions)
        return self.model.lm_head(inner.norm(x))

    def clip(self):
        """Clips as clip_grad_norm_() does, which does not accept a mixture of DTensors (the matrices) and tensors (the norms' weights
        may be)."""
        import torch

        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in self.kinds]
        norms = [norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm for norm in norms]
        for kind in self.kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, CLIP, torch.linalg.vector_norm(torch.stack(norms)))

    def step(self, inputs, targets):
        """Trains on them, and returns the loss, which all ranks have."""
        import torch
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            with torch.autocast("cpu", torch.bfloat16) if self.is_cast else contextlib.nullcontext():
                logits = self.logits(inputs)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            del logits
            loss.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.full_tensor().item()


def run_rank(a):
    """Runs one rank of PyTorch, and reports its seconds, its losses, and its peak memory in its steps."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    side = Torch(a)
    inputs, targets = windows(a["tokens"], a["batch"], a["seq"])
    gc.collect()  # the mapped file of the whole model, which would otherwise count as this rank's
    forget_peak()
    seconds, losses = [], []
    for _ in range(a["steps"] + 1):
        torch.distributed.barrier()
        begin = time.perf_counter()
        losses.append(side.step(inputs, targets))
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds[1:], "losses": losses, "peak": peak_bytes()}))
    torch.distributed.destroy_process_group()


def loss_errors(found):
    """Returns, by side, the greatest distance of a loss from the first side's, as a share of it."""
    expected = next(iter(found.values()))[0]["losses"]
    return {name: max(abs(loss / other - 1) for run in runs for loss, other in zip(run["losses"], expected, strict=True))
            for name, runs in found.items()}


def ratios_of(sides):
    """Returns the ratios of the seconds and memory of each of Sluice's sides to a peer's."""
    return {side: {peer: {what: sides[side][what] / sides[peer][what] for what in ("seconds", "peak")} for peer in peers if peer in sides}
            for side, peers in PEERS.items() if side in sides}


def table_of(result):
    """Returns the measurements as a table of docs/benchmarks/runs.json."""
    sides = result["sides"]
    peers = [name for name in ("alone", *OF_TORCH, "products") if name in sides]
    rows = [[name, f"{side['seconds']:.2f}", *(f"{side['seconds'] / sides[peer]['seconds']:.3f}" for peer in peers),
             f"{side['tokens_per_second']:.0f}", f"{side['peak'] / 2**20:.0f} MiB",
             f"{side['rank_wait']:.2f} s" if side.get("rank_wait") else "", f"{side['loss_error']:.1e}" if "loss_error" in side else ""]
            for name, side in sides.items()]
    columns = ["", "seconds a step", *(f"of {peer}'s" for peer in peers), "tokens a second", "most memory of a rank", "waits for ranks",
               "losses differ by"]
    return {"columns": columns, "rows": rows}


def run_of(a, result):
    import torch

    layers, width, heads, kv_heads, hidden, words = CASES[a.case]
    note = (f"A Llama of {layers} layers of {width} ({heads} heads, {kv_heads} of keys and values, hidden layers of {hidden}, {words} words), "
            f"{a.dtype}, {a.batch} x {a.seq} tokens a step, {RANKS} ranks of one thread; PyTorch {torch.__version__}; {a.steps} steps of each side "
            f"in each of {a.rounds} rounds. The first loss is {result['losses'][0]:.4f}, the last one {result['losses'][-1]:.4f}.")
    return run_entry(__file__, [table_of(result)], [note])


def measure(a, folder):
    write_first_values(a.case, a.seq, folder / "model")
    write_windows(a, folder / "tokens.bin")
    sides = {side: lambda side=side: sluice_side(a, folder, OF_SLUICE[side]) if side in OF_SLUICE else torch_side(a, folder, side)
             for side in a.sides if side not in ("sluice half", "products")}
    if "sluice half" in a.sides:
        add_half(sides, "sluice half", "torch", lambda memory: sluice_side(
            a, folder, (*ALONG_TENSOR, "--disk", f"{folder}:16GiB"), memory=memory))
    if "products" in a.sides:
        sides["products"] = lambda: products_side(RANKS, linears_of(a), a.steps)
    found = ran_by_turns(sides, a.rounds)
    trained = {name: runs for name, runs in found.items() if "losses" in runs[0]}
    result = {"case": a.case, "dtype": a.dtype, "losses": next(iter(trained.values()))[0]["losses"], "sides": medians(found, a.batch * a.seq)}
    for name, error in loss_errors(trained).items():
        result["sides"][name]["loss_error"] = error
    result["ratios"] = ratios_of(result["sides"])
    return result | {"run": run_of(a, result)}


def show(a, result):
    print(result["run"]["notes"][0])
    for name, side in result["sides"].items():
        print(f"{name}: {side['seconds']:.3f} s a step, {side['tokens_per_second']:.0f} tokens/s, at most {side['peak'] >> 20} MiB a rank, "
              + (f"losses within {side['loss_error']:.1e} of {a.sides[0]}'s" if "loss_error" in side else "no training")
              + (f", waits {side['rank_wait']:.2f} s" if side.get("rank_wait") else ""))
    for side, peers in result["ratios"].items():
        for peer, ratio in peers.items():
            print(f"{side}: {ratio['seconds']:.3f} of the time of {peer}, {1 / ratio['seconds']:.2f} of its speed, {ratio['peak']:.2f} of its memory")


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(json.loads(sys.argv[2]))
    a = arguments()
    with temporary_folder() as folder:
        result = measure(a, folder)
    tell(a, result, lambda result: show(a, result))
    bound = LOSS_TOLERANCE[a.dtype]
    far = [name for name, side in result["sides"].items() if not side.get("loss_error", 0) <= bound]
    return f"{', '.join(far)}: trained another model, since losses differ by more than {bound}" if far else 0


if __name__ == "__main__":
    sys.exit(main())
