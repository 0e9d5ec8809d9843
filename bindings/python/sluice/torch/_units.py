"""Which parameters of a model are fetched together: the units, found by the model's own structure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch

from ..errors import InvalidArgumentError
from ..model import Parameter, Unit

_SMALLEST = 4 << 20  # bytes: below it, neighbours are fetched together
_LARGEST = 256 << 20  # bytes: a repeated block above it (one of many experts) is cut along its modules

# Elements. A parameter above it spans several units, each with so many of it: its gradient then passes in pieces.
_LARGEST_PARAMETER = 64 << 20
_SPAN = 32 << 20

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

_Named = tuple[str, torch.nn.Parameter]


@dataclasses.dataclass
class Group:
    """Parameters of one unit, of one type: all trainable, or all frozen; or a span (first element, elements) of a single
    one."""

    name: str
    parameters: list[_Named]
    span: Optional[tuple[int, int]] = None

    @property
    def bytes(self) -> int:
        """The bytes of all its parameters."""
        return sum(_bytes(p) for _, p in self.parameters)

    @property
    def ends_parameters(self) -> bool:
        """Whether no other unit goes on with its last parameter."""
        return self.span is None or sum(self.span) == self.parameters[0][1].numel()


def _bytes(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


@dataclasses.dataclass
class Roles:
    """How the optimizer treats parameters, by id."""

    group: dict[int, int] = dataclasses.field(default_factory=dict)  # of settings; what is not here is in the first
    place: dict[int, int] = dataclasses.field(default_factory=dict)  # where in its group, in the order of torch.optim
    by_elements: set[int] = dataclasses.field(default_factory=set)  # an optimizer of matrices leaves them to AdamW


def units_of(groups: Sequence[Group], roles: Roles, train: bool) -> list[Unit]:
    """The groups as the engine takes them, as units. Without `train` all parameters are frozen."""
    return [
        Unit(
            group.name,
            [
                Parameter(
                    name,
                    tuple(p.shape),
                    roles.group.get(id(p), 0),
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


def find_units(model: torch.nn.Module, named: Optional[Mapping[str, Sequence[str]]] = None) -> list[Group]:
    """Repeated blocks are units; what is left over is grouped by size, in the order of the model. A tied parameter is of
    the unit that names it first; one without elements is of none, and stays where it is.

    named: the user's own units, which come first: a unit's name -> names of modules or parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    taken: set[int] = set()
    own = [] if named is None else _split(_named(model, named, names, taken))
    rest: list[Group] = []
    _collect(model, "", names, taken, rest)
    found = _named_apart(own + _span_large(_split(_merge_small(rest))))
    if not found:
        raise InvalidArgumentError(f"the model ({type(model).__name__}) has no parameters with elements")
    return found


