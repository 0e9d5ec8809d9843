"""Ranks as users start them (by torchrun in test_examples.py), with Accelerate; and ranks that end before the others."""

import json
import signal

import pytest
import torch
from support import fake_gpu
from support import sluice_package  # noqa: F401: skips where the library is not built
from support.rank_pool import LIMIT, run_program

BEGIN = """
import json, os, signal, sys, time
import torch
from torch import nn
torch.manual_seed(3)
torch.set_num_threads(1)
import sluice.torch
RANK = int(os.environ["RANK"])
def make(width=24, **options):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", reserve="64MiB", **options)
def step(model, optimizer):
    model(torch.ones(3, 24) * (RANK + 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(program, size=2, **variables):
    return run_program(BEGIN + program, size, **variables)


FAILS = """
import gc
from support import fake_gpu
from support.links import no_shared_memory
how, stage, left = os.environ["HOW"], int(os.environ["STAGE"]), []
given = {"stage": stage, "units": {"first": ["0.weight", "0.bias"], "last": ["2.weight", "2.bias"]}, "held_units": 2}
if "gloo" in how:
    over_gloo = no_shared_memory()
    over_gloo.__enter__()
if "GPU" in how:
    fake_gpu.share_memory(devices=2)
    given |= {"device": "cuda", "device_memory": "512MiB", "device_facts": fake_gpu.FACTS, "accumulate": 2 if "in backward" in how else 0}
model, optimizer = make(400, **given)
plan = sluice.torch.engine_of(model).plan()
assert [unit["parameters"] == "ranks" for unit in plan["units"]] == 2 * [stage == 3]
def refuse(module, gradients):
    if RANK == 1 and number == 2:
        raise ValueError("the data of this rank is bad")
if "in backward" in how:
    assert "GPU" not in how or plan["sums_in_backward"]
    model[0].register_full_backward_pre_hook(refuse)
began = time.monotonic()
try:
    for number in range(100):
        model(torch.ones(3, 400) * (RANK + 1)).square().mean().backward()
        if RANK == 1 and number == 2:
            if "killed" in how:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the data of this rank is bad")
        optimizer.step()
        optimizer.zero_grad()
except sluice.Error as error:
    told = [type(error).__name__, str(error), time.monotonic() - began]
    optimizer.zero_grad()
    if stage == 3 and "GPU" not in how:
        try:
            sluice.torch.close(model)
            raise SystemExit("a model was closed whose values other ranks had")
        except sluice.StateError as lacks:
            assert "end with sluice.torch.close(model, values=False)" in str(lacks), lacks
    sluice.torch.close(model, values=False)
del model, optimizer
gc.collect()
if "GPU" in how:
    left = fake_gpu.alive() + fake_gpu.take_misuses()
print(json.dumps([*told, left]), flush=True)
"""
LONG = pytest.mark.long


@pytest.mark.parametrize("how, stage", [
    ("killed, gloo", 3), ("raises", 0), ("in backward", 3), pytest.param("killed", 3, marks=LONG),
    ("killed, GPU", 3), ("raises, GPU", 0), ("in backward, GPU", 2), pytest.param("in backward, GPU", 3, marks=LONG),
])  # fmt: skip
def test_the_others_end_name_the_rank_that_failed_and_leave_nothing(how, stage):
    """In backward: when sums of that pass have begun, and others wait for them."""
    if "GPU" in how:
        fake_gpu.require_built()
    (status, out, errors), (status_there, _, errors_there) = run(FAILS, HOW=how, STAGE=str(stage))
    assert status == 0, errors
    kind, text, seconds, left = json.loads(out.splitlines()[-1])
    assert kind in ("SystemIOError", "StateError") and "rank 1" in text and seconds < LIMIT / 4 and left == []
    if "killed" in how:
        assert "GPU" not in how or "rank 1 (GPU 1, 0000:1c:00.0) is gone: its process has ended" in text
        assert status_there == -signal.SIGKILL
    else:
        assert status_there == 1 and "ValueError: the data of this rank is bad" in errors_there
        assert "ValueError: the data of this rank is bad" in text


LEAVES_EARLY = """
model, optimizer = make()
step(model, optimizer)
if RANK == 0:
    try:
        step(model, optimizer)
    except sluice.Error as error:
        print(str(error), flush=True)
