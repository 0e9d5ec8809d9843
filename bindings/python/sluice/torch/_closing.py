"""Closes a wrapped model, which keeps its parameters' values or not."""

from __future__ import annotations

import torch

from .. import _abi
from ..errors import BudgetError
from . import _absent
from ._gradients import Gradient, Slot
from ._moving import places_of, replace
from ._presence import Presence


def with_values(presence: Presence) -> dict[int, torch.Tensor]:
    """Ends the engine, and leaves the parameters where they are; all ranks do so. Returns the gradients, by their parameters'
    indices. Raises BudgetError, with nothing changed, where all that does not fit."""
    if presence.engine.gpu is not None:
        return _with_values_of_gpu(presence)
    slots = _slots(presence)
    parameters = [presence.homes[index].parameter for index in slots]
    try:
        presence.release_all()
        besides = sum(p.numel() * p.element_size() for p in parameters)
        if (ranks := presence.engine.options.ranks) is None:
            presence.engine.check_leaving(besides)
        else:
            ranks.agreed("closing the model", lambda: presence.engine.check_leaving(besides))
        gradients = {index: slot.values() for index, slot in slots.items()}
        presence.release_all()  # finding the gradients may have written views back, which acquires units
        presence.engine.leave(values=True)
    except BudgetError as error:
        raise BudgetError(
            f"{error}. Save the model (model.save_pretrained(folder), or sluice.torch.save_file(model.state_dict(), "
            "path)), and end with sluice.torch.close(model, values=False), which leaves its parameters on the meta "
            "device; or wrap it with more memory"
        ) from None
    return gradients


def _slots(presence: Presence) -> dict[int, Slot]:
    """The gradients that the engine has, by their parameters' indices."""
    slots = {}
    for home in presence.homes:
        gradient = home.parameter.grad
        if isinstance(gradient, Gradient) and not gradient._slot.applied:
            slots[home.index] = gradient._slot
    return slots


def _with_values_of_gpu(presence: Presence) -> dict[int, torch.Tensor]:
    """The same on a GPU, where parameters get memory of PyTorch's, besides that of the engine."""
    try:
        gradients = {index: slot.values() for index, slot in _slots(presence).items()}
        values = []
        for home in presence.homes:
            with torch.no_grad():  # it begins no step
                presence.use_together(dict.fromkeys(home.units, _abi.READ), f"'{home.name}'")
            values.append(home.memory.clone())
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the values of the model do not fit as plain tensors in what is left to PyTorch of device_memory ({error}). Save the "
            "model (sluice.torch.engine_of(model).save(folder)), and end with sluice.torch.close(model, values=False), which "
            "leaves its parameters on the meta device"
        ) from error
    presence.release_all()
    for home, plain in zip(presence.homes, values, strict=True):
        _absent.show(home.parameter, plain)
    return gradients


def without_values(presence: Presence) -> dict[int, torch.Tensor]:
    """Ends the engine, and gives the model parameters on the meta device and no gradients. Its old parameters must not be
    touched."""
    if (model := presence.model()) is not None:
        places = places_of(model)
        for home in presence.homes:
            if id(home.parameter) in places:
                replace(places, home.parameter, torch.empty_like(home.parameter, device="meta"))
    if presence.engine.gpu is None:
        presence.engine.leave(values=False)
    for home in () if presence.engine.gpu is None else presence.homes:
        _absent.show(home.parameter, torch.empty(0, dtype=home.memory.dtype, device=home.memory.device))
    return {}
