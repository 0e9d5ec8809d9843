"""The end of a wrapped model: its parameters with their values, or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import BudgetError
from . import _meta
from ._gradients import Gradient

if TYPE_CHECKING:
    from ._session import Session

OLD_GRAPH = (
    "backward goes through a graph that was made before the model was closed (sluice.torch.close()); run forward again"
)
LOST = (
    "the engine of this model was closed, and the values of its parameters are gone with it; sluice.torch.close(model) is "
    "what keeps them. Make the model anew, and load its values"
)


def with_values(session: Session) -> dict[int, torch.Tensor]:
    """Ends the engine, and leaves the parameters where they are; gives the gradients, by their parameters' indices. Raises
    BudgetError, with nothing changed, where all that does not fit."""
    slots = {}
    for home in session.homes:
        gradient = home.parameter.grad
        if isinstance(gradient, Gradient) and not gradient._slot.applied:
            slots[home.index] = gradient._slot
    parameters = [session.homes[index].parameter for index in slots]
    try:
        session.release_all()
        session.engine.check_leaving(sum(p.numel() * p.element_size() for p in parameters))
        gradients = {index: slot.values() for index, slot in slots.items()}
        session.release_all()  # what was written to views of a gradient was added just now
        session.engine.leave(values=True)
    except BudgetError as error:
        raise BudgetError(
            f"{error}. Save the model (model.save_pretrained(folder), or sluice.torch.save_file(model.state_dict(), "
            "path)), and end with sluice.torch.close(model, values=False), which leaves its parameters on the meta "
            "device; or wrap it with more memory"
        ) from None
    return gradients


def without_values(session: Session) -> dict[int, torch.Tensor]:
    """Ends the engine; the model has parameters on the meta device instead of its own, which are not to be touched, and
    no gradients."""
    if (model := session.model()) is not None:
        places = _meta.places_of(model)
        for home in session.homes:
            if id(home.parameter) in places:
                _meta.replace(places, home.parameter, torch.empty_like(home.parameter, device="meta"))
    session.engine.leave(values=False)
    return {}