"""


def test_a_rank_that_has_no_more_data_is_named():
    (status, out, errors), (status_there, _, errors_there) = run(LEAVES_EARLY)
    assert status == status_there == 0, errors + errors_there
    assert "rank 1" in out


NEVER_COMES = """
ABSENT = int(os.environ["ABSENT"])
def came(rank):
    return os.path.join(os.environ["OUT"], str(rank))
open(came(RANK), "w").close()
while not all(os.path.exists(came(rank)) for rank in range(3)):  # a busy machine does not start them at the same time
    time.sleep(0.01)
if RANK == ABSENT:
    time.sleep(4)
else:
    if RANK == max({0, 1, 2} - {ABSENT}):
        time.sleep(1.5)  # when the other one's patience ends, which may serve what all meet at, this one still waits
    try:
        make(patience=2.5)
    except sluice.Error as error:
        print(type(error).__name__, str(error), flush=True)
        os._exit(0)  # at once, and with it what it serves
"""


@pytest.mark.parametrize("absent", [0, *(pytest.param(rank, marks=pytest.mark.long) for rank in (1, 2))])
def test_a_rank_that_never_wraps_is_named(absent, tmp_path):
    for rank, (status, out, errors) in enumerate(run(NEVER_COMES, size=3, ABSENT=str(absent), OUT=str(tmp_path))):
        assert status == 0, errors
        gone = "which rank 0 or torchrun serves" in out  # rank 0 serves what the others meet at, and ends first
        named = f"StateError rank {absent} of 3 ranks did not come within 2.5 s" in out
        if rank != absent:
            assert named if rank == 0 else gone or (named and absent != 0), f"rank {rank}: {out}"


TAKES_STATE_ALONE = """
import threading
model, optimizer = make(400, stage=1)
model(torch.ones(1, 400) * (RANK + 1)).square().mean().backward()
optimizer.step()
engine = sluice.torch.engine_of(model)
process = int(engine.options.ranks.exchange("processes", b"%d" % os.getpid())[1])
how, came = os.environ["HOW"], os.path.join(os.environ["OUT"], "came")
if RANK == 0:
    if how in ("closes", "saves"):
        time.sleep(0.3)
    if how == "dies":
        os.kill(process, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
    try:
        print(len(optimizer.state_dict()["state"]), flush=True)
    except sluice.Error as error:
        print(type(error).__name__, error, flush=True)
    open(came, "w").close()
elif how == "ends":
    os._exit(0)
elif how == "waits elsewhere":
    while not os.path.exists(came):  # PyTorch's collectives wait so, in which another rank is not seen
        time.sleep(0.01)
if how == "saves":
    optimizer.zero_grad()
    engine.save(os.environ["OUT"])
sluice.torch.close(model)
"""


@pytest.mark.parametrize("how, says", [
    ("waits elsewhere", "4\n"), ("saves", "4\n"), ("closes", "4\n"), ("dies", "SystemIOError rank 1"), ("ends", "SystemIOError rank 1"),
])  # fmt: skip
def test_rank_0_takes_partitioned_state_alone_while_the_other(how, says, tmp_path):
    (_, out, errors), _ = run(TAKES_STATE_ALONE, HOW=how, OUT=str(tmp_path))
    assert out.startswith(says) and (says == "4\n" or "end all ranks with sluice.torch.close(model)" in out), out + errors


ALL_TAKE_STATE = """
model, optimizer = make(stage=1)
for taken in range(2):
    step(model, optimizer)
    for again in range(2):  # the second time of the same state
        if RANK == 0:
            time.sleep(0.3)
        state = optimizer.state_dict()
print(len(state["state"]))
"""


def test_ranks_that_all_take_partitioned_state_may_end_then():
    (_, first, errors), (status, second, _) = run(ALL_TAKE_STATE)
    assert (first, second, status) == ("4\n", "0\n", 0), errors


TAKES_EDITED_STATE_ALONE = """
model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400)).bfloat16()
model, optimizer = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", reserve="64MiB", stage=1)
model(torch.ones(1, 400, dtype=torch.bfloat16) * (RANK + 1)).square().mean().backward()
optimizer.step()
with torch.no_grad():
    for p in model.parameters():
        p.clamp_(-0.01, 0.01)
