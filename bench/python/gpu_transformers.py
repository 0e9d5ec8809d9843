#!/usr/bin/env python3
"""Uses a small Llama of transformers on one GPU as users do, wrapped by Sluice: loops with clipping, autocast, Trainer, generate(),
state_dict(), save_pretrained(), gradient checkpointing, compiled blocks, and budgets that need the disk.

Each way of training must have the same bits wherever the model is placed (GPU memory, host memory or disk), and losses near those of
plain PyTorch. The script prints a line for each way, also after one has failed, and with --json all lines at the end. The exit status
is 4 where PyTorch sees no GPU, or there is no transformers.

    python3 bench/python/gpu_transformers.py

--fake runs tiny models on the tests' fake driver, which $SLUICE_CUDA_DRIVER names: this tests the script, and shows nothing about a
GPU."""
import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes products have the same bits each time
import gpu_vs_pytorch
import torch
from gpu_sides import find_packages

STEPS, LR, CLIP = 3, 1e-3, 0.5
NEAR = 1e-3  # of a loss in f32: updates differ in their last bits, and so do later values
REAL = {"device": "cuda:0", "rows": 2, "seq": 128, "device_memory": "8GiB", "reserve": "512MiB", "llama": {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 4000}}
FAKE = {"device": "cpu", "rows": 2, "seq": 16, "device_memory": "800MiB", "reserve": "64MiB", "llama": {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256}}


class Ways:
    """The ways to try, each a function that returns a line, or raises."""

    def __init__(self, chosen, fake, folder):
        import sluice
        import sluice.torch
        import transformers

        self.sluice, self.transformers = sluice, transformers
        self.chosen, self.fake, self.folder, self.device = chosen, fake, folder, chosen["device"]
        generator = torch.Generator().manual_seed(3)
        shape = (chosen["rows"] * STEPS, chosen["seq"])
        self.rows = torch.randint(chosen["llama"]["vocab_size"], shape, generator=generator)

    def made(self, kind=torch.float32):
        """Returns the model on the CPU with its first values, which are the same each time."""
        torch.manual_seed(1)
        config = self.transformers.LlamaConfig(max_position_embeddings=512, attn_implementation="eager", **self.chosen["llama"])
        return self.transformers.LlamaForCausalLM(config).to(kind)

    def options(self, place):
        """Arguments of wrap(): only budgets of memory. place "plan": budgets with which the plan needs the disk."""
        given = {"memory": "48GiB", "device": "cuda", "device_memory": self.chosen["device_memory"], "disk": f"{self.folder}:4GiB",
                 "place": place}
        if self.fake:
            given["device_facts"] = self.sluice.DeviceFacts(2e10, 2e10, 3e10, 2e10, 2e10, 0)
        return given if place != "plan" else given | {"place": None} | self.scarce(given)

    def scarce(self, given):
        """Budgets with which some units lie on each tier."""
        def fits(**budgets):
            try:
                return self.sluice.torch.plan(self.made(), self.optimizer(), **given | {"place": None, "reserve": self.chosen["reserve"]} | budgets)
            except self.sluice.BudgetError:
                return None

        def middle(name, most, **others):
            """Returns a budget between the smallest with which a plan fits and the one for everything, in MiB."""
            low, high = 0, most
            while high - low > 1:
                at = (low + high) // 2
                low, high = (low, at) if fits(**{name: at << 20}, **others) else (at, high)
            return (high + most) // 2 << 20

        whole = fits()
        on_gpu = middle("device_memory", (sum(whole["bytes"]["device"].values()) >> 20) + 1)
        on_host = middle("memory", (fits(device_memory=on_gpu)["predicted_peak"] >> 20) + 1, device_memory=on_gpu)
        return {"device_memory": on_gpu, "memory": on_host, "reserve": self.chosen["reserve"]}

    def optimizer(self):
        return self.sluice.AdamW(lr=LR, weight_decay=0.01)

    def wrapped(self, place, prepare=lambda model: None, **options):
        """Returns a model and its optimizer, wrapped, or for place None plain ones on the device. prepare: a function that
        is applied to the model before."""
        model = self.made(options.pop("kind", torch.float32))
        prepare(model)
        if place is None:
            model.to(self.device)
            return model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
        made = self.sluice.torch.wrap(model, self.optimizer(), **self.options(place) | options)
        tiers = {unit[part] for unit in self.sluice.torch.engine_of(model).plan()["units"] for part in ("parameters", "gradient", "state")}
        if place == "plan" and "disk" not in tiers:
            raise AssertionError("the plan needs no disk")
        return made

    def ended(self, place, model):
        if place is not None:
            self.sluice.torch.close(model, values=False)
        del model
        gc.collect()

    def batch(self, step):
        rows = self.chosen["rows"]
        return self.rows[step * rows : (step + 1) * rows].to(self.device)

    def losses(self, place, **options):
        """Returns the losses and norms of a user's loop."""
        model, optimizer = self.wrapped(place, **options)
        if not self.fake:
            model.to("cuda").cuda()
        seen = self.trained(model, optimizer)
        self.ended(place, model)
        return seen

    def trained(self, model, optimizer):
        seen = []
        for step in range(STEPS):
            ids = self.batch(step)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), norm.item()]
        return seen

    def compared(self, seen, places, near=NEAR):
        """Returns the line that compares seen(place), a list of numbers, for all of these places and plain PyTorch. Raises
        where they differ."""
        places = places[:2] if self.fake else places  # which is slow
        plain, first, *others = (seen(place) for place in (None, *places))
        for place, found in zip(places[1:], others, strict=True):
            if found != first:
                raise AssertionError(f"'{place}' gives {found}, and '{places[0]}' {first}")
        far = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(first, plain, strict=True))
        if not far <= near:
            raise AssertionError(f"plain PyTorch gives {plain}, and '{places[0]}' {first}")
        return f"the same bits for {', '.join(places)}; {far:.1e} from plain PyTorch"

    # ---- the ways ----

    def loop(self):
        return self.compared(self.losses, ["device", "memory", "disk"])

    def loop_bf16(self):
        """Plain PyTorch has no f32 masters, so its losses are less near."""
        return self.compared(lambda place: self.losses(place, kind=torch.bfloat16), ["device", "memory", "disk"], near=0.1)

    def budgets(self):
        """With fewer layers a single layer is a large share of the memory of all, and the plan needs no disk."""
        before = self.chosen
        self.chosen = before | {"llama": before["llama"] | {"num_hidden_layers": 6}}
        try:
            return self.compared(self.losses, ["memory", "plan"])
        finally:
            self.chosen = before

    def checkpointing(self):
        return self.compared(lambda place: self.losses(place, prepare=lambda model: model.gradient_checkpointing_enable()), ["device", "memory"])

    def autocast(self):
        def prepare(model):
            model.forward = torch.autocast("cpu" if self.fake else "cuda", torch.bfloat16)(model.forward)

        return self.compared(lambda place: self.losses(place, prepare=prepare), ["device", "memory"], near=0.05)

    def compiled(self):
        def prepare(model):
            for number, layer in enumerate(model.model.layers):
                model.model.layers[number] = torch.compile(layer, backend="aot_eager" if self.fake else "inductor")

        return self.compared(lambda place: self.losses(place, prepare=prepare), ["device", "memory"], near=0.01)

    def trainer(self):
        def seen(place):
            model, optimizer = self.wrapped(place)
            settings = self.transformers.TrainingArguments(
                f"{self.folder}/trainer", per_device_train_batch_size=self.chosen["rows"], max_steps=STEPS, logging_steps=1, report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=self.fake, max_grad_norm=CLIP, seed=3)
            rows = [{"input_ids": row, "labels": row} for row in self.rows]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            trainer = self.transformers.Trainer(model=model, args=settings, train_dataset=rows, optimizers=(optimizer, schedule))
            trainer.train()
            found = [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]
            self.ended(place, model)
            return found

        return self.compared(seen, ["device", "memory", "disk"])

    def generate(self):
        def seen(place):
            model, _ = self.wrapped(place)
            found = model.eval().generate(self.batch(0)[:, :8], max_new_tokens=12, do_sample=False, pad_token_id=0).flatten().tolist()
            self.ended(place, model)
            return found

        return self.compared(seen, ["device", "memory", "disk"], near=0)

    def saved(self):
        """Compares state_dict() and save_pretrained() after a step in each place, and the model that transformers loads
        from them."""
        def seen(place):
            model, optimizer = self.wrapped(place)
            ids = self.batch(0)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = model.state_dict()
            model.save_pretrained(f"{self.folder}/saved")
            loaded = self.transformers.LlamaForCausalLM.from_pretrained(f"{self.folder}/saved").state_dict()
            if state.keys() != loaded.keys() or not all(torch.equal(state[name].cpu(), loaded[name]) for name in state):
                raise AssertionError(f"'{place}': what was saved is not what state_dict() has")
            found = [value.double().norm().item() for value in state.values()]
            self.ended(place, model)
            return found

        return self.compared(seen, ["device", "memory", "disk"])


