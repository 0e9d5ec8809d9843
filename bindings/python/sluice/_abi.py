"""The C ABI for ctypes: structs, prototypes and statuses of bindings/c/sluice*.h, and nothing more."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

VERSION = 1

OK = 0
DTYPES = {"f32": 0, "bf16": 1, "f16": 2}
STATE_TYPES = {"f32": 0, "bf16": 1, "8bit": 2}
READ, GRADIENT, GRADIENT_ONLY, EDIT = 0, 1, 2, 3


class Parameter(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("shape", POINTER(c_uint64)),
        ("dimensions", c_size_t),
        ("group", c_uint32),
        ("frozen", c_uint32),
        ("span_first", c_uint64),
        ("span_elements", c_uint64),
        ("dtype", ctypes.c_int),
        ("by_elements", c_uint32),
    ]


class Folder(ctypes.Structure):
    _fields_ = [("path", c_char_p), ("limit", c_uint64)]


class Piece(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_uint64)]


class File(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("pieces", POINTER(Piece)), ("piece_count", c_size_t)]


class Setting(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("number", c_double), ("text", c_char_p)]


class DeviceFacts(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("to_gpu", c_double),
        ("from_gpu", c_double),
        ("both_ways", c_double),
        ("gpu_updates", c_double),
        ("cpu_memory", c_double),
        ("base", c_uint64),
        ("computing", c_double),
        ("between_gpus", c_double),
    ]


# Stops a call by anything but 0: context.
STOP = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p)

FIRST_DEVICE = 2**32 - 1


class EngineOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("memory", c_uint64),
        ("reserved", c_uint64),
        ("disk", POINTER(Folder)),
        ("disk_folders", c_size_t),
        ("threads", c_uint32),
        ("held_units", c_uint32),
        ("groups", c_uint32),
        ("trace_events", c_uint64),
        ("prefetch", c_uint32),
        ("place_parameters", c_char_p),
        ("place_gradients", c_char_p),
        ("place_state", c_char_p),
        ("given_back", c_uint64),
        ("serve_touches", c_uint32),
        ("optimizer", c_char_p),
        ("settings", POINTER(Setting)),
        ("setting_count", c_size_t),
        ("state", ctypes.c_int),
        ("no_master", c_uint32),
        ("seed", c_uint64),
        ("update_in_backward", c_uint32),
        ("sgemm", c_void_p),
        ("team", c_void_p),
        ("ranks", c_void_p),
        ("stage", c_uint32),
        ("planned_rank", c_uint32),
        ("planned_ranks", c_uint32),
        ("reproducible", c_uint32),
        ("micro_batches", c_uint32),
        ("device_memory", c_uint64),
        ("device_reserved", c_uint64),
        ("device", c_uint32),
        ("updates", c_char_p),
        ("device_facts", POINTER(DeviceFacts)),
        ("links", c_char_p),
        ("sections", c_void_p),
        ("section_units", POINTER(c_uint32)),
        ("section_chunks", c_uint32),
        ("stop", STOP),
        ("stop_context", c_void_p),
        ("sum_gradients", c_char_p),
    ]


class GroupSettings(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("learning_rate", c_double),
        ("weight_decay", c_double),
        ("settings", POINTER(Setting)),
        ("setting_count", c_size_t),
    ]


class StepSettings(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("groups", POINTER(GroupSettings)),
        ("group_count", c_size_t),
        ("clip", c_double),
        ("gradient_factor", c_double),
        ("keep_gradients", c_uint32),
        ("clip_value", c_double),
    ]


class StepResult(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("gradient_norm", c_double), ("clip_factor", c_double)]


class Counters(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("wait_seconds", c_double), ("optimizer_seconds", c_double), ("touches", c_uint64)]


class LedgerLine(ctypes.Structure):
    _fields_ = [("tier", c_char_p), ("purpose", c_char_p), ("current", c_uint64), ("peak", c_uint64)]


# sluice_read_values and sluice_write_values: context, parameter, first element, values, elements.
VALUES = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_uint32, c_uint64, c_void_p, c_uint64)
# sluice_read_state and sluice_write_state: the same, with the array after the parameter.
STATE = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_uint32, c_uint32, c_uint64, c_void_p, c_uint64)


class Array(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("dtype", ctypes.c_int)]


class Arrays(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("first_parameter", c_uint32),
        ("parameters", c_uint32),
        ("arrays", c_uint32),
        ("data", POINTER(Array)),
    ]


class RanksOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("silence", c_double), ("patience", c_double)]


class Traffic(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("sent", c_uint64),
        ("received", c_uint64),
        ("sent_besides", c_uint64),
        ("received_besides", c_uint64),
        ("received_from_hosts", c_uint64),
    ]


SEND = ctypes.CFUNCTYPE(
    ctypes.c_int, c_void_p, c_uint32, c_void_p, c_size_t, c_void_p, c_size_t, POINTER(c_uint32)
)
RECEIVE = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_uint32, c_void_p, POINTER(c_size_t))
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_uint64)
WAKE = ctypes.CFUNCTYPE(None, c_void_p)
GONE = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_uint32, POINTER(c_char_p), POINTER(c_uint32))
LEAVE = ctypes.CFUNCTYPE(None, c_void_p)


class Links(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("context", c_void_p),
        ("what", c_char_p),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("packet_bytes", c_uint64),
        ("send", SEND),
        ("receive", RECEIVE),
        ("wait", WAIT),
        ("wake", WAKE),
        ("gone", GONE),
        ("destroy", LEAVE),
        ("host", c_char_p),
    ]


_TEXT_OUT = POINTER(c_void_p)  # as c_char_p it would lose the address that sluice_text_destroy() needs
_STATUS_FUNCTIONS: dict[str, list[Any]] = {
    "sluice_process_memory": [POINTER(c_uint64), POINTER(c_uint64)],
    "sluice_model_create": [POINTER(c_void_p)],
    "sluice_model_add_unit": [c_void_p, c_char_p, POINTER(c_uint32)],
    "sluice_model_add_parameter": [c_void_p, POINTER(Parameter), POINTER(c_uint32)],
    "sluice_optimizer_settings": [_TEXT_OUT],
    "sluice_optimizer_check": [c_char_p, POINTER(Setting), c_size_t],
    "sluice_plan": [c_void_p, POINTER(EngineOptions), _TEXT_OUT],
    "sluice_engine_create": [c_void_p, POINTER(EngineOptions), POINTER(c_void_p)],
    "sluice_engine_plan": [c_void_p, _TEXT_OUT],
    "sluice_engine_predict": [c_void_p, c_double, _TEXT_OUT],
    "sluice_engine_replan": [c_void_p, c_uint64],
    "sluice_engine_leave": [c_void_p, c_uint32, c_uint64, POINTER(c_void_p)],
    "sluice_engine_set_values": [c_void_p, c_uint32, VALUES, c_void_p],
    "sluice_engine_get_values": [c_void_p, c_uint32, VALUES, c_void_p],
    "sluice_engine_load_values": [c_void_p, c_char_p],
    "sluice_engine_state_arrays": [c_void_p, _TEXT_OUT],
    "sluice_engine_get_state": [c_void_p, c_uint32, STATE, c_void_p],
    "sluice_engine_get_state_alone": [c_void_p, c_uint32, STATE, c_void_p],
    "sluice_engine_state_is_taken": [c_void_p, c_char_p],
    "sluice_engine_set_state": [c_void_p, c_uint32, STATE, c_void_p],
    "sluice_engine_updates": [c_void_p, c_uint32, POINTER(c_uint64)],
    "sluice_engine_set_updates": [c_void_p, c_uint32, c_uint64],
    "sluice_engine_begin_step": [c_void_p, POINTER(StepSettings)],
    "sluice_engine_acquire": [c_void_p, c_uint32, ctypes.c_int],
    "sluice_engine_release": [c_void_p, c_uint32],
    "sluice_engine_held": [c_void_p, c_uint32, POINTER(c_uint32), POINTER(c_uint32)],
    "sluice_engine_held_units": [c_void_p, POINTER(c_uint32), c_size_t, POINTER(c_size_t)],
    "sluice_engine_parameter": [c_void_p, c_uint32, POINTER(c_void_p)],
    "sluice_catch_touches": [],
    "sluice_engine_add_gradient": [c_void_p, c_uint32, c_void_p, ctypes.c_int],
    "sluice_engine_get_gradient": [c_void_p, c_uint32, c_void_p, ctypes.c_int],
    "sluice_engine_has_gradient": [c_void_p, c_uint32, POINTER(c_uint32)],
    "sluice_engine_gradient_norms": [c_void_p, POINTER(c_uint32), c_size_t, POINTER(c_double)],
    "sluice_engine_multiply_gradients": [c_void_p, POINTER(c_uint32), c_size_t, c_double],
    "sluice_engine_drop_gradients": [c_void_p, POINTER(c_uint32), c_size_t],
    "sluice_engine_abandon_step": [c_void_p],
    "sluice_engine_end_gradients": [c_void_p, c_uint32],
    "sluice_engine_end_micro_batch": [c_void_p],
    "sluice_engine_set_micro_batch": [c_void_p, c_uint32],
    "sluice_engine_counters": [c_void_p, POINTER(Counters)],
    "sluice_engine_step": [c_void_p, POINTER(StepSettings), POINTER(StepResult)],
    "sluice_engine_settle": [c_void_p],
    "sluice_engine_steps": [c_void_p, POINTER(c_uint64)],
    "sluice_engine_in_step": [c_void_p, POINTER(c_uint32)],
    "sluice_engine_failure": [c_void_p, _TEXT_OUT],
    "sluice_engine_save_with_files": [c_void_p, c_char_p, c_uint64, POINTER(File), c_size_t, _TEXT_OUT],
    "sluice_engine_find_checkpoint": [c_void_p, c_char_p, _TEXT_OUT],
    "sluice_engine_checkpoint_file": [c_void_p, c_char_p, c_char_p, _TEXT_OUT],
    "sluice_engine_load": [c_void_p, c_char_p],
    "sluice_engine_use_stream": [c_void_p, c_void_p],
    "sluice_engine_device": [c_void_p, _TEXT_OUT],
    "sluice_engine_ledger": [c_void_p, POINTER(LedgerLine), c_size_t, POINTER(c_size_t)],
    "sluice_engine_add_event": [c_void_p, c_char_p, c_char_p, c_uint64, c_uint64, c_uint64],
    "sluice_engine_save_trace": [c_void_p, c_char_p],
    "sluice_safetensors_tensors": [c_char_p, _TEXT_OUT],
    "sluice_checkpoints": [c_char_p, _TEXT_OUT],
    "sluice_ranks_memory": [c_uint32, POINTER(ctypes.c_int)],
    "sluice_ranks_create_local": [ctypes.c_int, c_uint32, POINTER(RanksOptions), POINTER(c_void_p)],
    "sluice_ranks_create_links": [POINTER(Links), POINTER(RanksOptions), POINTER(c_void_p)],
    "sluice_ranks_along": [c_void_p, c_char_p, c_char_p, POINTER(c_void_p)],
    "sluice_ranks_rank": [c_void_p, POINTER(c_uint32)],
    "sluice_ranks_size": [c_void_p, POINTER(c_uint32)],
    "sluice_ranks_failure": [c_void_p, _TEXT_OUT],
    "sluice_ranks_traffic": [c_void_p, POINTER(Traffic)],
    "sluice_ranks_exchange": [c_void_p, c_char_p, c_char_p, c_size_t, _TEXT_OUT, POINTER(c_size_t)],
    "sluice_ranks_broadcast": [c_void_p, c_char_p, c_void_p, c_uint64],
    "sluice_ranks_barrier": [c_void_p, c_char_p],
    "sluice_ranks_fail": [c_void_p, c_char_p],
    "sluice_pipeline_actions": [c_char_p, c_uint32, c_uint32, c_uint64, c_uint32, _TEXT_OUT],
    "sluice_pipeline_stages": [c_char_p, c_uint32, c_uint32, c_uint64, c_char_p, POINTER(c_double), c_size_t, _TEXT_OUT],
    "sluice_ranks_send": [c_void_p, c_uint32, c_char_p, c_void_p, c_uint64, POINTER(c_void_p)],
    "sluice_ranks_receive": [c_void_p, c_uint32, c_char_p, c_void_p, c_uint64, POINTER(c_void_p)],
    "sluice_message_wait": [c_void_p],
}
_OTHER_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "sluice_last_error": ([], c_char_p),
    "sluice_version": ([], c_char_p),
    "sluice_text_destroy": ([c_void_p], None),
    "sluice_model_destroy": ([c_void_p], None),
    "sluice_engine_destroy": ([c_void_p], None),
    "sluice_home_destroy": ([c_void_p], None),
    "sluice_ranks_destroy": ([c_void_p], None),
}


def version_of(library: ctypes.CDLL) -> int:
    """Returns the result of sluice_abi_version(). Raises AttributeError where the library has no such function."""
    library.sluice_abi_version.argtypes = []
    library.sluice_abi_version.restype = c_uint32
    return int(library.sluice_abi_version())


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the argument and result types of every function. Raises AttributeError where one is missing."""
    for name, arguments in _STATUS_FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    for name, (arguments, result) in _OTHER_FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
