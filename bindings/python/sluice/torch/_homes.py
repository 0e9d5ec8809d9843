"""The engine's memory as tensors, and tensors as memory for the engine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from .._library import library
from ..engine import Engine
from ..errors import StateError
from ..model import Options, Parameter, Unit


@dataclasses.dataclass(frozen=True)
class Span:
    """What one unit has of a parameter: all of it, unless that is large."""

    index: int  # of the engine's parameters
    key: str  # by which the engine knows it
    unit: int
    first: int  # element of the parameter
    elements: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The span's part of all elements of the parameter."""
        return flat[self.first : self.first + self.elements]


class View(NamedTuple):
    """How a tensor shows its memory. Its type is one of the view, as its size is: memory may be seen as another type."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of that type
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """How this strided tensor shows its memory."""
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return View(tensor.dtype, *place, tensor.is_conj(), tensor.is_neg())

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The same view of that tensor's memory, which may be of any type."""
        made = torch.empty(0, dtype=self.dtype)
        made.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        made = made.conj() if self.conjugate else made
        return torch._neg_view(made) if self.negative else made


class Arrivals:
    """Threads that are adding to one parameter's p.grad. PyTorch adds under a lock that it shows to nobody, so p.grad may
    be taken away only while no thread is on the way there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()

    def begin(self) -> None:
        """This thread has a gradient that autograd is about to add. Waits while another takes p.grad away."""
        with self._lock:
            self._threads.add(threading.get_ident())

    @contextlib.contextmanager
    def end(self) -> Iterator[bool]:
        """This thread's gradient was added; inside of the `with` nobody begins. Gives whether none is on the way."""
        with self._lock:
            self._threads.discard(threading.get_ident())
            yield not self._threads

    def forget(self) -> None:
        """No thread is on the way any more, nor is one that began, and whose backward then failed. Does not wait."""
        self._threads.clear()


@dataclasses.dataclass
class Home:
    """Where a parameter lives: its units, and the tensor over its memory in the engine."""

    name: str
    index: int  # of the model's homes
    spans: list[Span]
    group: int  # of the optimizer's settings
    place: int  # in that group: the order in which torch.optim counts
    parameter: torch.nn.Parameter
    memory: torch.Tensor
    trainable: bool
    by_elements: bool  # an optimizer of matrices leaves it to AdamW
    address: int = dataclasses.field(init=False)  # in the engine
    arrivals: Arrivals = dataclasses.field(default_factory=Arrivals)

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()

    @property
    def units(self) -> list[int]:
        """The units in which the parameter lies."""
        return [span.unit for span in self.spans]

    @property
    def version(self) -> int:
        """A number that is another one when values were changed, by a step or by the user."""
        return self.parameter._version

    def changed(self) -> None:
        """The values are others now: backward through a graph that was made before is an error, as in PyTorch."""
        torch.autograd.graph.increment_version(self.parameter)

    @property
    def replaced(self) -> bool:
        """Whether somebody gave the parameter other memory."""
        return self.parameter.data_ptr() != self.address

    @property
    def moved(self) -> bool:
        """Whether what PyTorch has of the engine's memory is elsewhere: what shares it between processes moves it so."""
        return self.memory.data_ptr() != self.address

    def check_memory(self) -> None:
        """Raises where somebody gave the parameter other memory."""
        if self.moved:
            raise StateError(
                f"'{self.name}' was moved into memory that processes share (by share_memory_(), or by sending it to another "
                "process), which the engine does not see: sluice.torch.close() the model, and wrap it again; send clone()s "
                "to other processes"
            )
        if self.replaced:
            raise StateError(
                f"'{self.name}' was given other memory (by .data = ..., or set_()), which the engine does not see; "
                "copy_() into it instead"
            )

    def check_place(self, found: torch.Tensor | None) -> None:
        """Raises where a module has no parameter, or another, where it had this one."""
        if found is None or (isinstance(found, torch.nn.Parameter) and found is not self.parameter):
            raise StateError(
                f"'{self.name}' is no more where it was when the model was wrapped: its module has "
                f"{'none' if found is None else 'another Parameter'} there, which would not be trained; copy_() into it "
                "instead, or sluice.torch.close() the model before, and wrap it again. (torch.func.functional_call() may "
                "be given tensors, such as parameters' detach(); torch.export() needs a closed model)"
            )


