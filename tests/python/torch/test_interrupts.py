"""After a KeyboardInterrupt the model goes on, and no hook or mode of it is left behind."""

import pytest
import torch
from support.chain import Chain, drawn, loss_of, plain_loop
from support.wrapped_models import units_of_modules, wrap

import sluice.torch


def hooks_of_saved_tensors():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def interrupted(model, times=1, autocast=False):
    """Calls the model, with Ctrl-C in each call."""

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.middle.register_forward_hook(stop)
    for _ in range(times):
        with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(drawn(0))
    handle.remove()


@pytest.mark.parametrize("autocast", [False, True])
def test_an_interrupt_in_forward_leaves_nothing_behind(autocast):
    model, optimizer = wrap(Chain(), "disk", units=units_of_modules(Chain()))
    interrupted(model, times=2, autocast=autocast)
    assert hooks_of_saved_tensors() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.is_autocast_cache_enabled()
    plain_loop(model, optimizer, lambda value: None, steps=1)
    interrupted(model)
    sluice.torch.close(model)
    loss_of(model, 0).backward()