came = os.path.join(os.environ["OUT"], "came")
if RANK == 0:
    try:
        optimizer.state_dict()
    except sluice.Error as error:
        print(type(error).__name__, error, flush=True)
    open(came, "w").close()
while not os.path.exists(came):
    time.sleep(0.01)
print(len(optimizer.state_dict()["state"]))
sluice.torch.close(model)
"""


@pytest.mark.long
def test_rank_0_does_not_wait_for_ever_for_an_edit_of_a_rank_that_makes_no_call(tmp_path):
    (_, first, errors), (_, second, _) = run(TAKES_EDITED_STATE_ALONE, OUT=str(tmp_path))
    assert first.startswith("StateError rank 1: this rank has not made a change of '0' within 30 s"), first + errors
    assert first.endswith("\n4\n") and second == "0\n", errors


ALL_WOULD_TAKE_STATE = """
import sluice.torch._safetensors as files
model, optimizer = make(stage=1)
step(model, optimizer)
room = files.room
def full(*_):
    raise OSError("the disk is full")
for turn in range(2):
    files.room = full if turn == RANK == 0 else room
    try:
        print(len(optimizer.state_dict()["state"]), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    step(model, optimizer)
sluice.torch.close(model)
"""


def test_ranks_learn_that_rank_0_could_not_take_partitioned_state_and_all_go_on():
    (one, first, errors), (two, second, _) = run(ALL_WOULD_TAKE_STATE)
    told = "StateError rank 0: the optimizer's state_dict was not taken there: OSError: the disk is full\n0\n"
    assert (one, two, first, second) == (0, 0, "OSError the disk is full\n4\n", told), errors


RESTARTED = """
if RANK == int(os.environ["LATE"]):
    time.sleep(1)
model, optimizer = make(patience=8)
step(model, optimizer)
"""


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_torchrun_restarts_find_each_other_anew(late):
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's, which stays
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    for who in (-1, late):
        for status, _, errors in run(RESTARTED, LATE=str(who), **variables):
            assert status == 0 and "Warning" not in errors, errors


EXPERTS = """
import random
WIDTH = 700
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    def forward(self, x, chosen):
        x = x + self.mix(x).tanh()
        for expert in sorted(chosen):
            x = x + self.experts[expert](x)
        return x
class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    def forward(self, x, chosen):
        return x + self.down(self.up(x).tanh())
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList((Experts, Dense)[i % 2]() for i in range(3))
        self.random = random.Random(RANK)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.random.sample(range(6), 2))
        return x
def trained(**options):
    torch.manual_seed(3)
    model, optimizer = sluice.torch.wrap(Network(), sluice.AdamW(), memory="4GiB", reserve="64MiB", stage=int(os.environ["STAGE"]), **options)
    for _ in range(4):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sums = [p.detach().double().sum().item() for p in model.parameters()]
    sluice.torch.close(model)  # until then other ranks read shards of this one
    return sums
