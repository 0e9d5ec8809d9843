"""Where parameters live: the engine's memory as tensors, what a parameter is while its unit is not on the GPU, and tensors as memory for
the engine."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ..errors import StateError
from ._modes import Mode, tensors_among

# ---- parameters whose unit is not on the GPU ----

Missed = Callable[[torch.nn.Parameter, str], None]
"""Brings a parameter in for what needs it, or raises the StateError that says where it is there."""

# Attributes that are read at every step, and need no elements.
_ASKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("_version", "device", "dtype", "grad", "grad_fn", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
) | {torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.grad.__set__}  # type: ignore[union-attr]
# Functions that find elements without an operation, or give the parameter others.
_TAKES = {
    getattr(torch.Tensor, name): f"{name}()" for name in ("data_ptr", "untyped_storage", "storage", "tolist", "share_memory_", "__dlpack__")
} | {torch.Tensor.data.__set__: "an assignment to .data"}  # type: ignore[attr-defined]


class Absent(torch.nn.Parameter):
    """The class that a parameter has while its unit is not on the GPU. It is one NaN, expanded to its shape."""

    _missed: Missed
    _was: type[torch.nn.Parameter]  # the class that it has otherwise

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)}, whose unit is not on the GPU now"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in _TAKES:
            _need(args, _TAKES[func])
        with _Operations():
            return super().__torch_function__(func, types, args, kwargs or {})


class _Operations(Mode):
    """Says which operations need elements of absent parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if not (name.endswith("_like") or name.startswith("new_")):
            _need((args, kwargs or {}), f"{func}")
        return func(*args, **(kwargs or {}))


def _need(arguments: Any, what: str) -> None:
    for tensor in tensors_among(arguments):
        if isinstance(tensor, Absent):
            tensor._missed(tensor, what)
    if any(isinstance(tensor, Absent) for tensor in tensors_among(arguments)):  # one has taken the room of another
        raise StateError(f"{what} needs parameters of more units at once than may be held; wrap the model with a larger held_units")


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor is a view of."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # it has no elements, as the zeros of forward-mode AD
        return 0


