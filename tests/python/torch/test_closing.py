"""close() leaves plain tensors where parameters were, or none, and a touch of any old address is served or explained."""

import gc
import weakref

import pytest
import torch
from support.chain import Chain, loss_of, still_trains
from support import fake_gpu
from support.processes import measures_the_process, run, run_big
from support.wrapped_models import small_gpt2, train, units_of_modules, values_of, wrap, language_loss, same_values

import sluice.torch

VIEWS = fake_gpu.cpu_alone("views of a GPU's memory are made within full_parameters(), have no values after close(), and are not told of")


def wrapped_chain(place):
    model, optimizer = wrap(Chain(), place, units=units_of_modules(Chain()))
    still_trains(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("place", ["memory", "disk"])
@VIEWS
def test_what_refers_to_parameters_goes_on_to_show_them(place):
    model, optimizer = wrapped_chain(place)
    weight = model.first.weight
    address = weight.data_ptr()
    kept = [weight.detach(), weight.t(), weight.detach().numpy(), weight.data, weight[3]]
    loss_of(model, 1).backward()
    optimizer.step()  # leaves updates pending
    expected = weight.detach().clone()
    loss_of(model, 2).backward()
    sluice.torch.close(model)
    assert weight.data_ptr() == address and torch.equal(weight, expected)
    wanted = (expected, expected.t(), expected, expected, expected[3])
    assert all(torch.equal(torch.as_tensor(seen), whole) for seen, whole in zip(kept, wanted, strict=True))
    assert weight.grad is None
    with torch.no_grad():
        kept[4].fill_(5.0)
    assert torch.equal(weight[3], torch.full((24,), 5.0))
    del model, optimizer, weight, kept[:4]
    gc.collect()
    assert torch.equal(kept[0], torch.full((24,), 5.0))


@VIEWS
def test_what_was_compiled_or_taken_out_since_computes_after_the_end():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    sluice.torch.wrap(model, sluice.SGD(lr=0.1), memory="2GiB", reserve="200MiB")
    for block in model:
        block.compile(backend="eager")
    x = torch.randn(2, 8)
    model(x).sum().backward()
    taken = model[3]
    model[3] = torch.nn.Identity()
    sluice.torch.close(model)
    inside = model(x)
    assert torch.equal(taken(inside), torch.nn.functional.linear(inside, taken.weight, taken.bias))


def test_a_view_keeps_a_model_that_was_dropped_without_a_close():
    model, optimizer = wrapped_chain("disk")
    view, expected = model.last.weight.detach()[2:4], model.last.weight[2:4].detach().clone()
    del model, optimizer
    gc.collect()
    assert torch.equal(view, expected)


@pytest.mark.parametrize("end", ["sluice.torch.close(model, values=False)", "sluice.torch.engine_of(model).close()"])
@VIEWS
def test_what_refers_to_parameters_without_values_is_told_so(end):
    finished = run(f"""
        view = model.first.weight.detach()
        {end}
        print('closed', flush=True)
        view.sum()
    """)
    assert finished.returncode < 0 and finished.stdout == "closed\n"
    assert "'parameters of first' was touched after its engine was closed without keeping the values" in finished.stderr


def test_without_values_the_model_is_on_the_meta_device(tmp_path):
    model, optimizer = wrap(small_gpt2(), "disk")
    train(model, optimizer, language_loss, steps=2)
    expected = values_of(model)
    model.save_pretrained(tmp_path)
    sluice.torch.close(model, values=False)
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(sluice.StateError, match="not wrapped"):
        sluice.torch.engine_of(model)
    wrap(model, "memory", weights=tmp_path)
    assert same_values(values_of(model), expected)


@measures_the_process
def test_closing_stays_within_the_budget():
    """The model has 188 MB of parameters, as much of gradients and twice of state, most of them on disk."""
    finished = run_big("""
        model, optimizer = wrapped(430 << 20)
        step()
        sums = [p.double().sum().item() for p in model.parameters()]
        sluice.torch.close(model)
        assert peak() < begin + (430 << 20), (peak() - begin) >> 20
        assert [p.double().sum().item() for p in model.parameters()] == sums
        print("done")
    """)
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr


@measures_the_process
def test_closing_what_does_not_fit_is_refused_and_the_model_goes_on():
    finished = run_big("""
        model, units = layers(42)
        model, optimizer = wrapped(310 << 20)
        step()
        for _ in range(2):
            try:
                sluice.torch.close(model)
            except sluice.BudgetError as error:
                print(error)
        step()
        sluice.torch.close(model, values=False)
        assert held() < begin + (200 << 20), (held() - begin) >> 20
        assert peak() < begin + (310 << 20), (peak() - begin) >> 20
        print("done")
    """)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert len(lines) == 3 and lines[-1] == "done"
    assert "more, and the process holds" in lines[0] and "of its budget of" in lines[0]
    assert "close(model, values=False)" in lines[0] and "with more memory" in lines[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_nobody_has_any_more_ends_with_its_engine(compiled):
    model = Chain()
    if compiled:
        model.compile(backend="eager")
    model, optimizer = wrap(model, "memory")
    assert still_trains(model, optimizer)
    ends = [weakref.ref(model), weakref.ref(sluice.torch.engine_of(model))]
    del model, optimizer
    gc.collect()
    gc.collect()  # the tensors over the engine's memory, which keep it, end after the model
    assert [end() for end in ends] == [None, None]
