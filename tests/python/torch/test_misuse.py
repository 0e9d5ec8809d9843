"""Misuse of a wrapped model is an error that says what to do; nothing leaks, and processes end cleanly."""

import copy
import gc
import os
import pickle

import pytest
import torch
from support import fake_gpu
from support.chain import Chain, loss_of, still_trains
from support.processes import grown, run
from support.wrapped_models import readable, same_values, small_gpt2, units_of_modules, values_of, wrap

import sluice.torch


@pytest.fixture
def wrapped():
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    yield model, optimizer
    if not sluice.torch.engine_of(model).closed:
        sluice.torch.close(model)


# ---- refused, and the model goes on ----


COPIES = [copy.deepcopy, pickle.dumps, lambda what: torch.save(what, os.devnull)]
MOVED = r"moved to .*before sluice.torch.wrap\(\), or after"
REFUSED = [
    (r"wrapped already.*sluice.torch.close", lambda model, optimizer: wrap(model, "disk")),
    (r"'weight' belongs to another wrapped model", lambda model, optimizer: wrap(model.first, "disk")),
    (r"'1.weight' belongs to another", lambda model, optimizer: wrap(torch.nn.Sequential(Chain().first, model.middle), "disk")),
    (r"no parameter .*has a gradient.*backward\(\) before", lambda model, optimizer: optimizer.step()),
    *(("wrapped model is to be (copied|pickled).*state_dict.*before sluice.torch.wrap.*close", lambda model, _, what=what: what(model)) for what in COPIES),
    *(("wrapped model is to be (copied|pickled)", lambda model, _, what=what: what(torch.nn.Sequential(model))) for what in COPIES),
    *(("in whole or in part.*state_dict.*close", lambda model, _, what=what: what(model.first)) for what in COPIES),
    *((r"optimizer is to be copied or pickled.*state_dict\(\)", lambda _, optimizer, what=what: what(optimizer)) for what in (copy.copy, *COPIES)),
    *((r"assign=True\) .*leave assign out", lambda model, _, of=of: of(model).load_state_dict(of(Chain()).state_dict(), assign=True))
      for of in (lambda m: m, lambda m: m.first)),
    (r"memory that processes share.*after sluice.torch.close\(\)", lambda model, optimizer: model.share_memory()),
    *((MOVED, lambda model, _, move=move: move(model)) for move in (
        lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("meta"), lambda m: m.first.half(),
        lambda m: torch.nn.Sequential(m).bfloat16(), lambda m: m.to_empty(device="meta"),
    )),
]  # fmt: skip


def test_what_is_refused_leaves_the_model_as_it_was(wrapped):
    model, optimizer = wrapped
    before = values_of(model)
    for words, use in REFUSED:
        with pytest.raises(sluice.StateError, match=words):
            use(model, optimizer)
    assert same_values(values_of(model), before) and still_trains(model, optimizer)


class LoadsItself(torch.nn.Linear):
    """A layer that asks nothing of its class when it is loaded, as layers of quantised values do."""

    def _load_from_state_dict(self, state_dict, prefix, metadata, *others):
        for name, p in list(self.named_parameters()):
            if metadata.get("assign_to_params_buffers"):
                setattr(self, name, torch.nn.Parameter(state_dict[prefix + name]))
            else:
                p.detach().copy_(state_dict[prefix + name])


def test_assigned_values_are_refused_where_a_layer_loads_itself():
    models = [torch.nn.Sequential(LoadsItself(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)]
    given, was = models[1].state_dict(), values_of(models[0])
    model, _ = wrap(models[0], "disk")
    for whole in (model, torch.nn.Sequential(model)):
        with pytest.raises(sluice.StateError, match=r"assign=True\) .*leave assign out"):
            whole.load_state_dict(torch.nn.Sequential(models[1]).state_dict() if whole is not model else given, assign=True)
    copy.deepcopy(models[1]).load_state_dict(given, assign=True)  # after which PyTorch assigns it everywhere
    for _ in range(3):
        with pytest.raises(sluice.StateError, match="take a new one"):
            model.load_state_dict(given)
    assert same_values(values_of(model), was)
    model.load_state_dict(models[1].state_dict())
    assert same_values(values_of(model), values_of(models[1]))
    sluice.torch.close(model)


def test_further_parameters_are_refused(wrapped):
    with pytest.raises(sluice.InvalidArgumentError, match="no further parameters.*wrap the model again"):
        wrapped[1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_an_optimizer_of_pytorch_over_wrapped_parameters(wrapped):
    model, optimizer = wrapped
    loss_of(model, 0).backward()
    for made in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.last.parameters(), lr=0.1)):
        with pytest.raises(sluice.StateError, match=r"'\w+.weight' is .*(AdamW|SGD).*sluice.torch.wrap\(\) gave"):
            made.step()
    assert still_trains(model, optimizer)