def check_places(model: torch.nn.Module, homes: Sequence[Home]) -> None:
    """Raises where one of these is no more a parameter of the model."""
    here = dict(model.named_parameters())
    known = {id(p) for p in here.values()}
    for home in homes:
        if id(home.parameter) not in known:
            home.check_place(here.get(home.name))


class ModelEngine(Engine):
    """An engine whose parameters are seen as tensors, which may be alive when it ends: their addresses stay until the last
    tensor of a unit is gone, also one that the user made of another."""

    def __init__(self, units: Sequence[Unit], options: Options) -> None:
        super().__init__(units, options)
        self._seen: list[tuple[list[int], weakref.ref[Any]]] = []  # units, and the buffer behind a tensor
        self.left = False  # whether sluice.torch.close() has closed it

    @property
    def own(self) -> Engine:
        """This engine without what is refused to users: for the model's hooks and its optimizer."""
        return cast(Engine, super())

    def tensor(self, spans: Sequence[Span], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A parameter where it lies; touches none of it. It, and all that is made of it, keeps the engine, until that is
        closed."""
        address = ctypes.c_void_p()
        self._handle.call("sluice_engine_parameter", spans[0].index, ctypes.byref(address))
        item = torch.empty((), dtype=dtype).element_size()
        raw = (ctypes.c_char * (math.prod(shape) * item)).from_address(address.value or 0)
        raw.keeps = self  # type: ignore[attr-defined]
        self._seen.append(([span.unit for span in spans], weakref.ref(raw)))
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    def check_leaving(self, besides: int) -> None:
        """Raises BudgetError where leave(True) would, with as many bytes that are taken besides."""
        self._handle.call("sluice_engine_leave", 1, besides, None)

    def leave(self, values: bool) -> None:
        """Closes the engine; the tensors then lie in ordinary memory with their values, or, without `values`, in none:
        a touch ends the process with a message. Raises BudgetError where there is not the memory, with nothing changed;
        after any other error the tensors of some units have no values."""
        homes = (ctypes.c_void_p * len(self.units))()
        try:
            self._handle.call("sluice_engine_leave", 1 if values else 0, 0, homes)
        finally:
            kept = [None if home is None else _FormerHome(home) for home in homes]
            if all(home is not None for home in kept):
                for units, reference in self._seen:
                    if (raw := reference()) is not None:
                        raw.keeps = [kept[unit] for unit in units]
                super().close()

    def close(self) -> None:
        """Closes the engine without keeping the values: sluice.torch.close() does that."""
        if not self.closed and not self._handle.inherited:
            self.leave(values=False)


class _FormerHome:
    """Keeps a unit's addresses for as long as this object lives."""

    def __init__(self, address: int) -> None:
        weakref.finalize(self, library().sluice_home_destroy, address).atexit = False


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, valid as long as the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def floats_of(tensor: torch.Tensor, declared: Parameter) -> torch.Tensor:
    """What a unit has of its values, in f32, contiguous, on the CPU: where they are where that is so already."""
    flat = tensor.detach().reshape(-1)[declared.first : declared.first + declared.elements]
    return flat.to(device="cpu", dtype=torch.float32).contiguous()


def storage_of(tensor: Any) -> int:
    """The address at which the memory of a tensor begins, of which it may be a view."""
    return int(tensor.untyped_storage().data_ptr())


def outside(values: torch.Tensor, by_storage: Mapping[int, Home]) -> torch.Tensor:
    """The same values where the engine may read them while it is called: a copy of what is a parameter's memory."""
    return values.clone() if storage_of(values) in by_storage else values
