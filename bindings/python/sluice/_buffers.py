"""The memory behind Python objects, and Python objects over the engine's memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_ssize_t, c_void_p
from typing import Any

from .errors import InvalidArgumentError, StateError


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)),
        ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p),
    ]


_PYBUF_SIMPLE = 0

# The prototypes of ctypes.pythonapi belong to the whole process, so this module has its own. These functions run with
# the GIL held.
_get_buffer = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, POINTER(_PyBuffer), c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))

# A memoryview cannot be cast to the format of f16.
_FORMATS = {"f32": "f", "bf16": "H", "f16": "H"}
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


@functools.lru_cache(maxsize=256)
def _array_of(length: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * length


def view_of_memory(address: int, shape: tuple[int, ...], dtype: str, writable: bool = False) -> memoryview:
    """Returns the memory at `address` as an array; bf16 and f16 are their 16 bits ("H"). The view does not keep the
    memory alive; its `obj` lives as long as any object that was made from it."""
    raw = memoryview(_array_of(math.prod(shape) * _ITEM_BYTES[dtype]).from_address(address)).cast("B")
    view: memoryview = _shaped(raw if writable else raw.toreadonly(), dtype, shape)
    return view


def _shaped(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    return raw.cast(_FORMATS[dtype], shape)  # type: ignore[call-overload]


def new_array(shape: tuple[int, ...], dtype: str) -> memoryview:
    """Returns a new array of zeros."""
    view: memoryview = _shaped(memoryview(bytearray(math.prod(shape) * _ITEM_BYTES[dtype])), dtype, shape)
    return view


def floats_of(raw: memoryview, shape: tuple[int, ...]) -> memoryview:
    """Returns bytes as an array in f32."""
    view: memoryview = _shaped(raw, "f32", shape)
    return view


def bytes_of(values: Any, what: str, elements: int, dtype: str) -> memoryview:
    """Returns the bytes of an object with the buffer protocol that holds `elements` values of `dtype`, in that type or
    as raw bytes."""
    try:
        view = memoryview(values)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{what} is given as a {type(values).__name__}, which has no buffer; give an object that has "
            "(numpy.ndarray, array.array, bytes; of a torch tensor its numpy())"
        ) from error
    plain = view.format.lstrip("@=<")
    if plain not in (_FORMATS[dtype], "B", "b", "c") and (plain, dtype) != ("e", "f16"):
        raise InvalidArgumentError(
            f"{what} is given in the format '{view.format}', and {dtype} ('{_FORMATS[dtype]}') or bytes are needed"
        )
    if not view.c_contiguous:
        raise InvalidArgumentError(f"{what} is given with gaps between its elements; copy it without gaps")
    if view.nbytes != elements * _ITEM_BYTES[dtype]:
        raise InvalidArgumentError(
            f"{what} is given {view.nbytes} bytes, and has {elements * _ITEM_BYTES[dtype]}: "
            f"{elements} elements in {dtype}"
        )
    return view.cast("B")


@contextlib.contextmanager
def address_of(view: memoryview) -> Iterator[int]:
    """Gives the address of a contiguous buffer's memory, also of a read-only one. Valid inside the `with`."""
    held = _PyBuffer()
    _get_buffer(view, ctypes.byref(held), _PYBUF_SIMPLE)
    try:
        yield held.buf
    finally:
        _release_buffer(ctypes.byref(held))


def hand_out(each: Callable[[str, int, memoryview], object], name: str, first: int, part: memoryview) -> None:
    """Calls the caller's function with elements of a parameter that are valid during the call. Raises StateError where
    the function kept a reference to them."""
    memory = weakref.ref(part.obj)
    each(name, first, part)
    with contextlib.suppress(BufferError):
        part.release()
    if memory() is not None:  # an array or a slice of the elements still exists
        raise StateError(
            f"the function that was given elements of '{name}' kept them, and they are valid during its call only; "
            "copy them"
        )
