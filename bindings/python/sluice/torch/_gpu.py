"""The GPU on which a model is wrapped."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from typing import Any, NamedTuple, Optional, Union

import torch

from ..errors import BudgetError, InvalidArgumentError
from ..model import Size, size_of

CPU = torch.device("cpu")
WORKSPACES = 128 << 20  # bytes of a GPU's that matrix products take for themselves, and that segments of the allocator waste
BESIDE = 160 << 20  # bytes of a GPU's that CUDA's libraries take beside the allocator: 150 MiB on an H200
HOST = 160 << 20  # bytes of the host's memory that PyTorch takes beside a GPU's: code, thread stacks, small objects


Mark = Union[torch.cuda.Event, float]  # a place in what is queued on a GPU: an event, or the clock's time where the CPU stands in for it


class Account(NamedTuple):
    """Bytes of a GPU's memory: what nobody has, all processes counted, and what the engine has."""

    free: int
    engine: int
    shared: bool = False  # whether other ranks that train the same model are on that GPU, too


class _Bounds:
    """The memory that PyTorch's allocator may take of one GPU for all models that are wrapped there."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, 0
        self._held = torch.cuda.memory_reserved(device)  # by what is not wrapped
        self._before = torch.cuda.get_per_process_memory_fraction(device)

    def change(self, size: int) -> bool:
        """Adds the bytes of a model, or takes them away. Returns whether that was the last one's."""
        self._size += size
        part = (self._held + self._size) / torch.cuda.get_device_properties(self._device).total_memory
        part = math.nextafter(part, 1.0)  # PyTorch cuts off what is less than a byte
        torch.cuda.set_per_process_memory_fraction(min(1.0, part) if self._size else self._before, self._device)
        return self._size == 0

    def untaken(self) -> int:
        """The bytes that it has not taken yet."""
        return max(0, self._held + self._size - torch.cuda.memory_reserved(self._device))


_bounds: dict[torch.device, _Bounds] = {}


