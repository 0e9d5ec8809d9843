"""Finds a model's units, the parameters that are fetched together, by the model's own structure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ..errors import InvalidArgumentError
from ..model import Parameter, Unit
from ._modes import is_by_compiler

_SMALLEST = 4 << 20  # bytes; smaller neighbours are one unit
_LARGEST = 256 << 20  # bytes; a larger repeated block (one of many experts) is cut along its modules

_LARGEST_PARAMETER = 64 << 20  # elements; a larger parameter spans several units, and its gradient passes span by span
_SPAN = 32 << 20  # elements of a span

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

_Named = tuple[str, torch.nn.Parameter]


@dataclasses.dataclass
class Group:
    """The parameters of one unit, of one type, all trainable or all frozen; or one span (first element, elements) of a
    single parameter."""

    name: str
    parameters: list[_Named]
    span: Optional[tuple[int, int]] = None
    within: str = ""  # the repeated block, or the module that is cut, whose parameters they are

    @property
    def bytes(self) -> int:
        """The bytes of all its parameters."""
        return sum(_bytes(p) for _, p in self.parameters)

    @property
    def ends_parameters(self) -> bool:
        """Whether its last parameter does not continue in another unit."""
        return self.span is None or sum(self.span) == self.parameters[0][1].numel()


def _bytes(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


@dataclasses.dataclass
class Roles:
    """How the optimizer treats parameters."""

    group: dict[int, int] = dataclasses.field(default_factory=dict)  # the number of a parameter's group, by its id
    members: list[list[str]] = dataclasses.field(default_factory=list)  # of each group, the parameters' names, in its order
    keys: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of each group, what was given with them
    by_elements: set[int] = dataclasses.field(default_factory=set)  # ids; see sluice.Parameter


def units_of(groups: Sequence[Group], roles: Roles, train: bool) -> list[Unit]:
    """Turns the groups into units for the engine. Without `train` all parameters are frozen."""
    return [
        Unit(
            group.name,
            [
                Parameter(
                    name,
                    tuple(p.shape),
                    roles.group.get(id(p), 0),  # a frozen one may be in no group
                    frozen=not (train and p.requires_grad),
                    span=group.span,
                    dtype=_type_of(name, p),
                    by_elements=id(p) in roles.by_elements,
                )
                for name, p in group.parameters
            ],
        )
        for group in groups
    ]


def find_units(
    model: torch.nn.Module,
    named: Optional[Mapping[str, list[str]]] = None,
    by_calls: bool = False,
    others: Iterable[int] = (),
) -> list[Group]:
    """Makes a unit of each repeated block, and of the other parameters by size, in the model's order. A tied parameter is in the unit
    that names it last, as the last stage of a pipeline has it; one without elements is in none, and stays where it is.

    named: the user's own units, which come first: a unit's name -> names of modules or parameters.
    by_calls: units come and go with calls of modules, as on a GPU: no unit has parameters of several blocks, and none a span of one.
    others: the ids of parameters that are in none of these units."""
    names = {id(p): name for name, p in model.named_parameters()}
    taken: set[int] = set(others)
    own = [] if named is None else _split(_named(model, named, names, taken))
    rest: list[Group] = []
    last = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    _Collected(names, last, taken, rest).add(model, "")
    apart = _split(_merge_small(rest, by_calls))
    found = own + (apart if by_calls else _span_large(apart))
    if not found:
        raise InvalidArgumentError(f"the model ({type(model).__name__}) has no parameters with elements")
    used: set[str] = set()
    return [dataclasses.replace(group, name=name_apart(group.name, used)) for group in found]


def _named(
    model: torch.nn.Module, units: Mapping[str, list[str]], names: Mapping[int, str], taken: set[int]
) -> list[Group]:
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter has several names
    found = []
    for unit, members in units.items():
        group, elements = Group(unit, []), 0
        for member in members:
            inside = [(n, p) for n, p in parameters.items() if n == member or n.startswith(member + ".")]
            if not inside:
                raise InvalidArgumentError(f"the unit '{unit}' names '{member}', which is no module or parameter")
            elements += sum(p.numel() for _, p in inside)
            group.parameters += _take(((names[id(p)], p) for _, p in inside), taken)
        if not group.parameters and elements == 0:
            raise InvalidArgumentError(f"the unit '{unit}' has parameters without elements alone, which are in no unit; leave it out")
        if not group.parameters:
            raise InvalidArgumentError(f"the unit '{unit}' has no parameters that no other unit has; leave it out")
        found.append(group)
    return found


def named_units(units: Any) -> Optional[dict[str, list[str]]]:
    """The units that the user names: a unit's name -> names of modules or parameters. Of a list each is a unit of its own."""
    if units is None:
        return None
    if isinstance(units, (list, tuple)) and all(isinstance(member, str) for member in units):
        units = {member: member for member in units}
    if not isinstance(units, Mapping):
        raise InvalidArgumentError(
            f"units are {units!r:.80}; names of modules are needed, such as ['layers.0', 'layers.1'], or a dict of the unit's name -> "
            "names of modules or parameters"
        )
    return {unit: _members(unit, members) for unit, members in units.items()}


