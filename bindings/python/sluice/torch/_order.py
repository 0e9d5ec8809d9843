"""In which order a stage of a pipeline computes, and what follows from that for its messages and its memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

from .._handle import text_of
from .._make import text

Action = tuple[str, int, int]  # what a stage does, with which micro-batch (item), in which of its chunks


def actions_of(order: str, stages: int, chunks: int, items: int, stage: int) -> list[Action]:
    """Returns the actions of a stage in a step."""
    found = text_of("sluice_pipeline_actions", text(order, "pipeline"), stages, chunks, items, stage)
    return [(what, item, chunk) for what, item, chunk in json.loads(found)]


class Counts(NamedTuple):
    """At one moment, by chunk: how many calls keep what their backward passes need, and how many backward passes have left gradients of
    weights for later."""

    keep: tuple[int, ...]
    left: tuple[int, ...]


def calls_in_flight(actions: Sequence[Action], chunks: int) -> list[Counts]:
    """The counts after each pass."""
    splits = any(what == "weights" for what, _, _ in actions)
    keep, left = [0] * chunks, [0] * chunks
    found: dict[Counts, None] = {}
    for what, _, chunk in actions:
        if what in ("forward", "backward", "weights"):
            keep[chunk] += {"forward": 1, "backward": -1, "weights": 0}[what]
            left[chunk] += {"forward": 0, "backward": int(splits), "weights": -1}[what]
            found[Counts(tuple(keep), tuple(left))] = None
    return list(found)


class Lags(NamedTuple):
    """How many micro-batches two stages may be apart where one waits for the other. With fewer, stages would wait that need not, or for
    ever."""

    sent: int  # of which a border's messages in one direction may be under way
    ahead: int  # by which a shared table's lookups are ahead of the last stage's forward passes
    behind: int  # by which the gradients of lookups are behind its backward passes
    looked_up: int  # as `sent`, of lookups

    @staticmethod
    def of(actions: Sequence[Action], stages: int, chunks: int) -> Lags:
        """Returns the lags of stages with these actions."""
        if chunks == 1:
            return Lags(1, stages + 1, stages - 1, max(1, stages - 1))
        # A micro-batch comes from the last stage to the first one's next chunk after a group of them, which has at least as many as there
        # are stages. A larger one lets the stages be so much further apart.
        forward = (chunk for what, _, chunk in actions if what == "forward")
        group = len(list(itertools.takewhile(lambda chunk: chunk == 0, forward)))
        sent = max(1, group - stages + 2)
        return Lags(sent, group + stages + 1, group, sent)
