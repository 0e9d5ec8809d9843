"""Checks of models that cannot be wrapped, and guards of a wrapped model: code that would break it unnoticed is served in another way, or
gets an error that says what to do. DDP and FSDP, and libraries that use them (Accelerate, transformers' Trainer), would exchange its
gradients or parameters a second time: DDP over the same ranks hands on calls instead, and all else is refused."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NoReturn

import torch
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .._handle import call
from ..errors import InvalidArgumentError, StateError
from ..optimizers import Optimizer as Settings

_RESIZING = ("resize_token_embeddings", "resize_position_embeddings")
_WERE = "_before_wrap"  # a module's attribute: by name, what was in place of its overrides, in a tuple, or nothing


def override(module: torch.nn.Module, name: str, value: Any) -> None:
    """Gives a module an attribute that stands in for that of its class, until restore()."""
    own = module.__dict__
    own.setdefault(_WERE, {})[name] = (own[name],) if name in own else ()
    own[name] = value


def restore(model: torch.nn.Module) -> None:
    """Lets the modules have the attributes that they had."""
    for own in (module.__dict__ for module in model.modules()):
        for name, was in own.pop(_WERE, {}).items():
            own.pop(name, None)
            own.update((name, value) for value in was)


def guard(model: torch.nn.Module, dtypes: Set[torch.dtype], device: torch.device) -> None:
    """Guards a model and its modules. dtypes, device: of its parameters."""
    for module in model.modules():
        if REGISTRY_KEY not in module.__dict__:
            override(module, REGISTRY_KEY, _Registry())
        for name in _RESIZING:
            if callable(getattr(type(module), name, None)):
                override(module, name, functools.partial(_refuse_to_resize, name))
        if next(module.parameters(), None) is not None:
            override(module, "_load_from_state_dict", functools.partial(_load, module._load_from_state_dict))
            override(module, "_apply", functools.partial(_apply, module, dtypes, device))
            override(module, "__deepcopy__", functools.partial(refuse_copy, "copied (copy.deepcopy) in whole or in part"))
            override(module, "__reduce_ex__", functools.partial(refuse_copy, "copied or pickled in whole or in part"))


def keep_touches_served() -> None:
    """Has signal.signal() and faulthandler leave the handler in place that brings absent parameters in. Python does not know of it, so that
    Lightning, which at the end of fit() sets for every signal the handler that Python knew before, would take it away."""
    for module, name in ((signal, "signal"), (faulthandler, "enable"), (faulthandler, "disable")):
        if not hasattr(getattr(module, name), "keeps_touches_served"):
            setattr(module, name, _keeping(getattr(module, name)))


def _keeping(given: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(given)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        result = given(*args, **kwargs)
        call("sluice_catch_touches")
        return result

    keeping.keeps_touches_served = True  # type: ignore[attr-defined]
    return keeping


def _apply(
    module: torch.nn.Module,
    dtypes: Set[torch.dtype],
    device: torch.device,
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> torch.nn.Module:
    """Replaces Module._apply, which .to(), .half(), .cuda() and the like call: buffers follow, parameters stay."""
    for probe in [torch.zeros(1, dtype=dtype, device=device) for dtype in dtypes]:
        was_shared = probe.is_shared()  # as every tensor on a GPU is
        moved = fn(probe)
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise StateError(
                f"a wrapped model is to be moved to {moved.dtype} on {moved.device}, and its parameters are the engine's: "
                f"{probe.dtype} on {probe.device}. Move it before sluice.torch.wrap(), or after sluice.torch.close()"
            )
        if moved.is_shared() and not was_shared:
            raise StateError(
                "a wrapped model is to be moved into memory that processes share, and its parameters are the engine's, "
                "which lives in one process; share it after sluice.torch.close(), or a copy of its state_dict()"
            )
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
        setattr(module, name, fn(buffer))
    return module


def _load(
    given: Callable[..., None], state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Replaces what load_state_dict() calls for each module; its own hook would not come where a class loads itself."""
    if local_metadata.get("assign_to_params_buffers"):
        raise StateError(
            "load_state_dict(assign=True) is called on a wrapped model, whose parameters would then be other tensors, outside of the engine; "
            "leave assign out, so that values are copied, or load before sluice.torch.wrap(). PyTorch notes assign in the state_dict that is "
            "loaded, which then assigns in later calls, too: take a new one"
        )
    given(state_dict, prefix, local_metadata, *args, **kwargs)


def _refuse_to_resize(name: str, *_: Any, **__: Any) -> NoReturn:
    """Replaces what gives a model of transformers parameters of another size."""
    raise StateError(
        f"{name}() is called on a wrapped model, and the engine was planned for its parameters as they are; sluice.torch.close() the "
        f"model, call {name}(), and wrap it again"
    )


