"""The engine: a model's parameters, gradients and optimizer state in stated memory and on disk."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Union

from . import _abi, _buffers, _make
from ._handle import Handle, call, interruptible, text_of
from ._library import library
from .errors import InvalidArgumentError, StateError, knows_its_keywords
from .model import Counters, LedgerLine, Options, Parameter, Path, Size, StepResult, Unit, size_of, whole
from .optimizers import Optimizer

Stream = Callable[[str, int, memoryview], object]
"""Called with consecutive runs of f32 elements of one parameter: its name, the first element, and the elements, which
are valid during the call only."""

StateStream = Callable[[str, str, int, memoryview], object]
"""The same with the name of an array of the optimizer's state after that of the parameter."""

Values = Union[Mapping[str, Any], Stream]
"""An object with the buffer protocol (f32, or its bytes) for each parameter of a unit, or a function for all."""


def plan(units: Sequence[Unit], options: Options) -> dict[str, Any]:
    """Plans the place of every byte, without allocating memory, and returns the object that `sluice plan --json`
    prints. Raises BudgetError, which says which budget is short, by how much, and what would fit."""
    given = _make.options_of(options)
    with _make.model_of(_make.all_units(units, options), options.dtype) as model, interruptible(given):
        made: dict[str, Any] = json.loads(text_of("sluice_plan", model, ctypes.byref(given)))
    return made


