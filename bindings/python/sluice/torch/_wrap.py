"""The functions that users call: wrap(), from_pretrained(), which wraps a model of transformers out of a folder, and the functions that
take a wrapped model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional, TypeVar, Union

import torch

from .._library import check_version
from ..engine import Engine
from ..engine import plan as _plan
from ..errors import Called, InvalidArgumentError, NotFoundError, StateError, knows_its_keywords
from ..model import DeviceFacts, Folder, Path, Size
from ..optimizers import Optimizer as Settings
from ._full import full
from ._guards import LeftOut
from ._moving import check_rules, give_first_values
from ._optimizer import Optimizer
from ._prepare import Prepared, prepare
from ._measures import Ready
from ._presence import Presence
from ._safetensors import InFiles, tensors_of
from ._session import Session
from ._modes import outside_of_graphs
from ._together import Together, Which, together, unmet
from ._weights import stored_of

Model = TypeVar("Model", bound=torch.nn.Module)
PIPELINE = "_sluice_pipeline"  # the attribute of a model whose stages are in this process


@knows_its_keywords
def wrap(
    model: Model,
    optimizer: Optional[Settings] = None,
    *,
    memory: Size,
    disk: Union[Path, Folder, Sequence[Union[Path, Folder]], None] = None,
    reserve: Optional[Size] = None,
    sample_batch: Any = None,
    param_groups: Optional[Iterable[Any]] = None,
    units: Union[Mapping[str, Union[str, Sequence[str]]], Sequence[str], None] = None,
    threads: int = 0,
    held_units: int = 3,
    prefetch: int = 0,
    trace_events: int = 0,
    place: Union[str, Mapping[str, str], None] = None,
    weights: Optional[Path] = None,
    state: str = "f32",
    master: str = "f32",
    seed: int = 0,
    update_in_backward: bool = False,
    clip_value: Optional[float] = None,
    ranks: Which = None,
    stage: Optional[int] = None,
    reproducible: bool = False,
    accumulate: int = 0,
    sum_gradients: str = "step",
    device_memory: Optional[Size] = None,
    device: Any = None,
    updates: Optional[str] = None,
    links: Optional[str] = None,
    device_facts: Optional[DeviceFacts] = None,
    silence: float = 30.0,
    patience: float = 600.0,
) -> tuple[Model, Optional[Optimizer]]:
    """Moves a model's parameters into an engine. Returns the same model, and a torch.optim.Optimizer of its parameters, or None
    where no `optimizer` is given, for evaluation and generation.

    memory: the budget of the whole process, what PyTorch takes itself (`reserve`) included.
    disk: a folder ("/nvme", or "/nvme:40GiB" with what may be taken there), or several, which are striped, for what does not fit in memory.
    reserve: what PyTorch will take: activations, temporary tensors. A warning says by how much the first step took more. None: each call
        that is larger than those before is estimated, and the plan is changed for it, or the call raises BudgetError with nothing changed.
    sample_batch: what the model is called with, for which the first plan is made: a dict of keyword arguments, a tuple of
        arguments, or one argument.
    param_groups: what torch.optim takes, with keys of your own, and "params" also as names; trained parameters in none are in one more
        group, with the settings of `optimizer`. With Muon also "use_muon": whether matrices of the group are Muon's; without it they are,
        but for embeddings and the output head (which get_output_embeddings() returns).
    units: the user's own units: names of modules, such as ["layers.0", "layers.1"], or a dict of a unit's name -> names of modules or
        parameters; the others are found.
    threads: how many threads update; 0: as many as PyTorch uses, of several ranks at most a rank's share of the cores.
    held_units: the most units that are held at once.
    place: "memory" or "disk" (or "device", with device_memory) for everything, or a mapping; it is for tests and measurements.
    weights: a folder of safetensors, for a model on the meta device: parameters in it are streamed, and others (adapters)
        get first values by the model's own rules.
    state: the type of the optimizer's state, "f32", "bf16" or "8bit".
    update_in_backward: a gradient is applied in backward, as soon as all of its unit are there, and never stored. Clipping by norm,
        accumulation, loss scaling and looking at p.grad are errors then. With several ranks state `accumulate`: one backward() of each.
    clip_value: the bound of each element of a gradient, which the update applies, after any clipping by norm.
    master: "none" keeps no f32 masters of bfloat16 parameters, and rounds updates stochastically, by `seed`.
    ranks: which processes train the model together, with budgets of their own; all wrap it. None: those of the script's process group,
        else those that torchrun has started. False: this process alone. A process group: its ranks.
    stage: what is partitioned over the ranks: 0 (nothing), 1 (the state) or 3 (parameters, too). 2 is as 1, but on GPUs that update, with
        one micro-batch of each rank in a step, and with `sum_gradients`: there a rank keeps its own part alone of gradients. None: the plan
        chooses.
    reproducible: the same bits at any number of ranks. Each backward() is a micro-batch, of which a step has `accumulate` over all ranks
        (those of MicroBatches), and a gradient is the mean over them: losses are not divided. The script sees to it that
        dropout draws the same numbers for a micro-batch on any rank. docs/ranks.md says how, and what is refused.
    accumulate: how many micro-batches, which are calls of backward(), a step has over all ranks, a multiple of their number. Then gradients
        are summed beside the last one of a rank. 0: it is not known, and they are summed at their first use.
    sum_gradients: when ranks sum them: "step", as above; or with `accumulate` and a stage of 2 or 3 "each_backward": each rank then adds up
        its own part alone, in a 1/N of the memory, which takes as many sums as a rank has micro-batches, and gives other bits.
    device_memory: how much of a GPU's memory may be taken, PyTorch's own (`reserve`) and CUDA's included. The parameters are on that GPU,
        or on the CPU or the meta device, and `device` says to which GPU they go ("cuda", "cuda:1").
    updates: what updates then, "gpu" or "cpu" (while the GPU computes); None: the plan chooses by the machine's rates, unit by unit,
        and says why. Bits are the same.
    links: what joins ranks on GPUs: "gpus" of one host, which read each other's memory (NVLink; PCIe, where the system allows it), "nccl",
        or "host", through whose memory they pass what they sum; None: what was measured decides. Bits are the same.
    device_facts: what is known of the GPU's rates and of CUDA's own memory (sluice.DeviceFacts); None: wrap() measures it, in half a
        second.
    silence, patience: after so many seconds without a sign of life a rank has failed; after so many it has failed that lives,
        and does not take part, or that never called wrap().

    docs/guide has more: pytorch.md of models, ranks.md of several ranks, gpu.md of GPUs. Raises BudgetError where the model does not fit,
    and InvalidArgumentError where it cannot be wrapped; it is then as it was.
    """
    options = {name: given for name, given in locals().items() if name not in ("model", "optimizer", "weights")}
    find = None if weights is None else functools.partial(stored_of, model, weights)
    return wrap_with(model, optimizer, find, **options)


def wrap_with(
    model: Model,
    optimizer: Optional[Settings],
    find: Optional[Callable[[], Mapping[str, InFiles]]],
    *,
    ranks: Which = None,
    silence: float = 30.0,
    patience: float = 600.0,
    **options: Any,
) -> tuple[Model, Optional[Optimizer]]:
    """Wraps a model. find: returns where values lie in files, by names. options: the others of wrap()."""
    ready = Ready()
    with together(ranks, silence, patience) as others:
        with ready.phase("planning"):
            prepared, stored = others.agreed(
                lambda: (prepare(model, optimizer, together=others, **options), {} if find is None else find())
            )
            check_alike(model, prepared, stored, others)
        return move_in(model, prepared, stored, others, ready)


def check_alike(model: torch.nn.Module, prepared: Prepared, stored: Mapping[str, InFiles], others: Together, **given: Any) -> None:
    """Raises InvalidArgumentError where the ranks have not the same, `given` included, by which models may be cut otherwise."""
    alike = given | prepared.alike
    if prepared.gpu is not None and any(p.is_meta and name not in stored for name, p in model.named_parameters()):
        alike["the GPU on which first values are drawn, unless they are the model's own or come from weights,"] = prepared.gpu.kind
    others.check_alike(alike, model)


def hands_to_wrap(called: Called) -> Called:
    """Lets a function, or a class, that hands `options` to wrap() name what an unknown keyword argument may stand for."""
    shared = (name for name, each in inspect.signature(wrap).parameters.items() if each.kind is each.KEYWORD_ONLY)
    return knows_its_keywords(called, set(shared) - {"weights"})


def move_in(
    model: Model, prepared: Prepared, stored: Mapping[str, InFiles], others: Together, ready: Ready, agree: Callable[[], None] = lambda: None
) -> tuple[Model, Optional[Optimizer]]:
    """Makes the engine, and moves the model into it. agree: comes when it has moved, and undoes that where it raises."""
    on_meta = {name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}
    if on_meta:
        check_rules(model, stored)
    session = Session(model, prepared, others, stored, ready)
    with session.undone_on_failure():
        if on_meta:
            unset = [home for home in session.presence.homes if home.name in on_meta and home.name not in stored]
            with ready.phase("first values"):
                with others.random_of_rank_0(prepared.gpu):
                    give_first_values(model, unset, stored, session.presence)
        others.share_buffers(model)
        made = Optimizer(session, prepared.settings, prepared.roles) if prepared.train else None
        agree()
    session.moved_in()
    return model, made


@hands_to_wrap
def plan(
    model: torch.nn.Module,
    optimizer: Optional[Settings] = None,
    *,
    memory: Size,
    weights: Optional[Path] = None,
    ranks: Which = None,
    **options: Any,
) -> dict[str, Any]:
    """Plans where every byte of a model would live if wrap() were given the same. The model may be on the meta device, and
    stays as it is. "pytorch" is what PyTorch itself would take: the estimate for `sample_batch`, else what is reserved
    until the first call. With several ranks the plan is this one's; the others need not call it. Raises what wrap() would.

    options: those of wrap().
    """
    prepared = prepare(model, optimizer, memory=memory, together=unmet(ranks), **options)
    if weights is not None:
        stored_of(model, weights)
    with prepared.planning():
        made = _plan(prepared.units, prepared.options)
    made["pytorch"] = prepared.told(made)
    return made


def session_of(model: torch.nn.Module, inside: bool = False) -> Session:
    """The session of a wrapped model, or, `inside`, also of one that the module is in. The model's parameters keep it."""
    model = model.module if isinstance(model, LeftOut) else model
    sessions: Iterator[Session] = (p._sluice for p in model.parameters() if hasattr(p, "_sluice"))
    found = next((session for session in sessions if inside or session.model() is model), None)
    if found is None:
        parts = any(hasattr(p, "_sluice") for p in model.parameters())
        remedy = "parts of it are: of a Pipeline with devices, give one of its `modules`" if parts else "see sluice.torch.wrap()"
        raise StateError(f"the model ({type(model).__name__}) is not wrapped; {remedy}")
    return found