def test_settings_that_change(wrapped):
    model, optimizer = wrapped
    [group] = optimizer.param_groups
    for name, value, text in (
        ("betas", (0.5, 1.0), r"betas\[1\] is 1; it must be at least 0 and below 1"),
        ("eps", -1e-3, "eps is -0.001; it must be"),
        *(("lr", lr, f"lr is {lr!r}; a number of at least 0 is needed") for lr in (None, "high", -1.0)),
        ("amsgrad", True, "amsgrad is .*does not have"),
        ("maximize", True, "maximize is .*does not have"),
    ):
        assert still_trains(model, optimizer)
        before = dict(group)
        group[name] = value
        loss_of(model, 0).backward()
        with pytest.raises(sluice.InvalidArgumentError, match=text):
            optimizer.step()
        group.clear()
        group.update(before)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["note"] = [0.9, 0.999], 3
    assert still_trains(model, optimizer)


def test_settings_that_are_in_the_plan_cannot_change():
    for settings, name, value, text in (
        (sluice.SGD(lr=0.1), "momentum", 0.9, "given momentum.*wrapped without"),
        (sluice.SGD(lr=0.1, momentum=0.9), "momentum", 0, "left without momentum.*wrapped with"),
        (sluice.SGD(lr=0.1, momentum=0.9), "nesterov", True, "nesterov is True.*cannot change.*momentum can"),
        (sluice.Adafactor(), "beta1", 0.9, "given momentum.*wrapped without"),
        (sluice.Adafactor(), "clip_threshold", 2.0, "clip_threshold is 2.0.*cannot change"),
        (sluice.Muon(), "adjust_lr_fn", "match_rms_adamw", "adjust_lr_fn is match_rms_adamw.*cannot change"),
    ):
        model, optimizer = wrap(small_gpt2(), "memory", settings)
        [group] = optimizer.param_groups
        before, group[name] = group[name], value
        ids = torch.ones(1, 4, dtype=torch.int64)
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(sluice.InvalidArgumentError, match=text):
            optimizer.step()
        group[name] = before
        optimizer.step()
        sluice.torch.close(model)


def test_groups_whose_members_change(wrapped):
    model, optimizer = wrapped
    [group] = optimizer.param_groups
    loss_of(model, 0).backward()
    last = group["params"].pop()
    with pytest.raises(sluice.InvalidArgumentError, match=r"taken out.*requires_grad_\(False\)"):
        optimizer.step()
    group["params"].append(last)
    assert still_trains(model, optimizer)


def test_a_copy_of_one_parameter_is_a_plain_one(wrapped):
    model, optimizer = wrapped
    with readable(model):
        copied = copy.deepcopy(model.first.weight)
    assert torch.equal(copied, values_of(model)["first.weight"]) and type(copied) is torch.nn.Parameter
    assert still_trains(model, optimizer)
    assert not torch.equal(copied, values_of(model)["first.weight"])


def test_moves_that_change_nothing(wrapped):
    model, optimizer = wrapped
    with readable(model):
        before = model.first.weight.data_ptr()
    assert model.to("cpu").float().to(torch.float32).cpu() is model
    assert model.requires_grad_(True).train().eval().train() is model
    with readable(model):
        assert model.first.weight.data_ptr() == before
    assert still_trains(model, optimizer)


def test_a_closed_engine():
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    loss_of(model, 0).backward()
    values = values_of(model)
    graph = loss_of(model, 1)
    engine = sluice.torch.engine_of(model)
    old = model.first.weight.grad
    state = optimizer.state_dict()
    sluice.torch.close(model)
    assert engine.closed
    named = "'last.weight'.*" if fake_gpu.asked() is None else ""  # there the call is noticed first
    for call, what in (
        (optimizer.step, "model was closed.*wrap it again"),
        (graph.backward, f"{named}the model was closed.*run forward again"),
        (old.sum, r"gradient of 'first.weight' .*was closed, and ended with it"),
        (optimizer.state_dict, r"model was closed.*before sluice.torch.close\(\)"),
        (lambda: optimizer.load_state_dict(state), "model was closed.*wrap the model again"),
        (engine.settle, "closed"),
    ):
        with pytest.raises(sluice.StateError, match=what):
            call()
    with pytest.raises(sluice.StateError, match=r"not wrapped; see sluice.torch.wrap\(\)"):
        sluice.torch.engine_of(model)
    assert model.first.weight.grad is None
    assert all(torch.equal(p, values[name]) and type(p) is torch.nn.Parameter for name, p in model.named_parameters())
    copy.deepcopy(model).half()
    pickle.loads(pickle.dumps(model))
    model.zero_grad()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    plain.step()
    assert not torch.equal(model.first.weight, values["first.weight"])
    again = wrap(model, "memory")[1]
    assert still_trains(model, again)