@knows_its_keywords
class Engine:
    """Allocates all memory and disk space of its plan, and frees it on close(), or when its `with` is left.

    First every unit is given values (set_values, load_values or load). Then in each step: begin_step(); for each unit,
    in any order and as often as needed, acquire it, compute with its parameters in place, add gradients, release it;
    step(). Outside a step units may be acquired for reading.

    May be used from any thread; calls are serialized, and the GIL is released while the engine works. Errors are
    exceptions of sluice.Error. Memoryviews of parameters become invalid when the unit is released; objects made from
    them (slices, arrays of numpy) must not be accessed after that.
    """

    _by_address: ClassVar[bool] = False  # whether arrays are given by their addresses, as on a GPU

    def __init__(self, units: Sequence[Unit], options: Options) -> None:
        if size_of(options.device_memory, "device_memory") and not self._by_address:
            raise InvalidArgumentError(
                "device_memory is given, and the parameters of an Engine are memoryviews, which a GPU's memory has none of; "
                "make a sluice.DeviceEngine, or wrap a PyTorch model (sluice.torch.wrap())"
            )
        self.units: tuple[Unit, ...] = tuple(units)
        self.options = options
        self._unit_ids = {unit.name: u for u, unit in enumerate(self.units)}
        if len(self._unit_ids) != len(self.units):
            raise InvalidArgumentError("two units have the same name; give each its own")
        self._parameters = [(parameter, u) for u, unit in enumerate(self.units) for parameter in unit.parameters]
        self._ids = {parameter.key: p for p, (parameter, _) in enumerate(self._parameters)}
        self._groups = _make.groups_of(options.optimizer)
        self._lock = threading.Lock()  # for what follows
        self._views: list[weakref.WeakValueDictionary[int, memoryview]] = [
            weakref.WeakValueDictionary() for _ in self.units
        ]
        self._view_ids = itertools.count()
        address = ctypes.c_void_p()
        given = _make.options_of(options)
        lent: list[Callable[[], None]] = []
        handle = None
        try:
            with _make.model_of(_make.all_units(self.units, options), options.dtype) as model, interruptible(given):
                call("sluice_engine_create", model, ctypes.byref(given), ctypes.byref(address))
            for ranks in options.groups:
                lent.append(ranks.lend())
            handle = Handle(address.value or 0, lent)
            self._finalizer = weakref.finalize(self, handle.close)
        except BaseException:  # also a KeyboardInterrupt, which may come after the engine
            if handle is not None:
                handle.close()
            else:
                library().sluice_engine_destroy(address)
                for give_back in lent:
                    give_back()
            raise
        self._handle = handle

    def close(self) -> None:
        """Waits for work in flight, and frees memory and disk space. A closed engine may be closed again."""
        self._handle.close()
        for unit in range(len(self.units)):
            self._end_views(unit)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._handle.closed

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    # ---- values ----

    def set_values(self, unit: str, values: Values) -> None:
        """Sets the values of all parameters of a unit, from buffers or by a function that fills in elements; the
        optimizer's state becomes zero. Raises what the function raises; the unit must then be given values anew."""
        u = self._unit(unit)
        if callable(values):
            self._stream("sluice_engine_set_values", u, values, writable=True)
        else:
            self._whole("sluice_engine_set_values", "sluice_read_values_from_arrays", u, self._buffers(u, values))

    def get_values(self, unit: str, into: Values | None = None) -> dict[str, memoryview]:
        """Reads the values of a unit in f32 (the masters where there are any), with a pending update applied, into the
        given buffers, through the function, or into new buffers. Returns the buffers by name."""
        u = self._unit(unit)
        if callable(into):
            self._stream("sluice_engine_get_values", u, into, writable=False)
            return {}
        made = {p.key: memoryview(bytearray(4 * p.elements)) for p in self.units[u].parameters}
        whole_unit = self._buffers(u, made if into is None else into)
        for name, view in whole_unit.items():
            if view.readonly:
                raise InvalidArgumentError(f"'{name}' is given a buffer that is read-only; give one to write to")

        self._whole("sluice_engine_get_values", "sluice_write_values_to_arrays", u, whole_unit)
        return {p.key: _buffers.floats_of(whole_unit[p.key], p.view_shape) for p in self.units[u].parameters}

    def load_values(self, path: Path) -> None:
        """Loads all values from a folder of safetensors, or one such file, by the parameters' names. Other tensors are
        ignored."""
        self._handle.call("sluice_engine_load_values", _make.path_of(path))

    # ---- the optimizer's state ----

    def state_arrays(self) -> tuple[str, ...]:
        """The names of the arrays: "master", where masters are kept, then those that torch.optim has."""
        return tuple(json.loads(self._handle.text("sluice_engine_state_arrays")))

    def get_state(self, unit: str, into: StateStream) -> None:
        """Calls the function with all state of a trainable unit in f32, run by run, from any thread but never from two at
        once. The function must not call the engine, and meanwhile no other thread may access a parameter of a unit that
        is not held: that thread would wait for the page fault to be served while it holds the GIL, which the function
        needs."""
        self._stream_state("sluice_engine_get_state", self._unit(unit), into, writable=False)

    def set_state(self, unit: str, fill: StateStream) -> None:
        """Lets the function fill in all state of a trainable unit. Parameters become their masters' values, where there
        are masters. Raises what the function raises; the unit must then be given values anew."""
        self._stream_state("sluice_engine_set_state", self._unit(unit), fill, writable=True)

    def updates(self, name: str) -> int:
        """The number of updates of a parameter, which the optimizer's bias correction needs."""
        return int(self._handle.ask("sluice_engine_updates", self._parameter(name)[0], kind=ctypes.c_uint64))

    def set_updates(self, name: str, updates: int) -> None:
        """Sets the number of updates of a parameter."""
        self._handle.call("sluice_engine_set_updates", self._parameter(name)[0], whole(updates, "updates", 2**64))

    # ---- a step ----

    def begin_step(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        clip_value: float | None = None,
        gradient_factor: float = 1.0,
    ) -> None:
        """Begins a step; step() ends it. With options.update_in_backward the settings are needed now: see step()."""
        if self.options.update_in_backward:
            settings = ctypes.byref(self._settings(optimizer, None, clip_value, gradient_factor, False))
        elif optimizer is not None or clip_value is not None or gradient_factor != 1.0:
            raise InvalidArgumentError("settings are given to begin_step(), and step() takes them; give them there")
        else:
            settings = None
        self._handle.call("sluice_engine_begin_step", settings)

    def acquire(self, unit: str, gradient: bool = False) -> Held:
        """Makes the unit's parameters present, with a pending update applied, and waits for the disk. Use it in a
        `with`. With `gradient`, within a step, gradients may be added."""
        u = self._unit(unit)
        self._handle.call("sluice_engine_acquire", u, _abi.GRADIENT if gradient else _abi.READ)
        return Held(self, u)

    def held_units(self) -> tuple[str, ...]:
        """The units that are held, in the order in which they were acquired."""
        return tuple(self.units[u].name for u in self._held_units())

    def parameter(self, name: str) -> memoryview:
        """The memory of a parameter whose unit is held: read-only, in its shape, in f32, or as the 16 bits of bf16 or
        f16 ("H"). The view becomes invalid when the unit is released."""
        p, parameter, unit = self._parameter(name)
        address = self._handle.ask("sluice_engine_parameter", p, kind=ctypes.c_void_p) or 0
        with self._lock:
            if not self._accesses(unit) & ~(1 << _abi.GRADIENT_ONLY):
                raise StateError(f"'{name}' is read while its unit '{self.units[unit].name}' is not held; acquire it")
            view = _buffers.view_of_memory(address, parameter.view_shape, parameter.dtype or self.options.dtype)
            self._views[unit][next(self._view_ids)] = view
            return view

    def add_gradient(self, name: str, gradient: Any, dtype: str = "f32") -> None:
        """Adds a gradient to the one that the parameter has in this step: an object with the buffer protocol in f32, or,
        with dtype="bf16" or "f16", of 16 bits ("H"; for f16 also "e"). The unit must be held with `gradient`."""
        p, parameter, _ = self._parameter(name)
        kind = _make.dtype_of(dtype)
        given = _buffers.bytes_of(gradient, f"the gradient of '{name}'", parameter.elements, dtype)
        with _buffers.address_of(given) as address:
            self._handle.call("sluice_engine_add_gradient", p, address, kind)

    def gradient(self, name: str, dtype: str = "f32") -> memoryview:
        """A copy of a parameter's gradient, in its shape. Raises StateError where it has none."""
        p, parameter, _ = self._parameter(name)
        made = _buffers.new_array(parameter.view_shape, dtype)
        with _buffers.address_of(made) as address:
            self._handle.call("sluice_engine_get_gradient", p, address, _abi.DTYPES[dtype])
        return made

    def has_gradient(self, name: str) -> bool:
        """Whether the parameter has a gradient: added in this step or kept, and neither dropped nor applied."""
        return bool(self._handle.ask("sluice_engine_has_gradient", self._parameter(name)[0]))

    def gradient_norm(self, name: str) -> float:
        """The norm of a parameter's gradient: NaN where an element is, else infinite where one is. Fetches no element."""
        return self._gradient_norms([self._parameter(name)[0]])[0]

    def multiply_gradient(self, name: str, factor: float) -> None:
        """Multiplies a parameter's gradient. Fetches no element."""
        self._multiply_gradients([self._parameter(name)[0]], factor)

    def drop_gradient(self, name: str) -> None:
        """Drops a parameter's gradient, if it has one."""
        self._drop_gradients([self._parameter(name)[0]])

    def end_gradients(self, unit: str) -> None:
        """States that this rank adds no more to the unit's gradients in this micro-batch; in a step's last micro-batch their sum
        over ranks begins."""
        self._handle.call("sluice_engine_end_gradients", self._unit(unit))

    def end_micro_batch(self) -> None:
        """Ends one of Options.micro_batches, to which, with Options.reproducible, each parameter has added one gradient at most.
        Otherwise the end of a step's last micro-batch waits for the other ranks, and takes the mean; with updates in backward, all
        units must be released before."""
        self._handle.call("sluice_engine_end_micro_batch")

    def set_micro_batch(self, number: int) -> None:
        """Says of which micro-batch the gradients are that are added from now on. It takes the place of end_micro_batch() where micro-batches
        overlap, and needs Options.reproducible. `number` counts this rank's from 0, and may be set in any order, but each parameter gets its
        gradients in ascending order. If it is how many this rank has, all of them have ended."""
        self._handle.call("sluice_engine_set_micro_batch", number)

    def abandon_step(self) -> None:
        """Ends the step without an update, drops its gradients, and releases every unit."""
        with self._lock:
            held = self._held_units()
            self._handle.call("sluice_engine_abandon_step")
            for unit in held:
                self._end_views(unit)

    def step(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        clip: float | None = None,
        clip_value: float | None = None,
        gradient_factor: float = 1.0,
        keep_gradients: bool = False,
    ) -> StepResult:
        """Ends the step and updates every parameter that has a gradient; where any part is on disk, updates continue
        after this call. `optimizer` gives other values than options.optimizer for settings that may change. Gradients
        are multiplied by `gradient_factor`, then `clip` bounds their global norm, then `clip_value` each element. With
        `keep_gradients` the next step adds to them. Raises NotFiniteError, with no value changed. With
        options.update_in_backward updates were made already, and no settings may be given."""
        if not self.options.update_in_backward:
            settings = ctypes.byref(self._settings(optimizer, clip, clip_value, gradient_factor, keep_gradients))
        elif (optimizer, clip, clip_value, gradient_factor, keep_gradients) != (None, None, None, 1.0, False):
            raise InvalidArgumentError(
                "settings are given to step(), and the updates were made in backward; begin_step() takes lr, "
                "weight_decay, clip_value and gradient_factor, and gradients can neither be clipped by their norm nor kept"
            )
        else:
            settings = None
        result = _abi.StepResult(ctypes.sizeof(_abi.StepResult))
        self._handle.call("sluice_engine_step", settings, ctypes.byref(result))
        return StepResult(result.gradient_norm, result.clip_factor)

    def _settings(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        clip: float | None,
        clip_value: float | None,
        gradient_factor: float,
        keep_gradients: bool,
    ) -> _abi.StepSettings:
        groups = self._groups if optimizer is None else _make.groups_of(optimizer)
        if not groups[0].same_but_for_a_step(self._groups[0]):
            raise InvalidArgumentError(
                f"the engine was made with {self._groups[0]}, and {groups[0]} is given; only {groups[0].may_change} may "
                "change"
            )
        return _make.settings_of(groups, clip, clip_value, gradient_factor, keep_gradients)

    def settle(self) -> None:
        """Waits until all updates are complete."""
        self._handle.call("sluice_engine_settle")

    @property
    def steps(self) -> int:
        """The number of steps that have ended."""
        return int(self._handle.ask("sluice_engine_steps", kind=ctypes.c_uint64))

    @property
    def in_step(self) -> bool:
        """Whether a step was begun and has not ended."""
        return bool(self._handle.ask("sluice_engine_in_step"))

    @property
    def failure(self) -> str:
        """Why the engine has failed and refuses all calls; "" where it has not failed."""
        return self._handle.text("sluice_engine_failure")

    # ---- checkpoints, and what goes on inside ----

    @knows_its_keywords
    def save(self, out: Path, keep: int = 0, files: Mapping[str, Sequence[Any]] | None = None) -> str:
        """Writes a checkpoint into the folder `out`, whole or not at all, between steps. The newest `keep` (0: all) stay.
        files: the caller's own files, by name: each a sequence of objects with the buffer protocol, whose bytes are
            concatenated. Returns the checkpoint's folder."""
        with contextlib.ExitStack() as stack:
            made = _make.files_of(files or {}, stack)
            given = (_make.path_of(out), whole(keep, "keep", 2**64), made, len(made))
            return self._handle.text("sluice_engine_save_with_files", *given)

    def find_checkpoint(self, path: Path) -> str:
        """The folder of the checkpoint that load() would load. One of another model or optimizer is refused."""
        return self._handle.text("sluice_engine_find_checkpoint", _make.path_of(path))

    def checkpoint_file(self, path: Path, name: str) -> str:
        """Verifies one of the caller's own files in a checkpoint (see load()). Returns its path; "" where there is none."""
        return self._handle.text("sluice_engine_checkpoint_file", _make.path_of(path), _make.text(name, "a file's name"))

    def load(self, path: Path) -> None:
        """Loads a checkpoint that save() gave, or of such a folder the newest whole one, by manifests and lengths of files; a warning
        on standard error names those that are not whole. Every byte is verified as it is read."""
        self._handle.call("sluice_engine_load", _make.path_of(path))

    def replan(self, reserved: Size) -> None:
        """Plans anew for another Options.reserved, between steps, and moves the parts that the new plan places
        elsewhere, within the stated memory. Raises BudgetError, with nothing changed, where no plan fits."""
        self._handle.call("sluice_engine_replan", size_of(reserved, "reserved"))

    def plan(self) -> dict[str, Any]:
        """The plan in force, as sluice.plan() returns it."""
        made: dict[str, Any] = json.loads(self._handle.text("sluice_engine_plan"))
        return made

    def ledger(self) -> list[LedgerLine]:
        """The allocated bytes, now and at most so far, by tier and purpose."""
        count = ctypes.c_size_t()
        self._handle.call("sluice_engine_ledger", None, 0, ctypes.byref(count))
        lines = (_abi.LedgerLine * count.value)()
        self._handle.call("sluice_engine_ledger", lines, count, ctypes.byref(count))
        return [LedgerLine(line.tier.decode(), line.purpose.decode(), line.current, line.peak) for line in lines]

    def counters(self) -> Counters:
        """The times that the engine waited and updated, and the number of page faults on parameters whose unit was not
        held."""
        counters = _abi.Counters(ctypes.sizeof(_abi.Counters))
        self._handle.call("sluice_engine_counters", ctypes.byref(counters))
        return Counters(counters.wait_seconds, counters.optimizer_seconds, counters.touches)

    def add_event(self, lane: str, name: str, begin: int, size: int = 0) -> None:
        """Adds to the trace, where one is kept, what ends now: a pass in the lane "compute", a wait in "rank wait", or a message in
        "message". begin: of time.monotonic_ns(); size: in bytes, of a message."""
        if self.options.trace_events:
            self._handle.call("sluice_engine_add_event", lane.encode(), name.encode(), begin, time.monotonic_ns(), size)

    def save_trace(self, path: Path) -> None:
        """Writes a trace of the latest events as Trace Event JSON, which Perfetto opens. Needs options.trace_events."""
        self._handle.call("sluice_engine_save_trace", _make.path_of(path))

    # ---- inside ----

    def _unit(self, name: str) -> int:
        if name not in self._unit_ids:
            raise InvalidArgumentError(f"there is no unit '{name}'; the model has {len(self.units)}: see engine.units")
        return self._unit_ids[name]

    def _parameter(self, name: str) -> tuple[int, Parameter, int]:
        if name not in self._ids:
            raise InvalidArgumentError(f"there is no parameter '{name}'; the model has {len(self._ids)}")
        return self._ids[name], *self._parameters[self._ids[name]]

    def _gradient_norms(self, parameters: Sequence[int]) -> list[float]:
        count = len(parameters)
        norms = (ctypes.c_double * count)()
        self._handle.call("sluice_engine_gradient_norms", (ctypes.c_uint32 * count)(*parameters), count, norms)
        return list(norms)

    def _multiply_gradients(self, parameters: Sequence[int], factor: float) -> None:
        count = len(parameters)
        self._handle.call("sluice_engine_multiply_gradients", (ctypes.c_uint32 * count)(*parameters), count, factor)

    def _drop_gradients(self, parameters: Sequence[int]) -> None:
        count = len(parameters)
        self._handle.call("sluice_engine_drop_gradients", (ctypes.c_uint32 * count)(*parameters), count)

    def _accesses(self, unit: int) -> int:
        """The accesses that hold the unit, as bits: 1 << READ and so on."""
        accesses = ctypes.c_uint32()
        self._handle.call("sluice_engine_held", unit, ctypes.byref(accesses), None)
        return accesses.value

    def _times_held(self, unit: int) -> int:
        """The number of releases that the unit still needs."""
        return int(self._handle.ask("sluice_engine_held", unit, None))

    def _held_units(self) -> list[int]:
        units, count = (ctypes.c_uint32 * len(self.units))(), ctypes.c_size_t()
        self._handle.call("sluice_engine_held_units", units, len(units), ctypes.byref(count))
        return units[: count.value]

    def _release(self, unit: int) -> None:
        with self._lock:
            if self._times_held(unit) == 1:
                self._end_views(unit)
            self._handle.call("sluice_engine_release", unit)

    def _end_views(self, unit: int) -> None:
        for view in list(self._views[unit].values()):
            with contextlib.suppress(BufferError):  # an array was made from the view: see Engine
                view.release()

    def _buffers(self, unit: int, values: Mapping[str, Any]) -> dict[str, memoryview]:
        """The bytes of all parameters of the unit. Raises where one is missing, or does not belong to the unit."""
        wanted = {p.key: p.elements for p in self.units[unit].parameters}
        for name in wanted.keys() ^ values.keys():
            problem = "has no values" if name in wanted else "is not a parameter"
            raise InvalidArgumentError(f"'{name}' {problem} of '{self.units[unit].name}'; give {', '.join(wanted)}")
        return {name: _buffers.bytes_of(values[name], f"'{name}'", n, "f32") for name, n in wanted.items()}

    def _whole(self, function: str, ready_made: str, unit: int, buffers: Mapping[str, memoryview]) -> None:
        """Copies the values of a whole unit, in f32, by whole_arrays()."""
        with contextlib.ExitStack() as stack:
            rows = [
                [_abi.Array(stack.enter_context(_buffers.address_of(buffers[p.key])), _abi.DTYPES["f32"])]
                for p in self.units[unit].parameters
            ]
            self.whole_arrays(function, ready_made, unit, rows)

    def whole_arrays(self, function: str, ready_made: str, unit: int, rows: Sequence[Sequence[_abi.Array]]) -> None:
        """Calls an engine's function for values or state with a callback of the library's own, which works on whole
        arrays: those of each parameter of the unit. No Python code runs in the call: it would wait for the GIL, whose
        holder may wait for the engine to serve a page fault."""
        flat = [array for row in rows for array in row]
        data = (_abi.Array * len(flat))(*flat)
        first = self._ids[self.units[unit].parameters[0].key]
        context = _abi.Arrays(ctypes.sizeof(_abi.Arrays), first, len(rows), len(rows[0]), data)
        kind = _abi.VALUES if function.endswith("values") else _abi.STATE
        self._handle.call(function, unit, ctypes.cast(getattr(library(), ready_made), kind), ctypes.byref(context))

    def _stream(self, function: str, unit: int, each: Stream, writable: bool) -> None:
        def run(context: int, p: int, first: int, address: int, elements: int) -> None:
            part = _buffers.view_of_memory(address, (elements,), "f32", writable)
            _buffers.hand_out(each, self._parameters[p][0].key, first, part)

        self._handle.call_back(function, unit, _abi.VALUES, run)

    def _stream_state(self, function: str, unit: int, each: StateStream, writable: bool) -> None:
        arrays = self.state_arrays()

        def run(context: int, p: int, array: int, first: int, address: int, elements: int) -> None:
            part = _buffers.view_of_memory(address, (elements,), "f32", writable)
            _buffers.hand_out(
                lambda name, at, values: each(name, arrays[array], at, values), self._parameters[p][0].key, first, part
            )

        self._handle.call_back(function, unit, _abi.STATE, run)


class Held:
    """A unit that is held, until release() or the end of its `with`."""

    def __init__(self, engine: Engine, unit: int) -> None:
        self._engine, self._unit, self._released = engine, unit, False

    def release(self) -> None:
        """Releases the unit, once; views of its parameters become invalid when no other acquire() holds it."""
        if self._released:
            raise StateError(f"'{self._engine.units[self._unit].name}' is released and was not acquired again")
        self._engine._release(self._unit)
        self._released = True

    def __enter__(self) -> Held:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self._released and not self._engine.closed:
            self.release()
