"""A GPU for tests on machines without one: the fake driver of tests/cuda, whose memory the CPU shares, so that what a GPU would
compute is computed by the CPU where it lies. Sluice's own work on it is done as late, or in as random an order, as a GPU's may be.

Nothing of it is installed, and no option of Sluice asks for it: a process has it when SLUICE_CUDA_DRIVER names that driver, and a
test has called share_memory().

With SLUICE_FAKE_GPU=late, early or random, the tests of sluice.torch that wrap models by support.wrapped_models do so on this GPU;
tests/python/torch/test_on_card.py runs a part of them so. What a GPU does not have is marked by cpu_alone()."""

import contextlib
import ctypes
import gc
import os
import unittest.mock

import pytest
import torch

import sluice
from sluice.torch import _engine, _homes
from support.sluice_process import BUILD

DRIVER = BUILD / "lib" / "libsluice_fake_cuda.so"
KERNELS = BUILD / "lib" / "libsluice_kernels.fatbin"
SCHEDULES = ("early", "late", "random")
# Tests state these facts of it: measuring would take a second for each engine, and plans would depend on the machine.
FACTS = sluice.DeviceFacts(to_gpu=20e9, from_gpu=20e9, both_ways=30e9, gpu_updates=2e10, cpu_memory=20e9, base=0, between_gpus=2e11)


def asked():
    """When the fake GPU's work is to be done, where tests are to run on it; else None."""
    return os.environ.get("SLUICE_FAKE_GPU")