WAYS = {
    "loop": "a loop with clipping", "loop_bf16": "the same in bf16", "budgets": "budgets of which the plan needs the disk",
    "checkpointing": "gradient checkpointing", "autocast": "autocast", "trainer": "transformers' Trainer", "generate": "generate()",
    "saved": "state_dict() and save_pretrained()", "compiled": "compiled blocks",
}


def out_of_time(number, frame):
    raise TimeoutError("the time of all ways (--limit) ended in this one")


def tried(way, end):
    """Returns the result of a way, its seconds, and its line. end: when it must have ended."""
    begin = time.monotonic()
    try:
        if begin >= end:
            raise TimeoutError("it was not tried, since the ways before it took all of the time (--limit)")
        signal.signal(signal.SIGALRM, out_of_time)
        signal.setitimer(signal.ITIMER_REAL, end - begin)
        told = {"passed": True, "line": way()}
    except Exception as error:  # the other ways still run
        told = {"passed": False, "line": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.collect()
    return told | {"seconds": round(time.monotonic() - begin, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="of " + ", ".join(WAYS))
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all ways, by default 3600; the last ones are not tried")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fake", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    end = time.monotonic() + a.limit
    gpu_vs_pytorch.check_transformers(a.fake)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with gpu_vs_pytorch.packages() as where, tempfile.TemporaryDirectory(dir=os.getcwd() if os.access(".", os.W_OK) else None) as folder:
        find_packages(where | {"fake": a.fake})
        ways = Ways(FAKE if a.fake else REAL, a.fake, folder)
        told = {}
        for name in a.only:
            told[name] = tried(getattr(ways, name), end)
            if not a.fake:
                torch.cuda.set_per_process_memory_fraction(1.0)  # a failed model may have left a lower limit
            print(f"{WAYS[name]}: {'passed' if told[name]['passed'] else 'failed'} in {told[name]['seconds']} s: {told[name]['line']}",
                  file=sys.stderr if a.json else sys.stdout, flush=True)
    if a.json:
        print(json.dumps(told), flush=True)
    os._exit(0 if all(each["passed"] for each in told.values()) or a.json else 1)  # the shutdown of libraries takes time


if __name__ == "__main__":
    main()
