"""What would exchange a wrapped model's gradients a second time is refused, and the model goes on."""

import pytest
import torch
from support.wrapped_models import same_values, values_of, wrap
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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
    "DDP": nn.parallel.DistributedDataParallel,
    "DDP around": lambda model: nn.parallel.DistributedDataParallel(nn.Sequential(model)),
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


@pytest.mark.parametrize("name", ["DDP", "fully_shard"])
def test_a_closed_model_is_as_any_other(name):
    model, _ = wrap(network(), "memory")
    sluice.torch.close(model)
    WRAPPERS[name](model)(torch.ones(2, 8)).sum().backward()


def test_a_model_that_was_never_wrapped_is_left_alone():
    for name in ("DDP", "fully_shard"):
        WRAPPERS[name](network())(torch.ones(2, 8)).sum().backward()
