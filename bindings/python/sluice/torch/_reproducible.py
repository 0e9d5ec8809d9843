"""The same bits at any number of ranks: the micro-batches that a rank has of each step, and what would let bits depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Union

import torch

from ..errors import InvalidArgumentError
from ..model import whole
from ._engine import saved_buffers
from ._modes import outside_of_graphs
from ._together import Which, size_and_rank


class MicroBatches(torch.utils.data.Sampler[list[int]]):
    """The micro-batches of this rank, for a DataLoader's batch_sampler. A step has `accumulate` micro-batches over all ranks,
    numbered from the first of the epoch; each rank has as many consecutive ones of every step. So which samples a step has
    depends on neither the number of ranks nor the rank.

        batches = sluice.torch.MicroBatches(dataset, batch=2, accumulate=8)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)

    An iteration is one epoch, in an order of its own. Samples at an epoch's end that make no whole step are left out; with
    `shuffle` they are other ones in each epoch. Where the loop states the epoch itself, set_epoch() does it, as for
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
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
        order = torch.randperm(self._samples, generator=generator) if self._shuffle else None
        for step in range(begin, self.steps):
            for number in range(self._first, self._first + self.of_rank):
                at = step * self._of_step + number * self._batch
                yield list(range(at, at + self._batch)) if order is None else order[at : at + self._batch].tolist()


# ---- what is refused ----


def check_reproducible(model: torch.nn.Module) -> None:
    """Raises InvalidArgumentError for a model that trains otherwise on each number of ranks."""
    for name, module in model.named_modules():
        _refuse_running_statistics(name, module)


def _refuse_running_statistics(name: str, module: torch.nn.Module) -> None:
    """Raises InvalidArgumentError where the module is a norm that keeps running statistics, and trains."""
    if module.training and getattr(module, "track_running_stats", False):
        raise InvalidArgumentError(
            f"'{name}' ({type(module).__name__}) keeps running statistics, which are of rank 0's micro-batches and would depend "
            "on how many ranks there are, and reproducible=True is given; make it with track_running_stats=False, use "
            "another norm, or freeze it by eval()"
        )


def computing() -> dict[str, str]:
    """By what PyTorch computes here, which all ranks must have alike for the same bits."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            models = {line.split(":", 1)[1].strip() for line in file if line.startswith(("model name", "CPU part"))}
    except OSError:
        models = set()
    found = {
        "the CPU": ", ".join(sorted(models)) or "unknown",
        "the instructions that PyTorch uses": torch.backends.cpu.get_cpu_capability(),
        "torch.get_num_threads()": str(torch.get_num_threads()),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "PyTorch's build": f"{torch.__version__} {torch.__config__.show()}",
    }
    return {f"{name}, with reproducible=True,": value for name, value in found.items()}


def watch(model: torch.nn.Module, idle: Callable[[], bool]) -> list[Any]:
    """Lets a call of the model raise InvalidArgumentError where it changes a buffer that is saved with a module that trains: the buffer then
    depends on how many calls the rank has made, and often on their inputs. (Buffers that are not saved, such as positions, are kept from call
    to call, and the ranks compare them.) idle: whether a call is only tried. Returns what removes the hooks."""
    before: list[tuple[str, torch.nn.Module, str, torch.Tensor, int]] = []

    def begin(*_: Any) -> None:
        before.clear()
        for name, module in () if idle() else model.named_modules():
            _refuse_running_statistics(name, module)
            if module.training:
                before.extend((name, module, key, buffer, buffer._version) for key, buffer in saved_buffers(module, False).items())

    def end(*_: Any) -> None:
        for name, module, key, buffer, version in before:
            if getattr(module, key, None) is not buffer or buffer._version != version:
                raise InvalidArgumentError(
                    f"'{name}' ({type(module).__name__}) has changed its buffer '{key}' in a forward pass, so that it depends on how many "
                    "micro-batches a rank computes, and reproducible=True is given; use another module, freeze this one by eval(), or change "
                    "the buffer outside of forward passes, alike on all ranks. Where it only keeps what can be computed again, register it "
                    "with persistent=False"
                )
        before.clear()

    return [
        model.register_forward_pre_hook(outside_of_graphs(begin), prepend=True),
        model.register_forward_hook(outside_of_graphs(end)),
    ]