def refuse_copy(what: str, *_: Any) -> NoReturn:
    """Raises: a copy would refer to the engine's memory, and not have its contents."""
    raise StateError(
        f"a wrapped model is to be {what}, and its parameters are the engine's; save its state_dict(), or copy it before "
        "sluice.torch.wrap() or after sluice.torch.close()"
    )


def _refuse_exchange(what: str) -> NoReturn:
    raise StateError(
        f"{what} is to be applied to a model that sluice.torch.wrap() has wrapped, whose parameters and gradients go over the "
        "ranks already; leave it out"
    )


class LeftOut(DistributedDataParallel):
    """The result of DistributedDataParallel(model) for a wrapped model: it has the model as `module`, hands on calls, and exchanges
    nothing. The model's own ranks do that."""

    def __init__(self, module: torch.nn.Module, *_: Any, process_group: Any = None, **__: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        # DDP's attributes, which callers read: nothing is exchanged in any pass.
        self.process_group: Any = torch.distributed.group.WORLD if process_group is None else process_group
        self.require_backward_grad_sync = self.require_forward_param_sync = self.find_unused_parameters = self.static_graph = False
        self.device_ids, self.device = None, next(module.parameters()).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if not any(hasattr(p, "_sluice") for p in self.module.parameters()):
            raise StateError(
                "DistributedDataParallel was made around a model while it was wrapped, and so exchanges nothing; the model was closed since: "
                "make DistributedDataParallel(model) anew, or wrap the model again and call it"
            )
        return self.module(*args, **kwargs)

    def __getstate__(self) -> NoReturn:
        refuse_copy("copied or pickled, in whole or in part")

    def _set_static_graph(self) -> None:
        """Does nothing: the order of the graph is not of interest here."""

    def train(self, mode: bool = True) -> LeftOut:
        """As of each module."""
        torch.nn.Module.train(self, mode)
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: gradients are summed at their first use."""
        yield

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: what DDP's exchange would do is not done."""
        raise StateError(
            "join() or register_comm_hook() is called on DistributedDataParallel around a wrapped model, which exchanges nothing: the model's "
            "own ranks do so, each with as many backward passes as the others; give each as many batches (DistributedSampler), and no hook"
        )

    join = join_hook = register_comm_hook = _refuse


def _new(cls: type[DistributedDataParallel], module: Any = None, *_: Any, process_group: Any = None, **__: Any) -> DistributedDataParallel:
    """Replaces DistributedDataParallel.__new__: around a model that as many ranks have wrapped there is nothing to exchange."""
    marked = [p for p in module.parameters() if hasattr(p, "_sluice")] if isinstance(module, torch.nn.Module) else []
    session = marked[0]._sluice if marked else None
    if cls is DistributedDataParallel and session is not None and session.model() is module:
        if session.size == torch.distributed.get_world_size(process_group):
            return object.__new__(LeftOut)
    return object.__new__(cls)


DistributedDataParallel.__new__ = _new  # type: ignore[method-assign, assignment]


class _Registry(OrderedDict[str, Any]):
    """The registry that torch.distributed keeps of a module for fully_shard() and replicate(). These, and FullyShardedDataParallel, look
    into it before they change the module."""

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            _refuse_exchange("FSDP (fully_shard, FullyShardedDataParallel) or replicate()")
        return super().__contains__(name)


def _on_submodule(parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Comes before a module gets a submodule. (Wrapped parameters are marked with `_sluice`.)"""
    exchanges = isinstance(parent, DistributedDataParallel) and not isinstance(parent, LeftOut)
    if exchanges and any(hasattr(p, "_sluice") for p in module.parameters()):
        _refuse_exchange("DistributedDataParallel")


register_module_module_registration_hook(_on_submodule)


# ---- what is given to wrap() and plan() ----


def check_optimizer(optimizer: Any, update_in_backward: bool, param_groups: object, clip_value: float | None) -> None:
    """Raises InvalidArgumentError for what is no optimizer, for arguments that need one, and for values out of range."""
    if optimizer is not None and not isinstance(optimizer, Settings):
        raise InvalidArgumentError(
            f"the optimizer is {optimizer!r:.80}; settings such as sluice.AdamW(lr=1e-4) are needed, or None for a model "
            "that is not trained (a batch is given as sample_batch=)"
        )
    for name, given in (("update_in_backward is", update_in_backward), ("param_groups are", param_groups is not None)):
        if optimizer is None and given:
            raise InvalidArgumentError(f"{name} given without an optimizer; give one, such as sluice.AdamW()")
    if clip_value is not None and not 0 < clip_value < math.inf:
        raise InvalidArgumentError(f"clip_value is {clip_value}; a finite bound above 0 is needed, or None for no clipping")


def check_model(model: Any) -> None:
    """Raises InvalidArgumentError that names what cannot be wrapped as it is, and StateError for a wrapped model."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"the model is {model!r:.80}, which is no torch.nn.Module; give the model itself")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidArgumentError(
                f"{_named(name)} is a {type(module).__name__} of torch.jit, whose modules run without Python's hooks; wrap what it "
                "was made of (torch.compile works on its blocks), and script it after sluice.torch.close()"
            )
        is_ddp = isinstance(module, DistributedDataParallel) and not isinstance(module, LeftOut)
        exchanging = type(module).__name__ if is_ddp else _sharding_of(module)
        if exchanging is not None:
            raise InvalidArgumentError(
                f"{exchanging} was applied to {_named(name)}, and the ranks of a wrapped model exchange its gradients and parameters themselves "
                "(wrap(stage=) says what is partitioned); wrap the model without it"
            )
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(t):
            raise InvalidArgumentError(
                f"'{name}' has no shape yet (a lazy module); call the model once before it is wrapped"
            )
    _refuse_wrapped(model)
    _check_sharing(model)
    _check_inference(model)


def _named(name: str) -> str:
    return f"'{name}'" if name else "the model"


def _sharding_of(module: torch.nn.Module) -> str | None:
    """Names the wrapper that was applied to the module: one of FSDP's, or replicate(), which is DDP's."""
    if isinstance(module, FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    known = module.__dict__.get(REGISTRY_KEY, ())
    return None if isinstance(known, _Registry) else next((f"{name}()" for name in ("fully_shard", "replicate") if name in known), None)


def _refuse_wrapped(model: torch.nn.Module) -> None:
    owners = {name: owner for name, p in model.named_parameters() if (owner := getattr(p, "_sluice", None)) is not None}
    if any(owner.model() is model and not owner.engine.closed for owner in owners.values()):
        raise StateError(
            "the model is wrapped already, and sluice.torch.engine_of(model).plan() is its plan; "
            "sluice.torch.close(model) ends that"
        )
    for name, owner in owners.items():
        if owner.engine.closed:
            raise StateError(
                f"the values of '{name}' are gone with the engine of its model, which engine.close() has closed; "
                "sluice.torch.close(model) keeps them. Make the model anew"
            )
        raise StateError(f"'{name}' belongs to another wrapped model; close that, or wrap the whole once")


def _check_inference(model: torch.nn.Module) -> None:
    """Raises InvalidArgumentError for tensors of torch.inference_mode(), which PyTorch neither trains nor uses elsewhere."""
    made = next((name for name, p in model.named_parameters() if p.is_inference()), None)
    if made is not None or torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            ("the model is wrapped" if made is None else f"'{made}' was made") + " inside torch.inference_mode(), whose tensors are used "
            "nowhere else; make the model and wrap it outside of that, and call it inside"
        )


def _check_sharing(model: torch.nn.Module) -> None:
    parameters = dict(model.named_parameters())
    others = {
        f"{path}.{name}" if path else name: t
        for path, module in model.named_modules()
        for name, t in [*module.named_buffers(recurse=False, remove_duplicate=False), *vars(module).items()]
        if type(t) is torch.Tensor
    }
    for pair in _sharing(others, parameters):
        found = [name for name in pair if name in parameters]
        if len(found) == 2:
            raise InvalidArgumentError(
                f"'{pair[1]}' and '{pair[0]}' are two Parameters over one memory, which would have a memory each; make them "
                "one Parameter (module.weight = other.weight), or give each its own (nn.Parameter(p.detach().clone()))"
            )
        if len(found) == 1 and parameters[found[0]].requires_grad:
            other = pair[0] if pair[1] == found[0] else pair[1]
            raise InvalidArgumentError(
                f"'{other}' lies in the memory of '{found[0]}', which moves when the model is wrapped, so that it would "
                "keep the values of now; make the view in forward, or give it a clone(). What makes it at each call, as "
                "torch.nn.utils.spectral_norm() does, makes a tensor of its own: call the model once before it is wrapped"
            )


def _sharing(others: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors that reach into each other in memory, at least one of them a parameter."""
    every = {**others, **parameters}
    open_ones: list[tuple[int, int, int, str]] = []
    for extent in sorted(_extent(name, t) for name, t in every.items() if t.numel() and t.layout == torch.strided):
        memory, begin, _, name = extent
        open_ones = [other for other in open_ones if other[0] == memory and other[2] > begin]
        for _, _, _, other in open_ones:
            if name in parameters or other in parameters:
                yield other, name
        open_ones.append(extent)


def _extent(name: str, t: torch.Tensor) -> tuple[int, int, int, str]:
    """The memory in which a tensor lies, from which byte to which, and its name."""
    size = t.element_size()
    reach = size + sum((length - 1) * stride * size for length, stride in zip(t.shape, t.stride(), strict=True))
    # Tensors on the meta device have no addresses, so that offsets in their storages are compared.
    begin = int(t.storage_offset()) * size if t.is_meta else t.data_ptr()
    return id(t.untyped_storage()) if t.is_meta else 0, begin, begin + reach, name