class Gpu(NamedTuple):
    """A GPU by its index, and as PyTorch knows it."""

    index: int  # type: ignore[assignment]
    device: torch.device

    @property
    def kind(self) -> str:
        """The name of GPUs of its kind."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the CPU"

    @property
    def beside(self) -> int:
        """The bytes that a plan leaves to CUDA's libraries (cuBLAS, cuDNN, kernels that are loaded)."""
        return BESIDE if self.device.type == "cuda" else 0

    def stream(self) -> int:
        """The stream on which PyTorch queues this thread's work now; 0: the default one."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def bound(self, size: int) -> None:
        """Lets PyTorch's allocator take so many bytes of the GPU's memory, besides what it has now and those of earlier
        calls, and no more."""
        if self.device.type == "cuda":
            _bounds.setdefault(self.device, _Bounds(self.device)).change(size)

    def unbound(self, size: int) -> None:
        """Ends a bound(). Where it was the last, PyTorch may take what it could before the first."""
        if self.device in _bounds and _bounds[self.device].change(-size):
            del _bounds[self.device]

    def bytes_of(self, model: torch.nn.Module) -> int:
        """Returns the GPU memory of a model's parameters before they move into the engine's."""
        if self.device.type == "cpu":  # it stands in for the GPU, which has no more of them than the engine's
            return 0
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.device == self.device)

    def check_room(self, model: torch.nn.Module, reserve: int, account: Account) -> None:
        """Raises BudgetError where less of the GPU's memory will be free than PyTorch may then take: `reserve` for this model,
        whose engine has its memory and whose parameters have not moved, and what it has not taken for others."""
        going, others = self.bytes_of(model), _bounds[self.device].untaken() if self.device in _bounds else 0
        free = account.free + going
        if reserve + self.beside + others <= free:
            return
        for_cuda = f", CUDA's libraries {self.beside >> 20} MiB" if self.beside else ""
        for_others = f", and {others >> 20} MiB that PyTorch may still take for other wrapped models" if others else ""
        raise BudgetError(
            f"PyTorch is to have {reserve >> 20} MiB of the memory of GPU {self.index} (reserve){for_cuda}{for_others}, and {free >> 20} MiB are "
            f"free, besides the {account.engine >> 20} MiB that the plan takes; end what else uses that GPU (nvidia-smi shows it), "
            "or give less device_memory and reserve"
        )

    @property
    def captures(self) -> bool:
        """Whether PyTorch captures a graph of CUDA's on this thread's stream."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def give_back(self) -> None:
        """Gives memory back to the GPU which PyTorch's allocator keeps, and no tensor has."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def held(self) -> int:
        """The bytes of the GPU's memory that PyTorch's allocator has now."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def mark(self) -> Optional[Mark]:
        """This place in what PyTorch queues on this thread's stream; None in a graph, which is no place in time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if self.captures:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, first: Mark, second: Mark) -> float:
        """The seconds that the GPU took from one place to another, for which it waits."""
        if isinstance(first, float) or isinstance(second, float):
            return float(second) - float(first)  # type: ignore[arg-type]
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def begin_peak(self) -> None:
        """Begins to measure how much of the GPU's memory PyTorch's allocator has at most."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> Optional[int]:
        """The most bytes that it has had since, with those of before; None where it cannot be measured."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None


def gpu_of(model: torch.nn.Module, device_memory: Optional[Size], device: Any, several: bool = False) -> Optional[Gpu]:
    """The GPU on which a model is to be wrapped, or None for the CPU. The arguments are wrap()'s; several: this process is one of several
    ranks. Raises InvalidArgumentError where the model is elsewhere."""
    places = {p.device: name for name, p in model.named_parameters() if not p.is_meta}  # each with one that is there
    of_gpu, found = size_of(device_memory or 0, "device_memory"), next(iter(places), None)
    if not of_gpu and device is None and all(place.type == "cpu" for place in places):
        return None
    if of_gpu:
        _require_cuda()
    wanted = found if device is None else None
    with contextlib.suppress(RuntimeError, TypeError):
        wanted = wanted or torch.device(device)
    gpu = _gpu(wanted, several) if of_gpu and wanted is not None and len(places) < 2 else None
    moves = found is None or (device is not None and found.type == "cpu")
    if gpu is None or not (moves or (found is not None and _gpu(found) == gpu)):
        there = ", ".join(f"'{name}' on {place}" for place, name in places.items()) or "all parameters on the meta device"
        raise InvalidArgumentError(
            f"device is {device!r}{'' if gpu is None else f' (GPU {gpu.index})'}, device_memory is {device_memory!r}, and the model has {there}. To "
            "train on a GPU, state how much of its memory may be taken (device_memory='24GiB'), and have all of the model there "
            "(model.to('cuda:0')), or on the CPU or the meta device, with the GPU to which it is to move (device='cuda', 'cuda:1'); to train on "
            "the CPU, leave both out, and have the model there (model.cpu())"
        )
    return gpu


def _gpu(place: torch.device, several: bool = False) -> Optional[Gpu]:
    """The GPU that a device of PyTorch's is; None where it is none."""
    shared = _is_shared()
    if place.type != "cuda":
        return Gpu(0, CPU) if shared else None
    index = _index(several, shared) if place.index is None else place.index
    return Gpu(index, CPU if shared else torch.device("cuda", index))


def _index(several: bool, shared: bool) -> int:
    """The index of the GPU that "cuda" is: the one that the script has chosen, or, of several ranks, that of LOCAL_RANK."""
    chosen = 0 if shared else torch.cuda.current_device()
    rank = os.environ.get("LOCAL_RANK", "")
    if not several or chosen or not rank.isdecimal():
        return chosen
    count = gpus_seen()
    if count == 1:  # others see others
        return 0
    if int(rank) >= count:
        raise InvalidArgumentError(
            f"device is 'cuda', which is GPU {rank} on the rank with LOCAL_RANK={rank}, and this process sees {count} GPUs; start as many "
            f"ranks on a machine as it has GPUs (torchrun --nproc-per-node {count}), look at CUDA_VISIBLE_DEVICES, or say by its number "
            "which GPU a rank has (device='cuda:0')"
        )
    return int(rank)


def gpus_seen() -> int:
    """How many GPUs this process sees."""
    if not _is_shared():
        return torch.cuda.device_count()
    count, driver = ctypes.c_int(), ctypes.CDLL(os.environ["SLUICE_CUDA_DRIVER"])
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _require_cuda() -> None:
    if not torch.cuda.is_available() and not _is_shared():
        raise InvalidArgumentError(
            f"device_memory is given, and this PyTorch ({torch.__version__}) finds no GPU (torch.cuda.is_available() is "
            "false): install a PyTorch for CUDA, and look at nvidia-smi, or leave device_memory out to train on the CPU"
        )


def _is_shared() -> bool:
    """Whether the driver is that of Sluice's own tests, and its memory the CPU's, too: PyTorch's CPU is the GPU then."""
    driver = os.environ.get("SLUICE_CUDA_DRIVER")
    if not driver:
        return False
    try:
        return bool(ctypes.CDLL(driver).sluice_fake_cuda_shares_memory())
    except (OSError, AttributeError):
        return False