assert trained(update_in_backward=True, accumulate=2) == trained()
"""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=LONG), 3])
def test_experts_of_some_blocks_are_updated_in_backward(stage):
    for status, _, errors in run(EXPERTS, STAGE=str(stage)):
        assert status == 0, errors


ACCELERATE = """
import accelerate
def run(with_model):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model, optimizer = make()
    data = torch.utils.data.TensorDataset(torch.randn(16, 24, generator=torch.Generator().manual_seed(1)))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    prepared = accelerator.prepare(model) if with_model else model
    assert accelerator.unwrap_model(prepared) is model
    for (rows,) in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(rows).square().mean())
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [len(loader), [p.detach().sum().item() for p in model.parameters()]]
alone, _ = make(ranks=False)
left_out, whole = run(False), run(True)
try:
    nn.parallel.DistributedDataParallel(alone)
except sluice.StateError as error:
    print(json.dumps([str(error), left_out, whole]), flush=True)
torch.distributed.destroy_process_group()
"""


def test_accelerate_prepares_the_model_or_not():
    (status, out, errors), (status_there, out_there, _) = run(ACCELERATE)
    assert status == status_there == 0, errors
    text, left_out, prepared = found = json.loads(out.splitlines()[-1])
    assert left_out == prepared and left_out[0] == 4
    assert "DistributedDataParallel" in text and "leave it out" in text
    assert json.loads(out_there.splitlines()[-1]) == found


TRAINER = """
import transformers
from support import rounding
from support.user_models import small_llama
from test_trainer import Texts
def trainer_of(model, optimizer, **settings):
    given = {
        "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "report_to": [], "seed": 3, "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "save_steps": 1, "eval_steps": 1, "eval_strategy": "steps",
        "load_best_model_at_end": True,
    } | settings
    given = transformers.TrainingArguments(os.environ["OUT"], **given)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return transformers.Trainer(model=model, args=given, train_dataset=Texts(), eval_dataset=Texts(), optimizers=(optimizer, schedule))
def run(wrapped, resume=None, **settings):
    torch.manual_seed(3)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrapped is not None:
        model, optimizer = sluice.torch.wrap(model, sluice.AdamW(lr=1e-3), memory="6GiB", reserve="64MiB", **wrapped)
    trainer = trainer_of(model, optimizer, **settings)
    trainer.train(resume_from_checkpoint=resume)
    seen = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in entry]
    seen.append(sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    if wrapped is not None:
        sluice.torch.close(model)
    return seen
plain = run(None)
wrapped = {"stage": 3, "units": {"all": [name for name, _ in small_llama().named_parameters()]}}
whole, resumed = run(wrapped), run(wrapped, os.path.join(os.environ["OUT"], "checkpoint-1"))
assert len(plain) == 7 and rounding.near(whole, plain, rounding.of_losses(rounding.of_model(small_llama()))), (whole, plain)
assert resumed == whole, (resumed, whole)
"""


def test_a_trainer_on_ranks_has_the_losses_of_ddp(tmp_path):
    for status, _, errors in run(TRAINER, OUT=str(tmp_path)):
        assert status == 0, errors


HOLDS_THE_LOCK = """
from support.links import no_shared_memory
over_gloo = no_shared_memory()
over_gloo.__enter__()
model = nn.Linear(600, 600)
model, optimizer = sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", reserve="64MiB", stage=3, silence=2.5)
model(torch.ones(1, 600)).square().mean().backward()
optimizer.step()
other = int(sluice.torch.engine_of(model).options.ranks.exchange("whether all have come here", b"%d" % os.getpid())[0])
if RANK == 0:  # after the update nobody has fetched the unit
    print(model.weight.detach().view(-1)[:3].tolist(), flush=True)
end = time.monotonic() + 60
while RANK == 1 and os.path.exists(f"/proc/{other}") and time.monotonic() < end:
    time.sleep(0.05)
"""


def test_a_touch_that_holds_pythons_lock_is_an_error_over_gloo():
    (status, out, errors), _ = run(HOLDS_THE_LOCK)
    assert status == -signal.SIGABRT, out + errors
    assert "not returned for 2.5 s" in errors and "p.clone()" in errors