def engine_of(model: torch.nn.Module) -> Engine:
    """The engine of a wrapped model, for its ledger, plan, counters, trace, checkpoints and values. Calls for steps and
    units are a StateError: those are the optimizer's and the hooks'."""
    return session_of(model).engine


@knows_its_keywords
def close(model: torch.nn.Module, *, values: bool = True) -> None:
    """Closes the engine, and leaves the model's parameters plain tensors with their values, where they were: views stay
    views. Disk space is given back. Raises BudgetError, with nothing changed, where the values do not fit in the memory
    that was stated, or that the machine has. All ranks call it; with values=False one may call it alone.

    values=False: no values are kept. The model has new parameters on the meta device, and the old ones must not be touched.
    """
    if (pipeline := vars(model).get(PIPELINE)) is not None:
        pipeline.close(values=values)
    else:
        session_of(model).close(values)


@outside_of_graphs
@knows_its_keywords
def full_parameters(module: torch.nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
    """Inside of the `with` the parameters of a wrapped model, or of a module in it, may be read, and written by any means; the
    optimizer's masters follow afterwards. On a GPU, where parameters are there in calls of their modules alone, they are tensors on
    the CPU inside of it, in files of the disk folder where there is one, and nothing of the model is called.

    writeback: False: nothing is written.
    """
    session_of(module, inside=True)
    sessions = {p._sluice: None for p in module.parameters() if hasattr(p, "_sluice")}  # several of a Pipeline whose stages are here
    return _full_of([session.presence for session in sessions], list(map(id, module.parameters())), writeback)


@contextlib.contextmanager
def _full_of(presences: Sequence[Presence], ids: Sequence[int], writeback: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for presence in presences:
            stack.enter_context(full(presence, [presence.by_id[key] for key in ids if key in presence.by_id], writeback))
        yield


# ---- models of transformers, streamed from a folder ----


@hands_to_wrap
def from_pretrained(
    folder: Path,
    optimizer: Optional[Settings] = None,
    *,
    model_class: Any = None,
    dtype: Union[torch.dtype, str, None] = None,
    **options: Any,
) -> tuple[torch.nn.Module, Optional[Optimizer]]:
    """Streams a model of transformers from a folder (config.json, *.safetensors) and wraps it; it may be larger than memory.
    It is as from_pretrained() of transformers returns it: in eval() mode (call model.train() to train; Trainer does), with
    the folder's settings for generation, and in f32 where the model keeps f32. All parameters must be in the files: for a
    new head see wrap(weights=...).

    model_class: a class of transformers, also AutoModelFor...; None: the one that config.json names. dtype: a type or its name;
    "auto" or None: the type that config.json names, else that of the first values in the files. options: those of wrap().
    """
    import transformers

    check_version(transformers, "from_pretrained()")
    name = os.fspath(folder)
    stated = os.path.join(name, "config.json")
    if os.path.exists(stated) and not os.path.isfile(stated):
        raise InvalidArgumentError(f"'{stated}' is not a file; name a folder in which it is a regular file")
    if not os.path.isfile(stated):
        what = "has no config.json" if os.path.isdir(name) else "does not exist"
        raise NotFoundError(
            f"the folder '{name}' {what}; give one that save_pretrained() of transformers wrote, or that was downloaded as a "
            "whole (huggingface_hub.snapshot_download() returns the folder of a model of the Hub)"
        )
    config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    model = _build(model_class or _class_of(config, name), config, _type_of(dtype, config, folder))
    if model.can_generate() and os.path.isfile(os.path.join(name, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(name, local_files_only=True)
    model.train(optimizer is not None)  # the estimate is made for this mode
    wrapped, made = wrap_with(model, optimizer, lambda: stored_of(model, folder, partly=False), **options)
    return wrapped.eval(), made


def _class_of(config: Any, folder: str) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise InvalidArgumentError(
            f"'{folder}/config.json' names {names or 'no architecture'}, which transformers does not have; give model_class"
        )
    return found


def _type_of(dtype: Union[torch.dtype, str, None], config: Any, folder: Path) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None)
    if dtype is None:
        types = (there.dtype for there in tensors_of(folder).values())
        dtype = next((each for each in types if each is not None and each.is_floating_point), torch.float32)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"dtype is {dtype!r:.80}; it is a type such as torch.bfloat16, its name, or 'auto'")
    return found


def _build(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Builds the model on the meta device, with parameters of the type from the start: a cast would reach buffers, too, such
    as the frequencies of rotary embeddings, which are always f32."""
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype)
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    for name, p in model.named_parameters():
        if any(pattern.search(name) for pattern in kept):
            p.data = p.data.to(torch.float32)
    return model