def _members(unit: str, members: Any) -> list[str]:
    if isinstance(members, str):
        return [members]
    names = list(members) if isinstance(members, Iterable) else [members]
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(
            f"the unit {unit!r} has {members!r:.80}; names of modules or parameters are needed, such as ['head.weight']"
        )
    return names


def name_apart(name: str, taken: set[str]) -> str:
    """Takes the name, or else one like it that is not taken."""
    counted = itertools.chain([name], (f"{name} ({count})" for count in itertools.count(2)))
    free = next(each for each in counted if each not in taken)
    taken.add(free)
    return free


def held_at_least(model: torch.nn.Module, groups: Sequence[Group]) -> int:
    """The units that must be held at once: those that a parameter spans or that have a module's own parameters, and one
    more that is used with them."""
    units_of: dict[int, set[int]] = {}
    for unit, group in enumerate(groups):
        for _, p in group.parameters:
            units_of.setdefault(id(p), set()).add(unit)
    most = 1
    for module in model.modules():
        own = [units_of[id(p)] for p in module.parameters(recurse=False) if id(p) in units_of]
        most = max(most, len(set().union(*own)))
    return most if most == 1 else min(most + 1, len(groups))


def owners_of(model: torch.nn.Module, groups: Sequence[Group]) -> dict[torch.nn.Module, list[int]]:
    """The modules to which units belong: each unit to the smallest one that calls all modules which have its parameters. A block
    that is compiled is one, with all that is in it."""
    chains: dict[torch.nn.Module, list[list[torch.nn.Module]]] = {}  # from the model to the module, one for each of its names
    for path, module in model.named_modules(remove_duplicate=False):
        names = path.split(".") if path else []
        chains.setdefault(module, []).append([model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)])
    having: dict[int, list[torch.nn.Module]] = {}
    for module in chains:
        for p in module.parameters(recurse=False):
            having.setdefault(id(p), []).append(module)
    owners: dict[torch.nn.Module, list[int]] = {}
    for unit, group in enumerate(groups):
        of_unit = [chain for _, p in group.parameters for module in having[id(p)] for chain in chains[module]]
        common = [module for module in of_unit[0] if all(module in chain for chain in of_unit)]
        owners.setdefault(_called(common), []).append(unit)
    return owners


