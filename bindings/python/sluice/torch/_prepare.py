"""Turns the arguments of wrap() and plan() into what an engine is planned for."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ..engine import plan
from ..errors import BudgetError, NotFoundError
from ..model import Options, Size, Unit, size_of, whole
from ..optimizers import AdamW, Muon
from ..optimizers import Optimizer as Settings
from ._guards import check_ahead, check_model, check_optimizer, check_writes
from ._estimate import reserves_of, reserves_on_gpu
from ._gpu import HOST, Account, Gpu, gpu_of
from ._measures import UNMEASURED, FirstStep, FirstStepOnGpu
from ._reproducible import check_reproducible, computing
from ._roles import roles_of
from ._together import Together
from ._units import Group, Roles, bytes_in_memory, find_units, held_at_least, held_by_calls, units_of


class Prepared(NamedTuple):
    """What is needed to wrap a model."""

    groups: list[Group]
    units: list[Unit]  # the groups, as the engine takes them
    settings: list[Settings]  # of each parameter group
    roles: Roles
    options: Options
    memory: int  # Options.memory in bytes
    reserve: int  # the bytes that are reserved for PyTorch
    train: bool  # whether there is an optimizer
    estimated: Optional[int]  # the most bytes that PyTorch has at once, where they were estimated
    stated: bool  # whether the user stated the reserve
    sampled: bool  # whether it was estimated for a batch of the user's
    clip_value: Optional[float]
    gpu: Optional[Gpu]  # where parameters are; None: in the memory of the CPU

    def of_pytorch(self, plan: Mapping[str, Any]) -> int:
        """The bytes that PyTorch may take where it computes, by this plan."""
        if self.gpu is None:
            return self.reserve
        free = 0 if self.stated or self.sampled else max(0, plan["budget"]["device"] - plan["device"])
        return self._of_device - self.gpu.beside + free

    @property
    def _of_device(self) -> int:
        """The bytes of the GPU's memory that the plan leaves to PyTorch and CUDA."""
        return size_of(self.options.device_reserved, "device_reserved")

    def first_step(
        self, account: Callable[[], Account], plan: Mapping[str, Any], plan_with: Callable[[int], Mapping[str, Any]]
    ) -> FirstStep:
        """What measures the first step. account: tells how much of the GPU's memory is free, and the engine's; plan_with: makes the plan
        that leaves PyTorch so many bytes of it."""
        if self.gpu is not None:
            other = None if self.stated or self.sampled else plan_with
            return FirstStepOnGpu(self.gpu, self.memory, self.of_pytorch(plan), self.estimated, account, self._of_device, other)
        return FirstStep(self.memory, self.reserve, self.estimated, self.stated)

    def told(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """What a plan says of PyTorch before anything is measured."""
        told = {"peak": self.estimated, "reserve": self.of_pytorch(plan), "measured": None}
        return told if self.gpu is None else {**told, **UNMEASURED}

    @property
    def alike(self) -> dict[str, Any]:
        """What is the same on all ranks."""
        o = self.options
        model = [(p.name, p.shape, p.dtype, p.frozen, p.group, p.span) for unit in self.units for p in unit.parameters]
        return {
            "the model's number of units": len(self.units),
            "the model (its parameters, in their units)": model,
            "the optimizer": self.settings,
            "state": o.state,
            "master": o.master,
            "seed": o.seed,
            "stage": o.stage,
            "clip_value": self.clip_value,
            "reproducible": o.reproducible,
            "accumulate": o.micro_batches,
            **(computing() if o.reproducible else {}),
        }


def prepare(
    model: torch.nn.Module,
    optimizer: Optional[Settings],
    *,
    memory: Size,
    reserve: Optional[Size] = None,
    sample_batch: Any = None,
    param_groups: Optional[Iterable[Any]] = None,
    units: Optional[Mapping[str, Sequence[str]]] = None,
    threads: int = 0,
    held_units: int = 3,
    prefetch: int = 0,
    clip_value: Optional[float] = None,
    reproducible: bool = False,
    accumulate: int = 0,
    disk: Any = None,
    device_memory: Optional[Size] = None,
    device: Any = None,
    together: Together,
    **others: Any,
) -> Prepared:
    """The arguments are wrap()'s; others: those that Options has, too. Takes no memory, and leaves the model as it is.
    Raises InvalidArgumentError for what cannot be wrapped so, and StateError for a wrapped model."""
    check_model(model)
    check_optimizer(optimizer, others.get("update_in_backward", False), param_groups, clip_value)
    if reproducible:
        check_reproducible(model, accumulate)
    settings, roles = roles_of(model, AdamW() if optimizer is None else optimizer, param_groups or ())
    gpu = gpu_of(model, device_memory, device)
    if gpu is not None:
        check_writes(model)
    groups = find_units(model, units, by_calls=gpu is not None)
    if gpu is not None:
        gpu.give_back()
    declared = units_of(groups, roles, optimizer is not None)
    held = held_at_least(model, groups) if gpu is None else held_by_calls(model, groups)
    given_back = bytes_in_memory(groups)
    check_ahead(held_units, prefetch, len(groups))
    of_gpu = 0 if gpu is None else size_of(device_memory or 0, "device_memory")
    if gpu is None:
        reserves, estimated = reserves_of(model, reserve, sample_batch, optimizer is not None)
        choices = [{"reserved": each} for each in reserves]
    else:
        reserves, estimated = reserves_on_gpu(model, reserve, sample_batch, optimizer is not None, gpu, of_gpu)
        choices = [{"reserved": HOST, "device_reserved": each + gpu.beside} for each in reserves]
    budget = size_of(memory, "memory")
    options = Options(
        memory=budget,
        optimizer=settings,
        disk=together.folders(disk),
        threads=together.threads(threads),
        held_units=max(held_units, held),
        prefetch=prefetch,
        given_back=given_back,
        serve_touches=gpu is None,
        sgemm=sgemm() if isinstance(optimizer, Muon) else None,
        team=team(),
        ranks=together.ranks,
        planned=together.planned,
        reproducible=bool(reproducible),
        micro_batches=whole(accumulate, "accumulate"),
        device_memory=of_gpu,
        device=0 if gpu is None else gpu.index,
        **others,
    )
    options = _fitting(declared, options, choices)
    train, stated = optimizer is not None, reserve is not None
    return Prepared(
        groups, declared, settings, roles, options, budget, size_of(options.reserved, "reserve"), train, estimated, stated,
        sample_batch is not None, clip_value, gpu,
    )  # fmt: skip


def _fitting(units: Sequence[Unit], options: Options, choices: Sequence[Mapping[str, int]]) -> Options:
    """The options with the first of these reserves for which there is a plan, else with the last."""
    for choice in choices[:-1]:
        with contextlib.suppress(BudgetError):
            made = dataclasses.replace(options, **choice)  # type: ignore[arg-type]
            plan(units, made)
            return made
    return dataclasses.replace(options, **choices[-1])  # type: ignore[arg-type]


# ---- PyTorch's own matrix products and threads, for the engine ----

_LIBRARY = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def sgemm() -> int:
    """The address of sgemm_ in PyTorch's library, for Options.sgemm: its products run on PyTorch's threads. Raises
    NotFoundError where PyTorch was built without it."""
    try:
        return _address("sgemm_")
    except (OSError, AttributeError) as error:
        raise NotFoundError(
            f"Muon's products are made by PyTorch's sgemm_, and this one ({torch.__version__}) has none in '{_LIBRARY}' "
            f"({error}); use a PyTorch with MKL or OpenBLAS, or another optimizer"
        ) from error


def team() -> Optional[int]:
    """The address of GOMP_parallel in PyTorch's OpenMP, for Options.team: the engine's loops run on PyTorch's threads.
    None where PyTorch has no such OpenMP."""
    try:
        return _address("GOMP_parallel")
    except (OSError, AttributeError):
        return None


def _address(name: str) -> int:
    """The address of a function in PyTorch's library, or in one that it uses."""
    found = ctypes.cast(getattr(ctypes.CDLL(str(_LIBRARY)), name), ctypes.c_void_p).value
    assert found is not None
    return found