@pytest.mark.parametrize("held", [False, True])
def test_an_engine_that_was_closed_by_itself(held):
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()), held_units=4 if held else 2)
    loss_of(model, 0).backward()
    optimizer.step()
    loss = loss_of(model, 1)
    sluice.torch.engine_of(model).close()
    for call in (lambda: loss_of(model, 1), loss.backward, lambda: model.first(torch.zeros(1, 24)), lambda: wrap(model, "disk")):
        with pytest.raises(sluice.StateError, match=r"closed.*sluice.torch.close\(model\).*Make the model anew"):
            call()
    for call in (optimizer.step, optimizer.state_dict, lambda: model.first.weight.grad.sum()):
        with pytest.raises(sluice.StateError, match=r"values of its parameters are gone with it.*Make the model anew"):
            call()


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_views_of_parameters_that_would_keep_old_values(on):
    def with_buffer(model):
        model.middle.register_buffer("seen", model.first.weight.detach()[:2])
        return "middle.seen"

    def with_attribute(model):
        model.turned = model.first.weight.t()
        return "turned"

    for give in (with_buffer, with_attribute):
        with torch.device(on):
            model = Chain()
        with pytest.raises(sluice.InvalidArgumentError, match=f"'{give(model)}' lies in the memory of 'first.weight'.*in forward"):
            wrap(model, "disk")
    frozen = Chain()
    with_buffer(frozen)
    frozen.first.weight.requires_grad_(False)
    wrap(frozen, "disk")


def test_a_parameter_that_another_took_the_place_of(wrapped):
    model, optimizer = wrapped
    weight = model.middle.weight
    del model.middle.weight
    for other in (torch.nn.Parameter(torch.zeros(24, 24)), None):
        model.middle.weight = other
        with pytest.raises(sluice.StateError, match="'middle.weight' is no longer.*copy_.*close"):
            loss_of(model, 0)
    model.middle.weight = weight
    swapped = torch.func.functional_call(model, {"middle.weight": torch.zeros(24, 24)}, torch.zeros(1, 24))
    assert torch.equal(swapped, model.last(torch.tanh(values_of(model)["middle.bias"])[None]))
    assert still_trains(model, optimizer)


def test_what_takes_the_place_of_parameters_for_a_call(wrapped):
    """functional_call() may be given tensors; for Parameters, as torch.export() gives them, the error says what works."""
    model, optimizer = wrapped
    teacher, x = Chain(), torch.zeros(1, 24)
    with pytest.raises(sluice.StateError, match=r"functional_call\(\) may be given tensors.*detach\(\)"):
        torch.func.functional_call(model, dict(teacher.named_parameters()), (x,))
    values = {name: p.detach() for name, p in teacher.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, values, (x,)), teacher(x))
    assert still_trains(model, optimizer)


# ---- nothing leaks ----


def test_models_that_are_closed_or_dropped_leave_nothing():
    def action(closes):
        model, optimizer = wrap(Chain(), "disk", threads=1, units=units_of_modules(Chain()))
        still_trains(model, optimizer)
        loss_of(model, 0).backward()
        if closes:
            sluice.torch.close(model)
        del model, optimizer
        gc.collect()

    memory, files, maps, threads = grown(lambda: [action(closes) for closes in (True, False)], 3, 12)
    assert files == 0 and threads == 0 and maps < 50 and memory < 8 << 20


# ---- processes end cleanly, and forked ones say what is wrong ----


@pytest.mark.parametrize("program", [
    "",
    "sluice.torch.close(model)",
    "import threading; threading.Thread(target=lambda: loss_of(model, 2).backward()).start()",
    "optimizer.step(); sys.modules['kept'] = [model, optimizer, loss_of(model, 1), [p.grad for p in model.parameters()]]",
])  # fmt: skip
def test_a_process_ends_cleanly(program):
    finished = run(program + "\nprint('done')")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "done\n", "")


def test_a_process_ends_cleanly_after_an_exception_in_backward():
    finished = run("""
        def stop(gradient): raise ArithmeticError("in the middle")
        model.first.weight.register_hook(stop)
        loss_of(model, 1).backward()
    """)
    assert finished.returncode == 1
    assert finished.stderr.rstrip().endswith("ArithmeticError: in the middle")
    assert "Exception ignored" not in finished.stderr


def test_use_in_a_forked_child_is_an_error():
    finished = run("""
        for use in (lambda: loss_of(model, 1), optimizer.step, lambda: model.first.weight.grad.sum()):
            child = os.fork()
            if child == 0:
                try:
                    use()
                except sluice.StateError as error:
                    print(error, flush=True)
                os._exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        optimizer.step()
    """)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("was forked") == finished.stdout.count("use it where it was made") == 3
    assert finished.stdout.count("\n3\n") == 3


@fake_gpu.cpu_alone("nobody is told of a touch of a GPU's memory")
def test_parameters_are_brought_in_after_a_handler_of_signals_was_set_back():
    """Lightning sets all of them back at the end of fit()."""
    finished = run("""
        import signal
        optimizer.step()
        sluice.torch.engine_of(model).settle()
        def read():
            touches = sluice.torch.engine_of(model).counters().touches
            print(sum(p.sum() for p in model.parameters()).isfinite(), sluice.torch.engine_of(model).counters().touches > touches)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        read()
        import faulthandler
        for change in (faulthandler.enable, faulthandler.disable):
            optimizer.step()
            sluice.torch.engine_of(model).settle()
            change()
            read()
    """)
    assert finished.returncode == 0 and finished.stdout.count("tensor(True) True") == 3, finished.stderr
