"""Turns the arguments of wrap() and plan(), parameter groups among them, into what an engine is planned for."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import pathlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ..engine import plan
from ..errors import BudgetError, InvalidArgumentError, NotFoundError
from ..model import Options, Sections, Size, Unit, size_of, whole
from ..optimizers import AdamW, Muon
from ..optimizers import Optimizer as Settings
from ._engine import ModelEngine
from ._guards import check_model, check_optimizer
from ._estimate import reserves_of
from ._gpu import HOST, Gpu, gpu_of
from ._measures import UNMEASURED, FirstStep, FirstStepOnGpu
from ._reproducible import check_reproducible, computing
from ._stages import Cut
from ._together import Together
from ._units import Group, Roles, bytes_in_memory, find_units, held_at_least, held_by_calls, named_units, units_of

_OF_OTHERS = ("amsgrad", "maximize", "momentum", "dampening", "nesterov", "centered", "decoupled_weight_decay")


class Prepared(NamedTuple):
    """The checked arguments of a wrap(), and the units made of the model."""

    groups: list[Group]
    units: list[Unit]  # the groups, as the engine takes them
    settings: list[Settings]  # of each parameter group
    roles: Roles
    options: Options
    memory: int  # Options.memory in bytes
    reserve: int  # the bytes that are reserved for PyTorch
    train: bool  # whether there is an optimizer
    estimated: Optional[int]  # the most bytes that PyTorch has at once, where they were estimated
    stated: bool  # whether the user stated the reserve
    clip_value: Optional[float]
    gpu: Optional[Gpu]  # where parameters are; None: in the memory of the CPU
    counts_passes: bool = True  # whether a backward pass is a micro-batch, where these are counted; else set_micro_batch() tells of them

    def of_pytorch(self, plan: Mapping[str, Any]) -> int:
        """The bytes that PyTorch may take where it computes, by this plan."""
        if self.gpu is None:
            return self.reserve
        free = 0 if self.is_known else max(0, plan["budget"]["device"] - plan["device"])
        return self._of_device - self.gpu.beside + free

    @property
    def is_known(self) -> bool:
        """Whether what PyTorch takes was stated, or estimated for a batch of the user's."""
        return self.stated or self.estimated is not None

    @property
    def _of_device(self) -> int:
        """The bytes of the GPU's memory that the plan leaves to PyTorch and CUDA."""
        return size_of(self.options.device_reserved, "device_reserved")

    def first_step(self, engine: ModelEngine, plan: Mapping[str, Any]) -> FirstStep:
        """Returns the measurer of the first step, which does not keep the engine alive."""
        if self.gpu is None:
            return FirstStep(self.memory, self.reserve, self.estimated, self.stated)
        alive = weakref.proxy(engine)
        other = None if self.is_known else lambda of_pytorch: alive.plan_with(of_pytorch)
        reserve = self.of_pytorch(plan)
        return FirstStepOnGpu(self.gpu, self.memory, reserve, self.estimated, lambda: alive.account(), self._of_device, other)

    def told(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a plan for PyTorch before anything is measured."""
        told = {"peak": self.estimated, "reserve": self.of_pytorch(plan), "measured": None}
        return told if self.gpu is None else {**told, **UNMEASURED}

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """A `with` in which a plan is made. A refusal says, too, where the plan does not contain yet what PyTorch takes in a call."""
        try:
            yield
        except BudgetError as error:
            if self.is_known:
                raise
            raise BudgetError(
                f"{error}. What PyTorch takes in a call is known from the first call on alone: give sample_batch= (what the model is "
                "called with), so that what is named here is enough for it"
            ) from error

    @property
    def alike(self) -> dict[str, Any]:
        """Returns the values that must be the same on all ranks, beside those that engines compare."""
        o = self.options
        return {
            "reproducible": o.reproducible,  # comes first: others are compared where it is set
            "the optimizer": self.settings,
            "state": o.state,
            "master": o.master,
            "seed": o.seed,
            "stage": o.stage,
            "clip_value": self.clip_value,
            **(computing() if o.reproducible else {}),
        }


def prepare(
    model: torch.nn.Module,
    optimizer: Optional[Settings],
    *,
    memory: Size,
    reserve: Optional[Size] = None,
    sample_batch: Any = None,
    param_groups: Optional[Iterable[Any]] = None,
    units: Any = None,
    threads: int = 0,
    held_units: int = 3,
    prefetch: int = 0,
    clip_value: Optional[float] = None,
    reproducible: bool = False,
    accumulate: int = 0,
    disk: Any = None,
    device_memory: Optional[Size] = None,
    device: Any = None,
    together: Together,
    cut: Optional[Cut] = None,
    **others: Any,
) -> Prepared:
    """The arguments are wrap()'s; others: those that Options has, too. cut: only this stage's part of the model is wrapped. Takes no
    memory, and leaves the model as it is.
    Raises InvalidArgumentError for what cannot be wrapped so, and StateError for a wrapped model."""
    check_model(model)
    check_optimizer(optimizer, others.get("update_in_backward", False), param_groups, clip_value)
    if reproducible:
        check_reproducible(model)
    settings, roles = roles_of(model, AdamW() if optimizer is None else optimizer, param_groups or ())
    for keys in () if cut is None else roles.keys:
        keys.pop("param_names", None)  # those of all stages
    several = together.ranks is not None or together.planned is not None or cut is not None
    gpu = gpu_of(model, device_memory, device, several)
    by_calls = gpu is not None
    named = named_units(units)
    of_stages = [find_units(model, named, by_calls)] if cut is None else cut.groups(named, by_calls)
    if gpu is not None:
        gpu.give_back()
    all_units = [units_of(of_stage, roles, optimizer is not None) for of_stage in of_stages]
    own = [0] if cut is None else cut.own
    groups = [group for number in own for group in of_stages[number]]
    declared = [unit for number in own for unit in all_units[number]]
    held = held_at_least(model, groups) if gpu is None else held_by_calls(model, groups)
    given_back = sum(map(bytes_in_memory, of_stages))
    of_gpu = 0 if gpu is None else size_of(device_memory or 0, "device_memory")
    reserves, estimated = reserves_of(model, reserve, sample_batch, optimizer is not None, gpu, of_gpu)
    choices = [{"reserved": each} if gpu is None else {"reserved": HOST, "device_reserved": each + gpu.beside} for each in reserves]
    budget = size_of(memory, "memory")
    options = Options(
        memory=budget,
        optimizer=settings,
        disk=together.folders(disk),
        threads=together.threads(threads),
        held_units=max(whole(held_units, "held_units"), held),
        prefetch=prefetch,
        given_back=given_back,
        serve_touches=gpu is None,
        sgemm=sgemm() if isinstance(optimizer, Muon) else None,
        team=team(),
        ranks=together.ranks,
        planned=together.planned,
        reproducible=bool(reproducible),
        micro_batches=whole(accumulate, "accumulate"),
        device_memory=of_gpu,
        device=None if gpu is None else gpu.index,
        sections=None if cut is None else Sections(cut.ranks, tuple(itertools.chain(*all_units)), tuple(map(len, all_units))),
        **others,
    )
    options = _fitting(declared, options, choices)
    train, stated = optimizer is not None, reserve is not None
    return Prepared(
        groups, declared, settings, roles, options, budget, size_of(options.reserved, "reserve"), train, estimated, stated,
        clip_value, gpu,
    )  # fmt: skip


def _fitting(units: Sequence[Unit], options: Options, choices: Sequence[Mapping[str, int]]) -> Options:
    """The options with the first of these reserves for which there is a plan, else with the last."""
    for choice in choices[:-1]:
        with contextlib.suppress(BudgetError):
            made = dataclasses.replace(options, **choice)  # type: ignore[arg-type]
            plan(units, made)
            return made
    return dataclasses.replace(options, **choices[-1])  # type: ignore[arg-type]


# ---- parameter groups, and the parameters that Muon leaves to AdamW ----


def roles_of(model: torch.nn.Module, optimizer: Settings, param_groups: Iterable[Any]) -> tuple[list[Settings], Roles]:
    """The settings of each group, and the parameters' roles. Groups are those that are given, in their order, and then one of all
    other parameters, where any of these is trained or no group is given."""
    roles, parameters = Roles(), dict(model.named_parameters())
    known = {id(p): p for p in parameters.values()}
    if isinstance(optimizer, Muon):
        roles.by_elements = _tables(model)
    groups, names = _dicts(param_groups), {}
    for number, given in enumerate(groups):
        for key, name in _members(model, known, given["params"]):
            if key in roles.group:
                raise InvalidArgumentError("a parameter is in two parameter groups; leave it in one")
            roles.group[key] = number
            if name is not None:
                names[key] = name
            if "use_muon" in given:
                _choose(optimizer, roles, known[key], given["use_muon"])
    others = [key for key in known if key not in roles.group]
    if not groups or any(known[key].requires_grad for key in others):
        groups.append({"params": []})
        roles.group.update(dict.fromkeys(others, len(groups) - 1))
    settings = [settings_of_group(given, optimizer) for given in groups]
    roles.keys = [{name: value for name, value in given.items() if name != "params"} for given in groups]
    if vars(optimizer).get("adamw_lr") is not None:
        _split(settings, roles, known, vars(optimizer)["adamw_lr"])
    first = {id(p): name for name, p in parameters.items()}
    for number, keys in enumerate(roles.keys):
        members = [key for key, group in roles.group.items() if group == number]
        roles.members.append([first[key] for key in members])
        if names:
            keys["param_names"] = [names.get(key, first[key]) for key in members]
    return settings, roles


def _dicts(param_groups: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Parameter groups as torch.optim takes them: dicts, or the parameters of one group, with their names or without."""
    given = list(param_groups)
    if given and all(isinstance(each, (torch.Tensor, tuple)) for each in given):
        given = [{"params": given}]
    for group in given:
        if not isinstance(group, Mapping) or "params" not in group:
            raise InvalidArgumentError(
                f"a parameter group is {group!r:.80}; a dict is needed, with 'params': parameters or their names"
            )
    return given


def settings_of_group(group: Mapping[str, Any], made_with: Settings) -> Settings:
    """The settings that a group states, which may be lists and tensors, as in torch.optim; its other keys are the user's own. Raises
    InvalidArgumentError where one is not valid, cannot change, or is a setting that this optimizer does not have."""
    had = vars(made_with)
    for name, always in {**dict.fromkeys(_OF_OTHERS, False), **made_with.implied}.items():
        if name not in had and group.get(name) is not None and plain(group[name]) != always:
            raise InvalidArgumentError(
                f"{name} is {group[name]}, which the wrapped model's optimizer does not have: to {type(made_with).__name__} it is always "
                f"{always}; leave it out; what another optimizer saved is loaded by that one"
            )
    made: Settings = made_with.replaced(**{name: plain(value) for name, value in group.items() if name in had})
    for name in made_with.fixed:
        if getattr(made, name) != getattr(made_with, name):
            raise InvalidArgumentError(
                f"{name} is {getattr(made, name)}, and the model was wrapped with {getattr(made_with, name)}; it cannot "
                f"change. {made_with.may_change} can"
            )
    if made.has_momentum != made_with.has_momentum:
        raise InvalidArgumentError(
            f"the {made.name} optimizer is {'given' if made.has_momentum else 'left without'} momentum, and the model was "
            f"wrapped {'with' if made_with.has_momentum else 'without'}; its array is in the plan, or is not: wrap the model "
            "with the momentum that it begins with"
        )
    return made


def plain(value: Any) -> Any:
    """A setting as a number or a tuple, where it is a tensor with one element or a list."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(plain(each) for each in value) if isinstance(value, (list, tuple)) else value


def _members(
    model: torch.nn.Module, known: Mapping[int, torch.nn.Parameter], members: Any
) -> list[tuple[int, str | None]]:
    """The ids of a group's parameters, with the names that come with them, as from named_parameters()."""
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter has several
    found = []
    several = isinstance(members, Iterable) and not isinstance(members, (str, torch.Tensor))
    for member in members if several else [members]:
        name, given = member if isinstance(member, tuple) and len(member) == 2 else (None, member)
        p = names.get(given) if isinstance(given, str) else given
        if p is None or id(p) not in known:
            raise InvalidArgumentError(f"a parameter group has {member!r:.80}, which is no parameter of the model")
        found.append((id(p), name))
    return found


def _choose(optimizer: Settings, roles: Roles, p: torch.nn.Parameter, use_muon: bool) -> None:
    if not isinstance(optimizer, Muon):
        if use_muon:
            raise InvalidArgumentError(f"a parameter group has use_muon, and the optimizer is {optimizer}; give sluice.Muon()")
        return
    if use_muon and p.dim() != 2:
        raise InvalidArgumentError(
            f"a parameter of the shape {tuple(p.shape)} is in a group with use_muon, which is for matrices; give it a group "
            "without"
        )
    if use_muon:
        roles.by_elements.discard(id(p))
    else:
        roles.by_elements.add(id(p))


def _tables(model: torch.nn.Module) -> set[int]:
    """Embeddings, and the output head where the model names it: their rows stand for tokens."""
    modules: list[Any] = [m for m in model.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    if callable(head := getattr(model, "get_output_embeddings", None)):
        modules.append(head())
    return {id(m.weight) for m in modules if isinstance(getattr(m, "weight", None), torch.nn.Parameter)}


def _split(settings: list[Settings], roles: Roles, known: Mapping[int, torch.nn.Parameter], lr: float) -> None:
    """Gives AdamW's parameters this learning rate, unless their group states one. Where Muon's are in the same group, they get
    one of their own, after all others."""
    for number in range(len(settings)):
        settings[number] = settings[number].replaced(adamw_lr=None)
        members = [key for key, group in roles.group.items() if group == number]
        adamws = [key for key in members if known[key].dim() != 2 or key in roles.by_elements]
        if "lr" in roles.keys[number] or not adamws:
            continue
        if adamws == members:
            settings[number] = settings[number].replaced(lr=lr)
            continue
        roles.group.update(dict.fromkeys(adamws, len(settings)))
        settings.append(settings[number].replaced(lr=lr))
        roles.keys.append(dict(roles.keys[number]))

# ---- PyTorch's own matrix products and threads, for the engine ----

_LIBRARY = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def sgemm() -> int:
    """The address of sgemm_ in PyTorch's library, for Options.sgemm: its products run on PyTorch's threads. Raises
    NotFoundError where PyTorch was built without it."""
    try:
        return _address("sgemm_")
    except (OSError, AttributeError) as error:
        raise NotFoundError(
            f"Muon's products are made by PyTorch's sgemm_, and this one ({torch.__version__}) has none in '{_LIBRARY}' "
            f"({error}); use a PyTorch with MKL or OpenBLAS, or another optimizer"
        ) from error


def team() -> Optional[int]:
    """The address of GOMP_parallel in PyTorch's OpenMP, for Options.team: the engine's loops run on PyTorch's threads.
    None where PyTorch has no such OpenMP."""
    try:
        return _address("GOMP_parallel")
    except (OSError, AttributeError):
        return None


def _address(name: str) -> int:
    """The address of a function in PyTorch's library, or in one that it uses."""
    found = ctypes.cast(getattr(ctypes.CDLL(str(_LIBRARY)), name), ctypes.c_void_p).value
    assert found is not None
    return found
