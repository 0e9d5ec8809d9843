"""A wrapper that would exchange a wrapped model's gradients a second time is refused, or hands on calls alone, and the model goes on."""

import copy

import pytest
import torch
from support.wrapped_models import same_values, values_of, wrap
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import sluice
import sluice.torch


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def network():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def mesh():
    return torch.distributed.init_device_mesh("cpu", (1,))


WRAPPERS = {
    "DDP around": lambda model: DDP(nn.Sequential(model)),
    "fully_shard": lambda model: fully_shard(model, mesh=mesh()),
    "fully_shard of a block": lambda model: fully_shard(model[0], mesh=mesh()),
    "fully_shard around": lambda model: fully_shard(nn.Sequential(model), mesh=mesh()),
    "FSDP": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "replicate": replicate,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_refused(name):
    model, optimizer = wrap(network(), "memory")
    before = values_of(model)
    with pytest.raises(sluice.StateError, match="leave it out"):
        WRAPPERS[name](model)
    assert same_values(values_of(model), before)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not same_values(values_of(model), before)
    sluice.torch.close(model)


@pytest.mark.parametrize("name, says", [
    ("DDP around", "DistributedDataParallel was applied to the model"), ("FSDP", "FullyShardedDataParallel was applied to the model"),
    ("fully_shard", r"fully_shard\(\) was applied to the model"), ("fully_shard of a block", r"fully_shard\(\) was applied to '0'"),
    ("replicate", r"replicate\(\) was applied to the model"),
])  # fmt: skip
def test_a_model_to_which_it_was_applied_before_is_refused(name, says):
    model = network()
    made = WRAPPERS[name](model)
    with pytest.raises(sluice.InvalidArgumentError, match=f"^{says}.*wrap the model without it"):
        wrap(made if name in ("DDP around", "FSDP") else model, "memory")


def test_ddp_around_a_wrapped_model_hands_on_calls():
    model, optimizer = wrap(network(), "memory")
    twin, its_optimizer = wrap(network(), "memory")
    twin.load_state_dict(model.state_dict())
    outer = DDP(model, find_unused_parameters=True)
    assert isinstance(outer, DDP) and outer.module is model and list(outer.parameters()) == list(model.parameters())
    assert list(outer.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    assert sluice.torch.engine_of(outer) is sluice.torch.engine_of(model)
    assert not outer.eval().module.training and outer.train().module.training
    with outer.no_sync():
        outer(torch.ones(2, 8)).sum().backward()
    twin(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    its_optimizer.step()
    assert same_values(values_of(model), values_of(twin))
    assert not outer.require_backward_grad_sync and outer.process_group is not None
    for call in (outer.join, lambda: outer.register_comm_hook(None, None)):
        with pytest.raises(sluice.StateError, match="exchanges nothing"):
            call()
    with pytest.raises(sluice.StateError, match="copied or pickled"):
        copy.deepcopy(outer)
    sluice.torch.close(outer)
    with pytest.raises(sluice.StateError, match="the model was closed since: make DistributedDataParallel"):
        outer(torch.ones(2, 8))
    sluice.torch.close(twin)


@pytest.mark.parametrize("around", [DDP, WRAPPERS["fully_shard"]])
def test_a_closed_model_is_as_any_other(around):
    model, _ = wrap(network(), "memory")
    sluice.torch.close(model)
    outer = around(model)
    assert type(outer).__name__ != "LeftOut"
    outer(torch.ones(2, 8)).sum().backward()


def test_a_model_that_was_never_wrapped_is_left_alone():
    for around in (DDP, WRAPPERS["fully_shard"]):
        around(network())(torch.ones(2, 8)).sum().backward()
