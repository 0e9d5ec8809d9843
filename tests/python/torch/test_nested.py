"""Calls of wrapped models with nested tensors, which have no sizes of their own."""

import pytest
import torch
from support import sluice_package  # noqa: F401: skips where the library is not built

import sluice
import sluice.torch
from sluice.torch._estimate import kind_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def test_a_nested_tensor_has_the_sizes_of_its_parts():
    def of(*lengths):
        return kind_of(model, (torch.nested.nested_tensor([torch.ones(length, 2) for length in lengths]),), {}, True)

    model = torch.nn.Linear(2, 2)
    assert of(3, 5)[1] == (3, 2, 5, 2) and of(3, 5)[0] == of(4, 5)[0] != of(3, 5, 5)[0]


def test_a_call_with_a_nested_tensor_is_estimated_or_refused_with_advice():
    model, _ = sluice.torch.wrap(torch.nn.Linear(2, 2), sluice.SGD(lr=0.1), memory="2GiB")
    with torch.no_grad(), pytest.raises(sluice.InvalidArgumentError, match="cannot be estimated.*reserve"):
        model(torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(5, 2)]))
    sluice.torch.close(model)
