"""Runs one side of a bench in a process of its own, so that memory and threads are its own: a GPT-2 of transformers in f32, or by autocast to
bf16, trained by plain PyTorch, by sluice.torch or by DeepSpeed, alone or as one of several ranks.

    python gpt2_sides.py SETTINGS      (JSON; turns.py makes them)

It answers each line of its input with a line of JSON. A number asks for so many steps; the answer has their seconds and losses, the
peaks of memory so far, and figures of the side's own. An empty line ends the process. The output of libraries goes to standard
error.
"""
import contextlib
import json
import os
import pathlib
import sys
import time

from side_by_side import ROOT, forget_peak, free_port, gpt2_config, peak_bytes

LR, WEIGHT_DECAY, CLIP = 3e-4, 0.01, 1.0


class Plain:
    """Plain PyTorch. Writes the first values of all sides, unless they exist."""

    autocast = False

    def __init__(self, a):
        import torch
        from transformers import GPT2LMHeadModel

        torch.manual_seed(1)
        self.model = GPT2LMHeadModel(gpt2_config(a["model"]))
        if a.get("rank", 0) == 0 and not pathlib.Path(a["weights"]).exists():
            self.model.save_pretrained(a["weights"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, batches):
        """Trains on micro-batches, and returns the mean of their losses."""
        import torch

        mean = 0
        for ids in batches:
            with self.sending(ids is batches[-1]):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
                loss.backward()
            mean += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean

    def sending(self, last):
        """Lets only the last micro-batch of a step send gradients to other ranks."""
        return contextlib.nullcontext()

    def told(self):
        return {}


def wrapped(a, make, model, **options):
    """Returns what a function of sluice.torch, by name, makes of a model: a wrapped one and its optimizer."""
    import torch

    sys.path.insert(0, str(ROOT / "bindings" / "python"))
    import sluice.torch

    ids = torch.zeros(a["batch"], a["seq"], dtype=torch.long)
    return getattr(sluice.torch, make)(model, sluice.AdamW(lr=LR, weight_decay=WEIGHT_DECAY), memory=a["memory"], disk=a["disk"],
                                       sample_batch={"input_ids": ids, "labels": ids, "use_cache": False}, **options)


class Sluice(Plain):
    """A wrapped model, with everything on the tier that a["place"] names."""

    def __init__(self, a):
        self.model, self.optimizer = wrapped(a, "from_pretrained", a["weights"], place=a["place"], reserve=a["reserve"],
                                             held_units=a["held_units"])

    def told(self):
        import sluice.torch

        engine = sluice.torch.engine_of(self.model)
        return {"touches": engine.counters().touches, "step": engine.plan()["step"]}


class Ddp(Plain):
    """A rank of DistributedDataParallel over Gloo. Its gradients are views of the buckets, so they are not copied."""

    def __init__(self, a):
        import torch

        super().__init__(a)
        torch.distributed.init_process_group("gloo")
        # DDP allows no accumulation of a static graph.
        self.model = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True,
                                                               static_graph=a["accumulate"] == 1)

    def sending(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()


class Fsdp(Plain):
    """A rank of FSDP2 over Gloo: each block is sharded, and all parameters outside of blocks stay whole between forward and
    backward, which is best for a model whose head is its embedding. Where gradients are accumulated, parameters stay whole until
    the last backward pass, which sums the gradients over ranks, so that a step sends the fewest bytes."""

    def __init__(self, a):
        import torch
        from torch.distributed.fsdp import fully_shard

        super().__init__(a)
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (a["ranks"],))
        for block in self.model.transformer.h:
            fully_shard(block, mesh=mesh, reshard_after_forward=a["accumulate"] == 1)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, foreach=True)

    def sending(self, last):
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        return contextlib.nullcontext()


class Wrapped(Sluice):
    """A rank of sluice.torch, which finds the others by torchrun's variables."""

    def __init__(self, a):
        Plain.__init__(self, a)
        self.model, self.optimizer = wrapped(a, "wrap", self.model, stage=a["stage"], accumulate=a["ranks"] * a["accumulate"])


class DeepSpeed:
    """ZeRO stage 3 with parameters and optimizer state in files. Gradients are in memory, whatever the settings."""

    def __init__(self, a):
        import deepspeed
        import torch
        from safetensors.torch import load_file
        from transformers import GPT2LMHeadModel

        deepspeed.init_distributed("gloo")
        with deepspeed.zero.Init(config_dict_or_path=a["config"]):
            model = GPT2LMHeadModel(gpt2_config(a["model"]))
        values = load_file(pathlib.Path(a["weights"]) / "model.safetensors")
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(values.pop(name))
        if values:
            raise RuntimeError(f"{a['weights']} has values that the model does not: {sorted(values)}")
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=a["config"])[0]

    def step(self, batches):
        (ids,) = batches
        loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def told(self):
        return {}


def one_process():
    """Sets the environment that DeepSpeed needs for a job of one process on the CPU. Its kernels are built with the
    environment's ninja."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
                   "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}


def serve(side, a, answers):
    import torch

    done, whole = 0, peak_bytes()
    forget_peak()
    for line in sys.stdin:
        if not line.strip():
            return
        seconds, losses = [], []
        for _ in range(int(line)):
            generator = torch.Generator().manual_seed(done * a.get("ranks", 1) + a.get("rank", 0))
            batches = torch.randint(0, 50257, (a["accumulate"], a["batch"], a["seq"]), generator=generator)
            start = time.perf_counter()
            losses.append(side.step(list(batches)))
            seconds.append(time.perf_counter() - start)
            done += 1
        answer = {"seconds": seconds, "losses": losses, "peak": max(whole, peak_bytes()), "peak_of_steps": peak_bytes()}
        print(json.dumps(answer | side.told()), file=answers, flush=True)


def main():
    a = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if a["side"] == "deepspeed":
        one_process()
    import torch

    torch.set_num_threads(a["threads"])
    sides = {"plain": Plain, "sluice": Sluice, "deepspeed": DeepSpeed, "ddp": Ddp, "fsdp": Fsdp, "wrapped": Wrapped}
    side = sides[a["side"]](a)
    side.autocast = a.get("autocast", False)
    serve(side, a, answers)


if __name__ == "__main__":
    main()