def _called(chain: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The innermost of these modules, each within the one before, that is called by others."""
    for outer, module in zip(chain, chain[1:]):
        if is_by_compiler(outer) or calls_none(outer):
            return outer
    called = [module for module in chain if type(module).forward is not torch.nn.Module.forward]
    return called[-1] if called else chain[0]


def calls_none(module: torch.nn.Module) -> bool:
    """Whether a module uses the parameters of its children without calling them."""
    return isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer))


def owners_around(owners: Collection[torch.nn.Module]) -> dict[torch.nn.Module, list[torch.nn.Module]]:
    """By module to which units belong: those of the others that it is in."""
    around: dict[torch.nn.Module, list[torch.nn.Module]] = {module: [] for module in owners}
    for outer in owners:
        for module in outer.modules():
            if module is not outer and module in around:
                around[module].append(outer)
    return around


def held_by_calls(model: torch.nn.Module, groups: Sequence[Group]) -> int:
    """The most units that are there at once in calls within each other."""
    owners = owners_of(model, groups)
    around = owners_around(owners)
    return max((sum(len(owners[each]) for each in (module, *around[module])) for module in owners), default=1)


def bytes_in_memory(groups: Sequence[Group]) -> int:
    """The bytes of the host's memory that the parameters take now, and give back when the engine has them."""
    parameters = (p for group in groups if group.ends_parameters for _, p in group.parameters)
    return sum(_bytes(p) for p in parameters if p.device.type == "cpu")


def _take(parameters: Iterable[_Named], taken: set[int]) -> list[_Named]:
    mine = {id(p): (name, p) for name, p in parameters if p.numel() and id(p) not in taken}
    taken.update(mine)
    return list(mine.values())


class _Collected(NamedTuple):
    """The groups of a model's parameters, as they are found."""

    names: Mapping[int, str]  # of parameters, by their ids
    last: Mapping[int, torch.nn.Module]  # the module that names a parameter last
    taken: set[int]
    found: list[Group]

    def add(self, module: torch.nn.Module, name: str) -> None:
        own = self._take([module])
        if own:
            self.found.append(Group(name or "model", own, within=name))
        blocks = _repeated(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            size = sum(_bytes(p) for p in self._free(child.modules()).values())
            if size == 0:
                continue
            if size <= (_LARGEST if child_name in blocks else _SMALLEST) or not has_children(child):
                self.found.append(Group(path, self._take(child.modules()), within=path if child_name in blocks else name))
            else:
                self.add(child, path)

    def _free(self, modules: Iterable[torch.nn.Module]) -> dict[int, torch.nn.Parameter]:
        """Parameters of these modules that are not taken, and that no other module names after them."""
        named = ((module, p) for module in modules for p in module.parameters(recurse=False))
        return {id(p): p for module, p in named if id(p) not in self.taken and self.last[id(p)] is module}

    def _take(self, modules: Iterable[torch.nn.Module]) -> list[_Named]:
        return _take(((self.names[key], p) for key, p in self._free(modules).items()), self.taken)


def has_children(module: torch.nn.Module) -> bool:
    """Whether a module has children. (It cannot be tested itself: modules may be false, or have no truth value.)"""
    return next(module.children(), None) is not None


def _repeated(module: torch.nn.Module) -> set[str]:
    """The names of children that are blocks: their kind occurs more than once, and they have children."""
    kinds: dict[type, list[str]] = {}
    for name, child in module.named_children():
        if has_children(child):
            kinds.setdefault(type(child), []).append(name)
    return {name for same in kinds.values() if len(same) > 1 for name in same}


def _merge_small(groups: Sequence[Group], by_calls: bool) -> list[Group]:
    merged: list[Group] = []
    size = 0  # of the last one
    for group in groups:
        together = merged and (not by_calls or merged[-1].within == group.within)
        if together and size + group.bytes <= _SMALLEST:
            merged[-1].parameters.extend(group.parameters)
            size += group.bytes
        else:
            merged.append(dataclasses.replace(group, parameters=list(group.parameters)))
            size = group.bytes
    return merged


def _span_large(groups: Sequence[Group]) -> list[Group]:
    """Cuts large parameters into spans, by shapes alone, so that the units are the same at any budget."""
    cut = []
    for group in groups:
        large = [(name, p) for name, p in group.parameters if p.numel() > _LARGEST_PARAMETER]
        rest = [(name, p) for name, p in group.parameters if p.numel() <= _LARGEST_PARAMETER]
        for name, p in large:
            for first in range(0, p.numel(), _SPAN):
                cut.append(Group(f"{name}[{first}:]", [(name, p)], (first, min(_SPAN, p.numel() - first))))
        if rest:
            cut.append(Group(group.name, rest))
    return cut


def _split(groups: Sequence[Group]) -> list[Group]:
    """Splits groups, so that each has one type, and frozen parameters, without gradients and state, have their own."""
    split = []
    taken = {group.name for group in groups}
    for group in groups:
        kinds: dict[tuple[bool, torch.dtype], list[_Named]] = {}
        for name, p in sorted(group.parameters, key=lambda named: not named[1].requires_grad):
            kinds.setdefault((p.requires_grad, p.dtype), []).append((name, p))
        first = next(iter(kinds))
        for kind, parameters in kinds.items():
            differs = [] if kind[0] == first[0] else ["frozen"]
            differs += [] if kind[1] == first[1] else [_type_of(*parameters[0])]
            name = name_apart(f"{group.name} ({', '.join(differs)})", taken) if differs else group.name
            split.append(Group(name, parameters))
    return split


def _type_of(name: str, parameter: torch.nn.Parameter) -> str:
    if parameter.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"'{name}' is of {parameter.dtype}; parameters in {', '.join(map(str, DTYPES))} can be wrapped"
        )
    return DTYPES[parameter.dtype]
