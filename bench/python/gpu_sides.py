"""Runs one side of gpu_vs_pytorch.py in a process of its own, so that the memory is its own: a Llama in bf16 that PyTorch computes on a
GPU, with the optimizer of PyTorch, FSDP2, DeepSpeed or Sluice, or without one. Several ranks are such processes with torchrun's variables.

    python gpu_sides.py SETTINGS      (JSON; gpu_vs_pytorch.py makes them)

It prints a line of JSON: the seconds and losses of each step, and PyTorch's peak GPU memory. The output of libraries goes to
standard error.
"""
import ctypes
import json
import os
import statistics
import sys
import time

import torch
from gpu_vs_pytorch import BY_CUDA, NO_GPU
from side_by_side import free_port
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LR, WEIGHT_DECAY = 1e-4, 0.01
# Layers, width, heads, heads of keys and values, width of the feed-forward layers, words of the vocabulary.
LLAMAS = {"llama-8b": (32, 4096, 32, 8, 14336, 32000), "llama-3b": (28, 3072, 24, 8, 8192, 32000), "llama-1b": (16, 2048, 32, 8, 8192, 32000),
          "tiny": (3, 64, 4, 2, 160, 300)}
LOSS_ROWS = 2048  # of the logits that exist at once with recomputation


class Block(torch.nn.Module):
    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, width // heads
        self.before, self.after = torch.nn.RMSNorm(width, eps=1e-5), torch.nn.RMSNorm(width, eps=1e-5)
        self.queries = torch.nn.Linear(width, heads * size, bias=False)
        self.keys = torch.nn.Linear(width, kv_heads * size, bias=False)
        self.values = torch.nn.Linear(width, kv_heads * size, bias=False)
        self.out = torch.nn.Linear(heads * size, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        def headed(t, heads):
            return t.unflatten(-1, (heads, -1)).transpose(1, 2)

        def turned(t):
            left, right = t.chunk(2, -1)
            return t * cos + torch.cat((-right, left), -1) * sin

        y = self.before(x)
        q, k, v = headed(self.queries(y), self.heads), headed(self.keys(y), self.kv_heads), headed(self.values(y), self.kv_heads)
        y = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    """The shape of a Llama, whose call returns the loss. recompute: backward recomputes blocks and logits."""

    def __init__(self, layers, width, heads, kv_heads, inner, words, recompute):
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width, eps=1e-5)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.size, self.recompute = width // heads, recompute

    def _init_weights(self, module):
        """Sluice calls this for first values; fill() sets them on every side."""

    def again(self, function, *given):
        return checkpoint(function, *given, use_reentrant=False) if self.recompute else function(*given)

    def angles(self, ids, like):
        rates = 500000.0 ** -(torch.arange(0, self.size, 2, device=ids.device).float() / self.size)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), rates).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def loss_of(self, x, targets):
        return functional.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def forward(self, ids):
        x = self.words(ids[:, :-1])
        cos, sin = self.angles(ids[:, :-1], x)
        for block in self.blocks:
            x = self.again(block, x, cos, sin)
        x, targets = self.norm(x).flatten(0, 1), ids[:, 1:].flatten()
        rows = LOSS_ROWS if self.recompute else len(targets)
        parts = [self.again(self.loss_of, *part) for part in zip(x.split(rows), targets.split(rows), strict=True)]
        return torch.stack(parts).sum() / len(targets)


class OfTransformers(torch.nn.Module):
    """The same shape, as a model of transformers."""

    def __init__(self, layers, width, heads, kv_heads, inner, words):
        import transformers

        super().__init__()
        self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
            vocab_size=words, max_position_embeddings=4096))

    def forward(self, ids):
        return self.llama(input_ids=ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss


def made(a, device, kind=torch.bfloat16):
    """Returns a model without values, which fill() sets: random values of 3.0G parameters take the CPU half a minute. A model of
    transformers has buffers that it computes itself, and is made on the GPU."""
    if a.get("of") == "transformers":
        with torch.device(a["device"]):
            return OfTransformers(*LLAMAS[a["model"]]).to(kind)
    with torch.device("meta"):
        model = Llama(*LLAMAS[a["model"]], recompute=a["recompute"]).to(kind)
    return model if device == "meta" else model.to_empty(device=device)


@torch.no_grad()
def fill(model, device):
    """Sets a model's first values, which are the same on every side: the GPU computes them, wherever they are
    stored."""
    generator = torch.Generator(device).manual_seed(1)
    for p in model.parameters():
        if p.dim() > 1:
            p.copy_(torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator))
        else:
            p.fill_(1.0)
    return model