def _named(
    model: torch.nn.Module, units: Mapping[str, Sequence[str]], names: Mapping[int, str], taken: set[int]
) -> list[Group]:
    if not isinstance(units, Mapping):
        raise InvalidArgumentError(
            f"units are {units!r:.80}; a dict is needed: the unit's name -> names of modules or parameters"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has several names
    found = []
    for unit, members in units.items():
        group = Group(unit, [])
        for member in _names_of(unit, members):
            inside = [(n, p) for n, p in parameters.items() if n == member or n.startswith(member + ".")]
            if not inside:
                raise InvalidArgumentError(f"the unit '{unit}' names '{member}', which is no module or parameter")
            group.parameters += _take(((names[id(p)], p) for _, p in inside), taken)
        if not group.parameters:
            raise InvalidArgumentError(f"the unit '{unit}' has no parameters that no other unit has; leave it out")
        found.append(group)
    return found


def _names_of(unit: str, members: Any) -> list[str]:
    if isinstance(members, str):
        return [members]
    names = list(members) if isinstance(members, Iterable) else [members]
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(
            f"the unit {unit!r} has {members!r:.80}; names of modules or parameters are needed, such as ['head.weight']"
        )
    return names


def _named_apart(groups: Sequence[Group]) -> list[Group]:
    """The same groups, each with a name of its own: the first of a name keeps it."""
    taken: set[str] = set()
    return [dataclasses.replace(group, name=_apart(group.name, taken)) for group in groups]


def _apart(name: str, taken: set[str]) -> str:
    """The name, or the next like it that is not taken; it is then."""
    counted = itertools.chain([name], (f"{name} ({count})" for count in itertools.count(2)))
    free = next(each for each in counted if each not in taken)
    taken.add(free)
    return free


def held_at_least(model: torch.nn.Module, groups: Sequence[Group]) -> int:
    """Units that are held together, because a parameter spans them or a module has parameters in them, and the one that is
    used with them."""
    units_of: dict[int, set[int]] = {}
    for unit, group in enumerate(groups):
        for _, p in group.parameters:
            units_of.setdefault(id(p), set()).add(unit)
    most = 1
    for module in model.modules():
        own = [units_of[id(p)] for p in module.parameters(recurse=False) if id(p) in units_of]
        most = max(most, len(set().union(*own)))
    return most if most == 1 else min(most + 1, len(groups))


def bytes_in_memory(groups: Sequence[Group]) -> int:
    """What the parameters take now, and will not any more when they are the engine's."""
    parameters = (p for group in groups if group.ends_parameters for _, p in group.parameters)
    return sum(_bytes(p) for p in parameters if not p.is_meta)


def _take(parameters: Iterable[_Named], taken: set[int]) -> list[_Named]:
    mine = {id(p): (name, p) for name, p in parameters if p.numel() and id(p) not in taken}
    taken.update(mine)
    return list(mine.values())


def _own(module: torch.nn.Module, recurse: bool, names: Mapping[int, str], taken: set[int]) -> list[_Named]:
    return _take(((names[id(p)], p) for p in module.parameters(recurse=recurse)), taken)


def _collect(module: torch.nn.Module, name: str, names: Mapping[int, str], taken: set[int], found: list[Group]) -> None:
    own = _own(module, False, names, taken)
    if own:
        found.append(Group(name or "model", own))
    blocks = _repeated(module)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        size = sum(_bytes(p) for p in child.parameters() if id(p) not in taken)
        if size == 0:
            continue
        if size <= (_LARGEST if child_name in blocks else _SMALLEST) or not has_children(child):
            found.append(Group(path, _own(child, True, names, taken)))
        else:
            _collect(child, path, names, taken, found)


def has_children(module: torch.nn.Module) -> bool:
    """Whether a module has others inside. (A module itself may be false, or have no truth: torch.compile()'s.)"""
    return next(module.children(), None) is not None


def _repeated(module: torch.nn.Module) -> set[str]:
    """The children that are blocks: of a kind that occurs more than once, with modules of their own."""
    kinds: dict[type, list[str]] = {}
    for name, child in module.named_children():
        if has_children(child):
            kinds.setdefault(type(child), []).append(name)
    return {name for same in kinds.values() if len(same) > 1 for name in same}


def _merge_small(groups: Sequence[Group]) -> list[Group]:
    merged: list[Group] = []
    for group in groups:
        if merged and merged[-1].bytes + group.bytes <= _SMALLEST:
            merged[-1] = Group(merged[-1].name, merged[-1].parameters + group.parameters)
        else:
            merged.append(Group(group.name, list(group.parameters)))
    return merged


def _span_large(groups: Sequence[Group]) -> list[Group]:
    """Cuts large parameters into spans. The rule is one of shapes, so that it is the same at any budget."""
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
    """Frozen parameters have no gradient and no optimizer state, so they get units of their own, and so does each type."""
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
            name = _apart(f"{group.name} ({', '.join(differs)})", taken) if differs else group.name
            split.append(Group(name, parameters))
    return split


def _type_of(name: str, parameter: torch.nn.Parameter) -> str:
    if parameter.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"'{name}' is of {parameter.dtype}; parameters in {', '.join(map(str, DTYPES))} can be wrapped"
        )
    return DTYPES[parameter.dtype]
