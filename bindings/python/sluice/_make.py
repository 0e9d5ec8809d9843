"""Converts Python's description of a model and its options to structs of the C ABI."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _abi, _buffers
from ._handle import call
from ._library import library, load_nccl
from .errors import InvalidArgumentError
from .model import DeviceFacts, Folder, Options, Path, Unit, folders_of, size_of, whole
from .optimizers import Optimizer

_PLACED = ("parameters", "gradients", "state")


def text(value: str, what: str) -> bytes:
    """Encodes a text for C; raises where it contains a NUL, which would end it there."""
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgumentError(f"{what} is {value!r}; a text without NUL is needed")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} is {value!r}, which is no Unicode text: {error.reason}") from error


def path_of(path: Path) -> bytes:
    """Encodes a path for C, also one that is not valid UTF-8."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InvalidArgumentError(f"the path {path!r} contains NUL")
    return encoded


def groups_of(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """The settings of each group, which differ only in the settings that may change from step to step."""
    groups = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not groups or not all(type(group) is not Optimizer and isinstance(group, Optimizer) for group in groups):
        raise InvalidArgumentError(
            f"the optimizer is {optimizer!r}; AdamW, Adam, Lion, SGD, Adafactor or Muon is needed, or one for each group"
        )
    for group in groups:
        if not group.same_but_for_a_step(groups[0]):
            raise InvalidArgumentError(
                f"groups differ ({groups[0]}, {group}); only {groups[0].may_change} may differ"
            )
    return groups


@contextlib.contextmanager
def model_of(units: Sequence[Unit], dtype: str) -> Iterator[ctypes.c_void_p]:
    """Makes a sluice_model, valid inside the `with`. dtype: the type of parameters that state none."""
    model = ctypes.c_void_p()
    call("sluice_model_create", ctypes.byref(model))
    try:
        for unit in units:
            call("sluice_model_add_unit", model, text(unit.name, "a unit's name"), None)
            for given in unit.parameters:
                shape = (ctypes.c_uint64 * len(given.shape))(*given.shape)
                parameter = _abi.Parameter(
                    ctypes.sizeof(_abi.Parameter),
                    text(given.name, "a parameter's name"),
                    shape,
                    len(shape),
                    given.group,
                    1 if given.frozen else 0,
                    *(given.span or (0, 0)),
                    dtype_of(given.dtype or dtype, f"the dtype of '{given.name}'"),
                    1 if given.by_elements else 0,
                )
                call("sluice_model_add_parameter", model, ctypes.byref(parameter), None)
        yield model
    finally:
        library().sluice_model_destroy(model)


def all_units(units: Sequence[Unit], options: Options) -> Sequence[Unit]:
    """All units of the model to which an engine's units belong."""
    return units if options.sections is None else options.sections.units


def files_of(files: Mapping[str, Sequence[Any]], stack: contextlib.ExitStack) -> ctypes.Array[_abi.File]:
    """Makes C structs of files, which point to the buffers' memory until the stack is left."""
    made = []
    for name, buffers in files.items():
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        pieces = (_abi.Piece * len(views))(
            *(_abi.Piece(stack.enter_context(_buffers.address_of(view)), view.nbytes) for view in views if view.nbytes)
        )
        made.append(_abi.File(text(name, "a file's name"), pieces, len(pieces)))
    return (_abi.File * len(made))(*made)


def dtype_of(name: str, what: str = "dtype") -> int:
    """The number of a type of parameters; what: is of this type."""
    if name not in _abi.DTYPES:
        raise InvalidArgumentError(f"{what} is {name!r}; it may be {', '.join(_abi.DTYPES)}")
    return _abi.DTYPES[name]


def _folders(disk: Path | Folder | Sequence[Path | Folder] | None) -> list[_abi.Folder]:
    made = []
    for folder in folders_of(disk):
        path = os.fspath(folder.path)
        if ":" in path:
            path = os.path.join(path, "")  # with a slash at its end, no part of the path can be parsed as a size
        made.append(_abi.Folder(path_of(path), size_of(folder.limit or 0, f"the limit of '{path}'")))
    return made


def _places(place: str | Mapping[str, str] | None) -> dict[str, bytes]:
    if place is None:
        return {}
    wanted = dict.fromkeys(_PLACED, place) if isinstance(place, str) else dict(place)
    for name in wanted:
        if name not in _PLACED:
            raise InvalidArgumentError(f"place has '{name}'; it may have {', '.join(_PLACED)}")
    return {f"place_{name}": text(value, f"the place of {name}") for name, value in wanted.items()}


def _stage(stage: int | None) -> int:
    """Converts a stage for C, where 0 means that the plans choose."""
    if stage is not None and (isinstance(stage, bool) or stage not in range(4)):
        raise InvalidArgumentError(
            f"stage is {stage!r}; it is 0 (nothing is partitioned over the ranks), 1 (state), 2 (gradients, too), 3 (parameters, "
            "too), or None for what the plan chooses"
        )
    return 0 if stage is None else stage + 1


def _function(address: Any, what: str, where: str) -> int | None:
    if address is not None and (isinstance(address, bool) or not isinstance(address, int) or address <= 0):
        raise InvalidArgumentError(f"{what} is {address!r}; the address of a function is needed ({where}), or None")
    return address


def _facts(facts: DeviceFacts | None) -> Any:
    """Converts facts about a GPU for C."""
    if facts is None:
        return None
    if not isinstance(facts, DeviceFacts):
        raise InvalidArgumentError(f"device_facts is {facts!r}; sluice.DeviceFacts are needed, or None")
    rates = (facts.to_gpu, facts.from_gpu, facts.both_ways, facts.gpu_updates, facts.cpu_memory)
    for rate in (*rates, facts.computing, facts.between_gpus):
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise InvalidArgumentError(f"device_facts has {rate!r}, where a number is needed, of something a second or of seconds")
    base = size_of(facts.base, "device_facts.base")
    made = _abi.DeviceFacts(ctypes.sizeof(_abi.DeviceFacts), *rates, base, facts.computing, facts.between_gpus)
    return ctypes.pointer(made)


def options_of(given: Options) -> _abi.EngineOptions:
    """Converts options to a C struct, which keeps alive the objects that it points to."""
    if given.state not in _abi.STATE_TYPES:
        raise InvalidArgumentError(f"state is {given.state!r}; it may be {', '.join(_abi.STATE_TYPES)}")
    if given.master not in ("f32", "none"):
        raise InvalidArgumentError(f"master is {given.master!r}; it may be f32, none")
    groups = groups_of(given.optimizer)
    if any(vars(group).get("adamw_lr") is not None for group in groups):
        raise InvalidArgumentError(
            "adamw_lr is for sluice.torch.wrap(), which finds the parameters that it is for; give these a group of their own "
            "here, with that lr"
        )
    folders, settings, places = _folders(given.disk), groups[0].for_c(), _places(given.place)
    rank, ranks = (whole(number, "planned") for number in given.planned or (0, 0))
    counts = () if given.sections is None else given.sections.counts
    section_chunks = 0 if given.sections is None else len(counts) // given.sections.ranks.size
    sgemm = _function(given.sgemm, "sgemm", "sluice.torch.sgemm()")
    team = _function(given.team, "team", "sluice.torch.team()")
    if given.device_memory and given.ranks is not None:
        load_nccl()
    return _abi.EngineOptions(
        size=ctypes.sizeof(_abi.EngineOptions),
        memory=size_of(given.memory, "memory"),
        reserved=size_of(given.reserved, "reserved"),
        disk=(_abi.Folder * len(folders))(*folders),
        disk_folders=len(folders),
        threads=whole(given.threads, "threads", 4097),
        held_units=whole(given.held_units, "held_units"),
        groups=len(groups),
        trace_events=whole(given.trace_events, "trace_events", 2**63),
        prefetch=whole(given.prefetch, "prefetch", 65),
        given_back=size_of(given.given_back, "given_back"),
        serve_touches=1 if given.serve_touches else 0,
        state=_abi.STATE_TYPES[given.state],
        no_master=1 if given.master == "none" else 0,
        seed=whole(given.seed, "seed", 2**64),
        update_in_backward=1 if given.update_in_backward else 0,
        sgemm=sgemm,
        team=team,
        ranks=None if given.ranks is None else given.ranks.address,
        stage=_stage(given.stage),
        planned_rank=rank,
        planned_ranks=ranks,
        reproducible=1 if given.reproducible else 0,
        micro_batches=whole(given.micro_batches, "micro_batches"),
        device_memory=size_of(given.device_memory, "device_memory"),
        device_reserved=size_of(given.device_reserved, "device_reserved"),
        device=0 if given.device is None else whole(given.device, "device", 2**31) or _abi.FIRST_DEVICE,
        updates=None if given.updates is None else text(given.updates, "updates"),
        device_facts=_facts(given.device_facts),
        links=None if given.links is None else text(given.links, "links"),
        sum_gradients=text(given.sum_gradients, "sum_gradients"),
        sections=None if given.sections is None else given.sections.ranks.address,
        section_units=(ctypes.c_uint32 * len(counts))(*counts) if counts else None,
        section_chunks=section_chunks,
        optimizer=groups[0].name.encode(),
        settings=settings,
        setting_count=len(settings),
        **places,
    )


def _group(settings: Optimizer) -> _abi.GroupSettings:
    others = settings.for_c(by_step=True)
    return _abi.GroupSettings(ctypes.sizeof(_abi.GroupSettings), *settings.rates, others, len(others))


def settings_of(
    groups: Sequence[Optimizer],
    clip: float | None,
    clip_value: float | None,
    gradient_factor: float,
    keep_gradients: bool,
) -> _abi.StepSettings:
    """Makes the settings for sluice_engine_step(), where 0 means no clipping and a factor of 1."""
    for what, bound in (("clip", clip), ("clip_value", clip_value)):
        if bound is not None and not bound > 0:
            raise InvalidArgumentError(f"{what} is {bound}; a bound above 0 is needed, or None for no clipping")
    if not gradient_factor:
        raise InvalidArgumentError("gradient_factor is 0, which would leave nothing of the gradients")
    made = [_group(group) for group in groups]
    return _abi.StepSettings(
        ctypes.sizeof(_abi.StepSettings),
        (_abi.GroupSettings * len(made))(*made),
        len(made),
        clip or 0.0,
        gradient_factor,
        1 if keep_gradients else 0,
        clip_value or 0.0,
    )