def begin_if_asked():
    """Gives this process the fake GPU where tests are to run on it: once, since models may live until the collector runs."""
    if asked() is not None:
        share_memory(memory=64 << 30, schedule=asked(), seed=1, devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def placed(on_meta=False, /, **given):
    """The arguments of wrap(), plan() or from_pretrained(), with those that a GPU needs where tests are to run on it. `memory` is
    the budget of the host's memory there, too, and `place` says where what is not used lies; what is used lies on the GPU, for
    which any model of the tests gets enough, with a reserve, since the plan is made once. on_meta: the model is there."""
    if asked() is None and not given.get("device_memory"):
        return given
    given = {"device_facts": FACTS} | given
    if asked() is None:
        return given
    sized = {} if "sample_batch" in given else {"reserve": "256MiB"}
    device = "cuda" if on_meta or "LOCAL_RANK" in os.environ else None
    return {"device_memory": "4GiB", "device": device} | sized | given


def cpu_alone(why):
    """Marks a test, or one of its parameters, that the GPU cannot pass: why says what Sluice refuses there, or what is different.
    On the GPU it is skipped with that reason."""
    return pytest.mark.skipif(asked() is not None, reason=f"for the CPU alone: {why}")


def require_built():
    """Skips the test where there is no fake GPU."""
    if not DRIVER.exists() or not KERNELS.exists():
        pytest.skip(f"{DRIVER.name} or {KERNELS.name} is not built (they need CUDA's header and nvcc)")


def _driver():
    require_built()
    loaded = ctypes.CDLL(str(DRIVER))
    loaded.sluice_fake_cuda_share_memory.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    loaded.sluice_fake_cuda_fail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
    for name in ("sluice_fake_cuda_misuses", "sluice_fake_cuda_alive"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def share_memory(memory=1 << 30, schedule="random", seed=0, devices=1, has_peers=True):
    """Gives this process a fake GPU with so much memory, on which nothing is alive. schedule: when its work is done. devices: how many
    there are, of which the process uses one. has_peers: whether it reaches the memory of other processes' GPUs, or of how many neighbours it
    is one that do."""
    loaded = _driver()
    os.environ["SLUICE_CUDA_DRIVER"] = str(DRIVER)
    loaded.sluice_fake_cuda_share_memory(memory, SCHEDULES.index(schedule), seed, devices, int(has_peers))


def fail(function, result, n=0):
    """The n-th call of one of CUDA's functions from now on (0 is the next one) returns this result, and does nothing."""
    _driver().sluice_fake_cuda_fail(function.encode(), n, result)


def take_misuses():
    """Returns the misuses that the driver has refused since the last call, a line each."""
    return _driver().sluice_fake_cuda_misuses().decode().splitlines()


def alive():
    """Returns the things that were made on the GPU and have not ended, a line each."""
    return _driver().sluice_fake_cuda_alive().decode().splitlines()


_GPU = torch.device("cuda", 0)
# PyTorch says these of each tensor on a GPU, and not of those of the CPU, which stands in for it.
_SAID = {
    torch.Tensor.is_shared: True, torch.Tensor.get_device: 0, torch.Tensor.device.__get__: _GPU, torch.Tensor.is_cuda.__get__: True,
    torch.Tensor.is_cpu.__get__: False,
}  # fmt: skip


class _Answers(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SAID and not torch.Tensor.is_meta.__get__(args[0]):
            return _SAID[func]
        if func is torch.Tensor.cuda:
            func, args, kwargs = torch.Tensor.to, (args[0], torch.device("cuda", *args[1:2])), {}
        if func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        return func(*map(_here, args), **{name: _here(value) for name, value in kwargs.items()})


def _here(given):
    """The device that stands in for a GPU; the meta device for another GPU."""
    is_gpu = isinstance(given, (str, torch.device)) and str(given).startswith("cuda")
    return torch.device("cpu" if torch.device(given).index in (None, 0) else "meta") if is_gpu else given


class _Device:
    """In the place of an engine's `device`: the GPU, and not the CPU that stands in for it."""

    def __get__(self, engine, owner=None):
        return engine.__dict__["device"] if engine.gpu is None else _GPU

    def __set__(self, engine, device):
        engine.__dict__["device"] = device


def _autocast_of_cuda():
    """PyTorch's functions of autocast as they are where there is a GPU, for which autocast is not that of the CPU. What it would do on the
    GPU it does on the CPU, which stands in for it."""
    is_on, types = {"cpu": False, "cuda": False}, {"cpu": torch.bfloat16, "cuda": torch.float16}
    turn, use = torch.set_autocast_enabled, torch.set_autocast_dtype

    def set_autocast_enabled(kind, on):
        is_on[kind] = on
        if kind == "cuda":
            turn("cpu", on)

    def set_autocast_dtype(kind, dtype):
        types[kind] = dtype
        if kind == "cuda":
            use("cpu", dtype)

    return {"is_autocast_enabled": lambda kind="cuda": is_on[kind], "get_autocast_dtype": lambda kind: types[kind],
            "set_autocast_enabled": set_autocast_enabled, "set_autocast_dtype": set_autocast_dtype}


@contextlib.contextmanager
def answers_of_cuda():
    """Inside of the `with` PyTorch says of tensors, autocast and random numbers what it says of those of a GPU, as engines do, and takes
    a GPU's names for the fake."""
    make = torch.Tensor._make_wrapper_subclass  # the mode does not see it
    cuda = {
        "get_rng_state": lambda device="cuda": torch.get_rng_state(), "is_bf16_supported": lambda: True,
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }  # fmt: skip
    patched = unittest.mock.patch
    with (
        patched.object(torch.Tensor, "_make_wrapper_subclass", lambda *a, device, **k: make(*a, device=_here(device), **k)),
        patched.object(_engine.ModelEngine, "device", _Device(), create=True), patched.object(_homes, "_CUDA", _homes._CPU),
        patched.multiple(torch, **_autocast_of_cuda()), patched.multiple(torch.cuda, **cuda),
        patched("torch.cuda.amp.common.amp_definitely_not_available", lambda: False), _Answers(),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def capturing():
    """Inside of the `with` what PyTorch queues on the GPU is captured into a graph."""
    _driver().sluice_fake_cuda_capture(1)
    try:
        yield
    finally:
        _driver().sluice_fake_cuda_capture(0)


@contextlib.contextmanager
def shared(has_nccl=False, **options):
    """A fake GPU inside of the `with`, which is used as it may be, and on which nothing is left. has_nccl: its driver is NCCL, too.
    options: of share_memory()."""
    share_memory(**options)
    os.environ["SLUICE_NCCL"] = str(DRIVER) if has_nccl else "/nowhere/libnccl.so.2"
    try:
        yield
        gc.collect()
        misuses = take_misuses()
        assert not misuses, misuses
        assert alive() == []
    finally:
        os.environ.pop("SLUICE_CUDA_DRIVER", None)
        os.environ.pop("SLUICE_NCCL", None)
