"""torch.compile of models that are wrapped on a GPU: what PyTorch meets while the first call is looked at is compiled from the next
call on. The reference is the same model, wrapped on the CPU, where nothing is compiled; nothing may differ by a bit."""

import gc
import threading

import pytest
import torch
import transformers
from support import fake_gpu
from support.gpu_models import GPU, Layers, loss_of
from support.graphs import Counted, Hidden, compiled_elsewhere, graphs_of_three_calls
from support.wrapped_models import same, same_values, units_of_modules, wrap

import sluice.torch

STEPS = 3


class CompilesInside(Layers):
    """A model that compiles a function of its own, which uses a parameter that no module's call brings in."""

    def __init__(self, backend=None):
        super().__init__()
        self.end = self.scaled if backend is None else torch.compile(self.scaled, backend=backend)

    def scaled(self, x):
        return torch.nn.functional.gelu(x * self.scale) + 1

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.end(x))


def trained(model, before=None, after=None, autocast=False, note=lambda: None, **options):
    """The losses and parameters of a run. before, after: compile the model before and after it is wrapped; after may return what to
    call. note: comes after each step."""
    torch._dynamo.reset()
    if before is not None:
        before(model)
    model, optimizer = wrap(model, "memory", sluice.SGD(lr=1e-2), **({"units": units_of_modules(model), "held_units": 3} | options))
    called = after(model) if after is not None else None
    seen = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model if called is None else called, step)
        loss.backward()
        seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        note()
    sluice.torch.close(model)
    return seen + [p.detach().clone() for p in model.parameters()]


def seeded(make, *given):
    torch.manual_seed(5)
    return make(*given)


def check(make, counted, in_first, autocast=False, **how):
    """Checks the bits, and in which steps graphs are made: in_first: in the first one, too."""
    expected = trained(seeded(make), autocast=autocast)
    made = []
    with fake_gpu.shared():
        model = seeded(make, counted) if make is CompilesInside else seeded(make)
        assert same(trained(model, autocast=autocast, note=lambda: made.append(counted.graphs), **(GPU | how)), expected)
        del model
        gc.collect()
    assert (made[0] > 0) == in_first and made[1] == made[-1] > 0