def is_absent(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter's unit is not on the GPU. (isinstance() asks the class of parameters, in Python.)"""
    return issubclass(type(parameter), Absent)


def show(parameter: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """Makes a parameter a plain one that refers to this memory."""
    if is_absent(parameter):
        parameter.__class__ = parameter._was  # type: ignore
        del parameter._missed  # type: ignore[attr-defined]
    parameter.data = memory


def conceal(parameter: torch.nn.Parameter, missed: Missed) -> None:
    """Makes a parameter an absent one."""
    if is_absent(parameter):
        return
    parameter.data = _nan(parameter.dtype, parameter.device, parameter.shape)
    parameter.__class__ = _absent(type(parameter))
    parameter._missed = missed  # type: ignore[attr-defined]


@functools.cache
def _absent(own: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    """The class of absent parameters that are of the class `own` otherwise."""
    return type("Absent", (Absent,) if own is torch.nn.Parameter else (Absent, own), {"_was": own})


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


# ---- homes ----


@dataclasses.dataclass(frozen=True)
class Span:
    """The span of a parameter that one unit has: all of it, unless the parameter is large."""

    index: int  # the engine's number for it
    key: str  # the engine's name for it
    unit: int
    first: int  # its first element in the parameter
    elements: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The span's elements, out of all elements of the parameter."""
        return flat[self.first : self.first + self.elements]


class View(NamedTuple):
    """How a tensor shows its memory: as which type, with which shape and strides, from which element on."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of the type
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """The view that a strided tensor is of its memory."""
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return View(tensor.dtype, *place, tensor.is_conj(), tensor.is_neg())

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor's memory, whatever that tensor's type."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        made.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        made = made.conj() if self.conjugate else made
        return made.neg() if self.negative else made


@dataclasses.dataclass
class Home:
    """Where a parameter lives: its units, and the tensor over its memory in the engine."""

    name: str
    index: int  # its position among the model's homes
    spans: list[Span]
    parameter: torch.nn.Parameter
    memory: torch.Tensor
    trainable: bool
    by_elements: bool  # see sluice.Parameter
    address: int = dataclasses.field(init=False)  # in the engine

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()
        self.note_values()

    @property
    def units(self) -> list[int]:
        """The units in which the parameter lies."""
        return [span.unit for span in self.spans]

    @property
    def version(self) -> int:
        """A number that changes when values do, by a step or by the user."""
        return self.parameter._version

    def changed(self) -> None:
        """Comes after values changed: backward through an older graph is then an error, as in PyTorch."""
        torch.autograd.graph.increment_version(self.parameter)
        self.note_values()

    def note_values(self) -> None:
        """Comes after values changed in a way that the engine knows of."""
        self._known_version = self.version

    def check_unwritten(self) -> None:
        """Raises StateError where the parameter, whose unit is on a GPU, was written without the engine."""
        if self.version != self._known_version:
            raise StateError(
                f"'{self.name}' was written outside of `with sluice.torch.full_parameters(model):`, and a GPU's memory tells nobody of a write: "
                "what was written is lost, and may have hit what else was there. Write it within the `with`, and load the model's "
                "values anew"
            )

    @property
    def replaced(self) -> bool:
        """Whether the parameter was given other memory, or PyTorch's storage over the engine's has moved, as share_memory_() moves it."""
        if self.memory.data_ptr() != self.address:
            return True
        return not is_absent(self.parameter) and self.parameter.data_ptr() != self.address

    def check_memory(self) -> None:
        """Raises StateError where the parameter was given other memory."""
        if self.replaced:
            raise StateError(
                f"'{self.name}' was given other memory (by .data = ..., set_(), share_memory_(), or by sending it to another process), which "
                "the engine does not see; copy_() into it instead, and send clone()s. To mend it, sluice.torch.close() the model, and wrap it "
                "again"
            )

    def let_go(self) -> None:
        """Ends what the parameter has to do with the engine, which keeps its memory for views of it."""
        if is_absent(self.parameter):
            show(self.parameter, self.memory)
        self.memory = torch.empty(0)

    def check_place(self, found: torch.Tensor | None) -> None:
        """Raises StateError where `found`, which a module has in this parameter's place, is none or another one."""
        if found is None or (isinstance(found, torch.nn.Parameter) and found is not self.parameter):
            raise StateError(
                f"'{self.name}' is no longer where it was when the model was wrapped: its module has "
                f"{'none' if found is None else 'another Parameter'} there, which would not be trained; copy_() into it "
                "instead, or sluice.torch.close() the model before, and wrap it again. (torch.func.functional_call() may "
                "be given tensors, such as parameters' detach(); torch.export() needs a closed model)"
            )


def check_places(model: torch.nn.Module, homes: Sequence[Home]) -> None:
    """Raises StateError where one of these is no longer a parameter of the model."""
    known = {id(p) for p in model.parameters()}
    lost = [home for home in homes if id(home.parameter) not in known]
    here = dict(model.named_parameters()) if lost else {}
    for home in lost:
        home.check_place(here.get(home.name))


# ---- memory of the engine as tensors: by DLPack, which asks nothing of the address ----

_CPU, _CUDA = 1, 2  # DLDeviceType
_FLOAT, _BFLOAT = 2, 4  # DLDataTypeCode
_NAME = b"dltensor"  # by which PyTorch knows the capsule; the capsule refers to these bytes


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),  # NULL: the last dimension is fastest
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class Lent:
    """Memory that is lent to PyTorch, until the last tensor over it is gone. `keeps` is what must live as long."""

    def __init__(self, keeps: Any) -> None:
        self.keeps = keeps
        self._managed = _Managed()

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor over the memory. It is called once."""
        managed = self._managed
        self._lengths = lengths = (ctypes.c_int64 * len(shape))(*shape)
        kind = _CPU if device.type == "cpu" else _CUDA
        code = _BFLOAT if dtype == torch.bfloat16 else _FLOAT
        managed.tensor = _Tensor(address, kind, device.index or 0, len(shape), code, 8 * dtype.itemsize, 1, lengths, None, 0)
        managed.deleter = _deleter
        _lent[ctypes.addressof(managed)] = self
        capsule = ctypes.pythonapi.PyCapsule_New(ctypes.addressof(managed), _NAME, None)
        try:
            made: torch.Tensor = from_dlpack(capsule)
            return made
        except BaseException:
            del _lent[ctypes.addressof(managed)]
            raise


_lent: dict[int, Lent] = {}  # what PyTorch has, by the address of its description
_deleter = _Deleter(lambda address: _lent.pop(address, None) and None)
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, valid as long as the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def has_memory(given: Any) -> bool:
    """Whether it is a tensor with memory, and none of a class that only stands for others, as while PyTorch traces."""
    return isinstance(given, torch.Tensor) and type(given).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def name_of(func: Any) -> str:
    """An operation's name, such as add_."""
    return str(func.name()).rpartition("::")[2].partition(".")[0]


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to."""
    schema = getattr(func, "_schema", None)  # operators with bodies have none
    for index, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_among(args[index] if index < len(args) else kwargs.get(argument.name))


def outside(values: torch.Tensor, by_storage: Mapping[int, Home]) -> torch.Tensor:
    """The same values in memory that the engine can read during a call: a copy where they are a parameter's memory."""
    return values.clone() if storage_of(values) in by_storage else values
