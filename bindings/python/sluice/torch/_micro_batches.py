"""Which samples a rank has of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Union

import torch

from ..errors import InvalidArgumentError
from ..model import whole
from ._joining import Which, size_and_rank


class MicroBatches(torch.utils.data.Sampler[list[int]]):
    """The micro-batches of this rank, for a DataLoader's batch_sampler. A step has `accumulate` micro-batches over all ranks,
    numbered from the first of the epoch; each rank has as many consecutive ones of every step. So which samples a step has
    depends on neither the number of ranks nor the rank.

        batches = sluice.torch.MicroBatches(dataset, batch=2, accumulate=8)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)

    An iteration is one epoch, in an order of its own. What is left at an epoch's end and makes no whole step is left out; with
    `shuffle` that is something else in each epoch. Where the loop states the epoch itself, set_epoch() does it, as for
    DistributedSampler; otherwise epochs follow each other. Thread rule: one thread."""

    def __init__(
        self,
        data: Union[Sized, int],
        *,
        batch: int,
        accumulate: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        ranks: Which = None,
    ) -> None:
        """data: the dataset, or how many samples there are.
        batch: the samples of a micro-batch.
        accumulate: the micro-batches of a step, over all ranks, a multiple of their number; 0: one for each rank.
        seed: of the order, the same on all ranks.
        ranks: as wrap() has it.

        Raises InvalidArgumentError where ranks cannot have as many micro-batches each, or where the samples make no step.
        """
        samples = data if isinstance(data, int) else len(data)
        size, rank = size_and_rank(ranks)
        self._batch, self._shuffle, self._seed = whole(batch, "batch"), bool(shuffle), whole(seed, "seed", 2**63)
        accumulate = whole(accumulate, "accumulate") or size
        if batch == 0:
            raise InvalidArgumentError("batch is 0; a micro-batch has at least one sample")
        if accumulate % size:
            raise InvalidArgumentError(
                f"accumulate is {accumulate}, and there are {size} ranks, of which each has as many micro-batches of a step; "
                f"give a multiple of {size}"
            )
        self.of_rank = accumulate // size
        """How many micro-batches this rank has of a step: what a loss is divided by before backward(), but not with
        wrap(reproducible=True, accumulate=), which takes the mean over all of them."""
        self._first, self._of_step = rank * self.of_rank, accumulate * batch
        self._samples = whole(samples, "the number of samples", 2**63)
        self.steps = samples // self._of_step
        """How many steps an epoch has."""
        if self.steps == 0:
            raise InvalidArgumentError(
                f"there are {samples} samples, and a step has {accumulate} micro-batches of {batch}; give less of these"
            )
        self._next = 0  # the step with which the next iteration begins, counted from the first of all epochs

    def __len__(self) -> int:
        """How many micro-batches this rank has in a whole epoch."""
        return self.steps * self.of_rank

    def set_epoch(self, epoch: int) -> None:
        """Lets the next iteration be this epoch, from its begin."""
        self._next = whole(epoch, "epoch", 2**40) * self.steps

    def resume(self, steps: int) -> None:
        """Lets the next iteration go on after so many steps of all epochs, and end with the epoch which it is in. The loop
        counts its steps, since a DataLoader with workers takes micro-batches before they are trained."""
        self._next = whole(steps, "steps", 2**63)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, begin = divmod(self._next, self.steps)
        self._next = (epoch + 1) * self.steps
        order = self._order(epoch)
        for step in range(begin, self.steps):
            for number in range(self._first, self._first + self.of_rank):
                at = step * self._of_step + number * self._batch
                yield list(range(at, at + self._batch)) if order is None else order[at : at + self._batch].tolist()

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
        return torch.randperm(self._samples, generator=generator)
