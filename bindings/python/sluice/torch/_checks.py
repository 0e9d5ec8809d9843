"""Checks of the arguments of wrap() and plan(), and of models that cannot be wrapped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import InvalidArgumentError, StateError
from ..model import whole
from ..optimizers import Optimizer as Settings


def check_optimizer(optimizer: Any, update_in_backward: bool, param_groups: object, clip_value: float | None) -> None:
    """Raises InvalidArgumentError for what is no optimizer, for arguments that need one, and for values out of range."""
    if optimizer is not None and not isinstance(optimizer, Settings):
        raise InvalidArgumentError(
            f"the optimizer is {optimizer!r:.80}; settings such as sluice.AdamW(lr=1e-4) are needed, or None for a model "
            "that is not trained (a batch is given as sample_batch=)"
        )
    for name, given in (("update_in_backward is", update_in_backward), ("param_groups are", param_groups is not None)):
        if optimizer is None and given:
            raise InvalidArgumentError(f"{name} given without an optimizer; give one, such as sluice.AdamW()")
    if clip_value is not None and not 0 < clip_value < math.inf:
        raise InvalidArgumentError(f"clip_value is {clip_value}; a finite bound above 0 is needed, or None for no clipping")


def check_ahead(held_units: int, prefetch: int, units: int) -> None:
    """Raises InvalidArgumentError for numbers that a model of so many units cannot have."""
    if whole(held_units, "held_units") == 0:
        raise InvalidArgumentError("held_units is 0; the unit that computes is held, so 1 is the least")
    if whole(prefetch, "prefetch") > 2 * units:
        raise InvalidArgumentError(
            f"prefetch is {prefetch}, and a step uses the model's {units} units about {2 * units} times, forward and "
            "backward; give no more than that, or 0 for what the plan finds best"
        )


def check_model(model: Any, train: bool) -> None:
    """Raises InvalidArgumentError that names what cannot be wrapped as it is, and StateError for a wrapped model."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"the model is {model!r:.80}, which is no torch.nn.Module; give the model itself")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"'{name}'" if name else "the model"
            raise InvalidArgumentError(
                f"{what} is a {type(module).__name__} of torch.jit, whose modules run without Python's hooks; wrap what it "
                "was made of (torch.compile works on its blocks), and script it after sluice.torch.close()"
            )
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(t):
            raise InvalidArgumentError(
                f"'{name}' has no shape yet (a lazy module); call the model once before it is wrapped"
            )
    _refuse_wrapped(model)
    _check_sharing(model)
    _check_inference(model, train)


def check_writes(model: torch.nn.Module) -> None:
    """Raises InvalidArgumentError for modules that write their parameters when they are called, for models on a GPU."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
            raise InvalidArgumentError(
                f"{repr(name) if name else 'the model'} has max_norm={module.max_norm}, by which each call writes its parameters, and "
                "a write to a GPU's memory is not seen; set its max_norm to None, and bound the rows after optimizer.step(), within "
                "`with sluice.torch.full_parameters(model):` (torch.renorm(weight, 2, 0, max_norm)), or wrap the model on the CPU"
            )


def _refuse_wrapped(model: torch.nn.Module) -> None:
    owners = {name: owner for name, p in model.named_parameters() if (owner := getattr(p, "_sluice", None)) is not None}
    if any(owner.model() is model and not owner.engine.closed for owner in owners.values()):
        raise StateError(
            "the model is wrapped already, and sluice.torch.engine_of(model).plan() is its plan; "
            "sluice.torch.close(model) ends that"
        )
    for name, owner in owners.items():
        if owner.engine.closed:
            raise StateError(
                f"the values of '{name}' are gone with the engine of its model, which engine.close() has closed; "
                "sluice.torch.close(model) keeps them. Make the model anew"
            )
        raise StateError(f"'{name}' belongs to another wrapped model; close that, or wrap the whole once")


def _check_inference(model: torch.nn.Module, train: bool) -> None:
    """Raises InvalidArgumentError for tensors of torch.inference_mode() where they would be trained, or used outside of it."""
    if torch.is_inference_mode_enabled():
        if train:
            raise InvalidArgumentError(
                "the model is wrapped inside torch.inference_mode(), whose tensors cannot be trained; wrap it outside of that, or "
                "without an optimizer"
            )
        return
    for name, p in model.named_parameters():
        if p.is_inference():
            raise InvalidArgumentError(
                f"'{name}' was made inside torch.inference_mode(), and PyTorch uses such a tensor nowhere else; make the model "
                "outside of that, or, where it is not trained, wrap it and call it inside"
            )


class _Extent(NamedTuple):
    """The memory in which a tensor lies, and from which byte to which."""

    memory: int
    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def _check_sharing(model: torch.nn.Module) -> None:
    parameters = dict(model.named_parameters())
    others = {
        f"{path}.{name}" if path else name: t
        for path, module in model.named_modules()
        for name, t in [*module._buffers.items(), *vars(module).items()]
        if type(t) is torch.Tensor
    }
    for pair in _sharing(others, parameters):
        found = [name for name in pair if name in parameters]
        if len(found) == 2:
            raise InvalidArgumentError(
                f"'{pair[1]}' and '{pair[0]}' are two Parameters over one memory, which would have a memory each; make them "
                "one Parameter (module.weight = other.weight), or give each its own (nn.Parameter(p.detach().clone()))"
            )
        if len(found) == 1 and parameters[found[0]].requires_grad:
            other = pair[0] if pair[1] == found[0] else pair[1]
            raise InvalidArgumentError(
                f"'{other}' is a view of the memory of '{found[0]}', which moves when the model is wrapped, so that it would "
                "keep the values of now; make the view in forward, or give it a clone(). What makes it at each call, as "
                "torch.nn.utils.spectral_norm() does, makes a tensor of its own: call the model once before it is wrapped"
            )


def _sharing(others: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors that share bytes, at least one of them a parameter."""
    every = {**others, **parameters}
    extents = sorted(
        (_extent(name, t) for name, t in every.items() if t.numel() and t.layout == torch.strided),
        key=lambda extent: extent[:3],
    )
    open_ones: list[_Extent] = []
    for extent in extents:
        open_ones = [other for other in open_ones if other.memory == extent.memory and other.end > extent.begin]
        for other in open_ones:
            if (extent.name in parameters or other.name in parameters) and _overlap(extent, other):
                yield other.name, extent.name
        open_ones.append(extent)


def _extent(name: str, t: torch.Tensor) -> _Extent:
    size = t.element_size()
    reach = size + sum((length - 1) * stride * size for length, stride in zip(t.shape, t.stride(), strict=True))
    # Tensors on the meta device have no addresses, so that offsets in their storages are compared.
    begin = int(t.storage_offset()) * size if t.is_meta else t.data_ptr()
    return _Extent(t.untyped_storage()._cdata if t.is_meta else 0, begin, begin + reach, name, t)


def _overlap(one: _Extent, other: _Extent) -> bool:
    """Whether they have a byte in common. Columns of one matrix have none, though they lie among each other."""
    begin = min(one.begin, other.begin)
    marks = torch.zeros(max(one.end, other.end) - begin, dtype=torch.bool, device="cpu")
    _bytes_in(marks, one, begin).fill_(True)
    return bool(_bytes_in(marks, other, begin).any())


def _bytes_in(marks: torch.Tensor, extent: _Extent, begin: int) -> torch.Tensor:
    t, size = extent.tensor, extent.tensor.element_size()
    return marks.as_strided((*t.shape, size), (*(stride * size for stride in t.stride()), 1), extent.begin - begin)