class Fused:
    """Plain PyTorch with everything on the GPU and its fused AdamW, whose state has the parameters' type."""

    clip = None

    def __init__(self, a):
        self.model = fill(made(a, a["device"]), a["device"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
        self.clip = a.get("clip")

    def step(self, ids):
        loss = self.model(ids)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def told(self):
        return {}


class Compute(Fused):
    """Forward and backward alone: the GPU's time without transfers and updates. A gradient is dropped where it is
    computed."""

    def __init__(self, a):
        self.model = fill(made(a, a["device"]), a["device"])
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step(self, ids):
        loss = self.model(ids)
        loss.backward()
        return loss.detach()


def here(**others):
    """Sets the environment of a job that contacts no other machine."""
    own = {} if "MASTER_PORT" in os.environ else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ |= own | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | others


class Fsdp(Fused):
    """FSDP2 with a GPU for each rank. The f32 masters and state are on the CPU, where fused AdamW updates them."""

    def __init__(self, a):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        on_gpu = a["device"] != "cpu"
        here()
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=RANK, world_size=SIZE)
        mesh = torch.distributed.init_device_mesh("cuda" if on_gpu else "cpu", (SIZE,))
        offload = CPUOffloadPolicy() if on_gpu else OffloadPolicy()
        settings = {"mesh": mesh, "offload_policy": offload, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
        self.model = fill(made(a, "cpu", torch.float32), a["device"])
        for block in self.model.blocks:
            fully_shard(block, **settings)
        fully_shard(self.model, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


class DeepSpeed(Fused):
    """ZeRO stage 3 on one GPU, with f32 masters, state and parameters on the CPU."""

    def __init__(self, a):
        import deepspeed

        here(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        config = {
            "train_micro_batch_size_per_gpu": a["batch"],
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True,
                                  "offload_param": {"device": "cpu", "pin_memory": True},
                                  "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        }
        self.model, *_ = deepspeed.initialize(model=fill(made(a, "cpu"), a["device"]), config=config)

    def step(self, ids):
        loss = self.model(ids)
        self.model.backward(loss)
        self.model.step()
        return loss.detach()


def sluice_options(a):
    """The arguments of sluice.torch.wrap() and plan()."""
    ids = torch.zeros(a["batch"] // SIZE, a["seq"] + 1, dtype=torch.long, device=a["device"])
    given = {"memory": a["memory"], "device": "cuda", "device_memory": a["device_memory"], "sample_batch": (ids,)} | a["options"]
    return given | ({"accumulate": SIZE} if SIZE > 1 else {})


class Sluice(Fused):
    """sluice.torch, which gets a model without values, since the model may be larger than the GPU's memory."""

    def __init__(self, a):
        import sluice.torch

        optimizer = sluice.AdamW(lr=LR, weight_decay=WEIGHT_DECAY)
        self.model, self.optimizer = sluice.torch.wrap(made(a, "meta"), optimizer, **sluice_options(a))
        with sluice.torch.full_parameters(self.model):
            fill(self.model, a["device"])
        self.clip = a.get("clip")

    def told(self):
        import sluice.torch

        plan = sluice.torch.engine_of(self.model).plan()
        return {"plan": plan["step"], "pytorch": plan["pytorch"], "ready": plan["ready"]}


class Bare(torch.nn.Module):
    """Units whose computing is nothing beside the bytes of their parameters."""

    def __init__(self, a):
        super().__init__()
        count, elements = (4, 1 << 12) if a["fake"] else (6, 1 << 28)
        self.units = torch.nn.ModuleList(OfUnit(elements) for _ in range(count))
        self.bytes = 2 * count * elements

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x.sum()


class OfUnit(torch.nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16))

    def forward(self, x):
        return x + self.weight[:1]


class Between:
    """No training: the rates at which ranks gather parameters and sum gradients in steps of Sluice, and those of the library that
    torch.distributed has for it (NCCL), in bytes that a GPU receives in a second."""

    def __init__(self, a):
        self.a = a

    def waited(self, action):
        """Returns what an action gives, and the seconds until the GPU has done its work."""
        self.synchronize()
        begin = time.perf_counter()
        given = action()
        self.synchronize()
        return given, time.perf_counter() - begin

    def synchronize(self):
        if self.a["device"] != "cpu":
            torch.cuda.synchronize()

    def rate(self, of_bytes, seconds):
        return (SIZE - 1) / SIZE * of_bytes / statistics.median(seconds[self.a["warm"] :])

    def options(self, x):
        return {"memory": "8GiB", "device": "cuda", "device_memory": "800MiB" if self.a["fake"] else "20GiB", "sample_batch": (x,),
                "state": "bf16", "master": "none", "place": "device"}

    def sluice(self, stage):
        """Returns the rate of gathering where parameters are partitioned (stage 3), and of sums where they are not (stage 1), and what
        joins the ranks."""
        import sluice.torch

        model = Bare(self.a)
        size, x = model.bytes, torch.zeros(1, dtype=torch.bfloat16, device=self.a["device"])
        model, optimizer = sluice.torch.wrap(model, sluice.AdamW(lr=LR), stage=stage, accumulate=SIZE, **self.options(x))
        gathers, sums = [], []
        for _ in range(self.a["warm"] + self.a["steps"]):
            loss, seconds = self.waited(lambda: model(x))
            gathers.append(seconds)
            sums.append(self.waited(lambda: (loss.backward(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))[1])
            optimizer.step()
            optimizer.zero_grad()
        links = sluice.torch.engine_of(model).plan()["links"]
        sluice.torch.close(model, values=False)
        return self.rate(size, gathers if stage == 3 else sums), links

    def peer(self):
        from torch import distributed

        here()
        distributed.init_process_group("gloo" if self.a["device"] == "cpu" else "nccl", rank=RANK, world_size=SIZE)
        whole = torch.zeros(SIZE << (12 if self.a["fake"] else 27), dtype=torch.bfloat16, device=self.a["device"])
        own = torch.zeros(len(whole) // SIZE, dtype=whole.dtype, device=whole.device)
        rates = []
        for action in (lambda: distributed.all_gather_into_tensor(whole, own), lambda: distributed.reduce_scatter_tensor(own, whole)):
            seconds = [self.waited(action)[1] for _ in range(self.a["warm"] + 10)]
            rates.append(self.rate(2 * len(whole), seconds))
        return rates

    def told(self):
        (gather, links), (reduce, _) = self.sluice(3), self.sluice(1)
        of_peer = dict(zip(("all-gather", "reduce-scatter"), self.peer(), strict=True))
        return {"links": links, "rates": {"all-gather": gather, "reduce-scatter": reduce}, "peer": of_peer}


SIDES = {"fused": Fused, "compute": Compute, "fsdp2": Fsdp, "deepspeed": DeepSpeed, "sluice": Sluice, "alone": Sluice, "between": Between}


def find_packages(a):
    """Makes Sluice's package importable, and the peers' packages that this Python lacks."""
    sys.path.insert(0, a["package"])
    sys.path.append(a["peers"])
    if a["fake"]:  # the tests' fake driver, whose memory is the CPU's
        ctypes.CDLL(os.environ["SLUICE_CUDA_DRIVER"]).sluice_fake_cuda_share_memory(ctypes.c_uint64(1 << 30), 0, ctypes.c_uint64(0),
                                                                                         a.get("ranks", 1), 1)


def trace(side, ids, folder):
    """Writes the GPU's work in two steps, by stream, for chrome://tracing."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if ids.is_cuda else ProfilerActivity.CPU]) as found:
        for _ in range(2):
            side.step(ids).item()
    found.export_chrome_trace(os.path.join(folder, f"{type(side).__name__.lower()}.trace.json.gz"))


def refuse_without_gpus(needed):
    """Ends the process where PyTorch sees fewer GPUs."""
    if not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU (torch.cuda.is_available() is false); {BY_CUDA}", file=sys.stderr)
    elif torch.cuda.device_count() < needed:
        print(f"needs two GPUs; {'one is' if torch.cuda.device_count() == 1 else 'none is'} here", file=sys.stderr)
    else:
        return
    sys.exit(NO_GPU)


def is_over(here, device):
    """Whether the time is over on any rank: ranks take the same number of steps."""
    if SIZE == 1 or not torch.distributed.is_initialized():
        return here
    told = torch.tensor([float(here)], device=device)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return bool(told.item())


def main():
    a = json.loads(sys.argv[1])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries
    find_packages(a)
    on_gpu = a["device"] != "cpu"
    if on_gpu:
        refuse_without_gpus(a.get("ranks", 1))
        a["device"] = f"cuda:{RANK}" if SIZE > 1 else a["device"]
        torch.cuda.set_device(a["device"])
    side = SIDES[a["side"]](a)
    if a["side"] == "between":
        print(json.dumps(side.told()), file=answer, flush=True)
        os._exit(0)
    generator = torch.Generator(a["device"]).manual_seed(2)
    words, seconds, losses = LLAMAS[a["model"]][-1], [], []
    while len(seconds) < a["warm"] + a["steps"]:
        if len(seconds) > a["warm"] and is_over(time.time() + seconds[-1] > a["until"], a["device"]):
            break  # the measured steps count
        ids = torch.randint(words, (a["batch"], a["seq"] + 1), device=a["device"], generator=generator)[RANK::SIZE].contiguous()
        begin = time.perf_counter()
        losses.append(side.step(ids).item())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        print(f"{a['side']}: step {len(losses)} of {a['warm'] + a['steps']}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr)
    if a.get("trace"):
        trace(side, ids, a["trace"])
    told = {"seconds": seconds[a["warm"]:], "losses": losses, "pytorch_peak": torch.cuda.max_memory_reserved() if on_gpu else 0}
    print(json.dumps(told | side.told()), file=answer, flush=True)
    os._exit(0)  # the shutdown of libraries takes time, and there is nothing left to save


if __name__ == "__main__":
    main()