@pytest.mark.parametrize("autocast", [False, True])
def test_functions_that_a_model_compiles_are_compiled_after_its_first_call(autocast):
    check(CompilesInside, Counted(), in_first=False, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_that_were_compiled_before_are_compiled_in_the_first_call(autocast):
    counted = Counted()

    def compile_blocks(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=counted)

    check(Layers, counted, in_first=True, autocast=autocast, before=compile_blocks)


@pytest.mark.parametrize("held_units", [2, 3])
def test_blocks_that_are_compiled_otherwise_are_compiled_after_it(held_units):
    counted = Counted()

    def compile_blocks(model):
        for block in model.blocks:
            block.compile(backend=counted)

    check(Layers, counted, in_first=False, after=compile_blocks, held_units=held_units)


def compile_in_place(model, backend):
    model.compile(backend=backend)


@pytest.mark.parametrize(
    "when, how",
    [
        ("after", lambda model, backend: torch.compile(model, backend=backend)),
        ("after", compile_in_place),
        ("before", compile_in_place),
    ],
)
def test_whole_models_are_compiled_after_it(when, how):
    counted = Counted()
    check(Layers, counted, in_first=False, **{when: lambda model: how(model, counted)})


def stance():
    return torch._dynamo.eval_frame._stance.stance


class Does(Layers):
    """A model that does something in the midst of its first call."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def forward(self, ids):
        x = self.words(ids)
        action, self.action = self.action, lambda: None
        action()
        return self.head(self.blocks[0](x) * self.scale)


def call(action, times=1):
    """Calls a model on a GPU that does this in the midst of its first call."""
    with fake_gpu.shared():
        model, _ = wrap(Does(action), "memory", **GPU)
        try:
            for step in range(times):
                loss_of(model, step)
        finally:
            sluice.torch.close(model, values=False)
            del model, _
            gc.collect()


def test_a_call_that_fails_leaves_the_users_stance():
    def fail():
        raise ValueError("not now")

    with torch.compiler.set_stance("eager_on_recompile"):
        with pytest.raises(ValueError):
            call(fail)
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_a_stance_that_the_user_sets_in_a_first_call_stays():
    try:
        call(lambda: torch.compiler.set_stance("eager_on_recompile"))
        assert stance() == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")


def test_a_stance_that_begins_in_a_first_call_and_ends_after_it_leaves_none():
    begun = []
    call(lambda: begun.append(torch.compiler.set_stance("force_eager")))
    assert stance() == "force_eager"
    begun[0].__exit__(None, None, None)
    counted = Counted()
    torch.compile(lambda x: x.sin(), backend=counted)(torch.ones(3))
    assert stance() == "default" and counted.graphs == 1


def test_a_parameter_that_is_absent_is_found_where_a_stance_that_is_set_in_a_first_call_compiles():
    """The backend, which shows no operations, would read NaN."""

    class SetsStance(CompilesInside):
        def forward(self, ids):
            torch.compiler.set_stance("default")
            return super().forward(ids)

    with fake_gpu.shared():
        model = seeded(SetsStance, Hidden())
        model, _ = wrap(model, "memory", units=units_of_modules(model), held_units=2, **GPU)
        assert loss_of(model, 0).equal(loss_of(seeded(SetsStance), 0))
        sluice.torch.close(model, values=False)
        del model, _
        gc.collect()


def test_other_threads_compile_during_a_first_call():
    counted, here = Counted(), Counted()

    def compile_in_thread():
        thread = threading.Thread(target=lambda: torch.compile(lambda x: x.sin(), backend=counted)(torch.ones(3)))
        thread.start()
        thread.join()
        torch.compile(lambda x: x.cos(), backend=here)(torch.ones(3))

    call(compile_in_thread)
    assert counted.graphs == 1 and here.graphs == 0


def test_a_first_call_is_looked_at_while_another_thread_compiles():
    """Only where operations are looked at is a write through `.data` found."""

    def write(p):
        p.data.clamp_(-1, 1)

    with fake_gpu.shared():
        model = Does(lambda: write(model.scale))
        model, _ = wrap(model, "device", **GPU)
        with compiled_elsewhere(), pytest.raises(sluice.StateError, match="'scale' is written by aten.clamp_"):
            loss_of(model, 0)
        sluice.torch.close(model)
        gc.collect()


def test_a_part_of_a_compiled_block_may_be_called_while_another_thread_compiles():
    with fake_gpu.shared():
        plain, model = seeded(Layers), seeded(Layers)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=Counted())
        model, _ = wrap(model, "memory", units=units_of_modules(model), held_units=4, **GPU)
        x = torch.randn(2, 96)
        with torch.no_grad(), compiled_elsewhere():
            assert torch.equal(model.blocks[2]._orig_mod.up(x), plain.blocks[2].up(x))
        sluice.torch.close(model)
        gc.collect()


@pytest.fixture
def edited():
    """A model on a GPU that has room for few of its units."""
    torch._dynamo.reset()
    with fake_gpu.shared():
        model = seeded(Layers)
        model, _ = wrap(model, "memory", sluice.SGD(lr=1e-2), units=units_of_modules(model), held_units=2, **GPU)
        yield model
        sluice.torch.close(model, values=False)
        del model, _
        gc.collect()


def test_functions_are_compiled_once_after_threads_have_edited_models_by_turns(edited):
    """The first thread to begin an edit is the first to end it."""
    model = seeded(Layers)
    model, _ = wrap(model, "memory", sluice.SGD(lr=1e-2), **GPU)
    begun, other_begun, ended = (threading.Event() for _ in range(3))

    def edit():
        with sluice.torch.edit(model):
            begun.set()
            assert other_begun.wait(60)
        ended.set()

    first = threading.Thread(target=edit)
    first.start()
    assert begun.wait(60)
    with sluice.torch.edit(edited):
        other_begun.set()
        assert ended.wait(60)
    first.join()
    sluice.torch.close(model, values=False)
    del model, _
    assert graphs_of_three_calls() == 1


def test_what_is_first_called_in_an_edit_is_compiled_after_it(edited):
    counted = Counted()
    function = torch.compile(lambda x: x.sin() + 1, backend=counted)
    with sluice.torch.edit(edited):
        found = [function(p).clone() for p in edited.parameters()]
        assert same(found, [p.sin() + 1 for p in edited.parameters()]) and counted.graphs == 0
    function(torch.ones(3))
    assert counted.graphs == 1


def test_what_is_compiled_finds_parameters_in_an_edit_under_any_stance(edited):
    counted = Hidden()
    function = torch.compile(lambda x: x.sin() + 1, backend=counted)
    for p in seeded(Layers).parameters():
        function(p)
    assert counted.graphs > 0
    with sluice.torch.edit(edited):
        torch.compiler.set_stance("default")
        assert same([function(p) for p in edited.parameters()], [p.sin() + 1 for p in edited.parameters()])


def test_a_compiled_function_may_edit(edited):
    counted = Counted()

    @torch.compile(backend=counted)
    def add(x):
        x = x.sin()
        with torch.no_grad(), sluice.torch.edit(edited):
            for p in edited.parameters():
                p.add_(x)
        return x * 2

    expected = [p + torch.ones(()).sin() for p in seeded(Layers).parameters()]
    add(torch.ones(()))
    with sluice.torch.edit(edited):
        assert same([p.detach().clone() for p in edited.parameters()], expected)
    assert counted.graphs > 0


def test_a_compiled_function_may_take_and_load_a_state_dict(edited):
    @torch.compile(backend=Counted())
    def turn_around(x):
        taken = edited.state_dict()
        edited.load_state_dict({name: -value for name, value in taken.items()})
        return taken, x.sin()

    expected = seeded(Layers).state_dict()
    taken, _ = turn_around(torch.ones(3))
    assert same_values(taken, expected)
    assert same_values(edited.state_dict(), {name: -value for name, value in expected.items()})


def test_compiled_attention_of_transformers_is_compiled_in_the_first_call_too():
    """Uncompiled it would take memory for all scores. PyTorch's CPU has no backward of it."""

    def logits(wrapped):
        torch._dynamo.reset()
        config = transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=128, vocab_size=256
        )
        config._attn_implementation = "flex_attention"
        model = seeded(transformers.LlamaForCausalLM, config).eval()
        if wrapped:
            model, _ = wrap(model, "memory", units=units_of_modules(model), **GPU)
        with torch.no_grad():
            found = [model(torch.arange(64).view(2, 32)).logits.clone() for _ in range(2)]
        if wrapped:
            sluice.torch.close(model, values=False)
        return found

    expected = logits(wrapped=False)
    with fake_gpu.shared():
        assert same(logits(wrapped=True), expected)
        gc.collect()
