"""The optimizers as sets of settings, whose names, ranges and defaults come from the library."""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from . import _abi
from ._handle import call, text_of
from .errors import InvalidArgumentError, unexpected

_NEEDED = {"number": "a number", "whole": "a whole number", "switch": "True or False", "choice": "a text"}


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
    """The settings of each optimizer, as sluice_optimizer_settings() gives them."""
    return dict(json.loads(text_of("sluice_optimizer_settings")))


@functools.cache
def _keywords(optimizer: str) -> dict[str, list[dict[str, Any]]]:
    """The table's settings by keyword: one setting for each keyword, or two for a pair, whose names are betas[0] and
    betas[1]."""
    found: dict[str, list[dict[str, Any]]] = {}
    for setting in table()[optimizer]:
        found.setdefault(setting["python"].partition("[")[0], []).append(setting)
    return found


class _FromTable(type):
    """Gives an optimizer's class a signature and a help text with the settings of the table."""

    name: str

    @property
    def __signature__(cls) -> inspect.Signature:
        return _signature(cls)

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        lines = [cls.__dict__.get("__doc__") or ""]
        for keyword, parts in _keywords(cls.name).items() if cls is not Optimizer else ():
            texts = [f"{part['help']} ({part['source']}; {part['range']})" for part in parts]
            lines.append(f"    {keyword}: {'; '.join(texts)}.")
        return "\n".join(lines)


@functools.cache
def _signature(cls: Any) -> inspect.Signature:
    if cls is Optimizer:
        return inspect.Signature()
    defaults = dict(cls._own)
    for keyword, parts in _keywords(cls.name).items():
        values = tuple(part["default"] for part in parts)
        defaults[keyword] = values if "[" in parts[0]["python"] else values[0]
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] + [inspect.Parameter.KEYWORD_ONLY] * len(defaults)
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=value) for kind, (name, value) in zip(kinds, defaults.items())]
    )


class Optimizer(metaclass=_FromTable):
    """The base class of all optimizers. Settings named in `of_step` may change from step to step, and differ between
    groups. The others are fixed when an engine is made, and so is whether there is momentum."""

    name: ClassVar[str]
    whole_arrays: ClassVar[tuple[str, ...]] = ()  # arrays of state that belong to a parameter as a whole, in f32
    _implied: ClassVar[Mapping[str, Any]] = {}
    _own: ClassVar[Mapping[str, Any]]  # keywords in addition to the library's, with their defaults; "lr" is the first

    def __init__(self, *lr: Any, **settings: Any) -> None:
        signature = type(self).__signature__
        for name in settings.keys() - signature.parameters.keys():
            raise unexpected(type(self).__name__, name, signature.parameters)
        bound = signature.bind(*lr, **settings)
        bound.apply_defaults()
        self._take(bound.arguments)
        self._check()

    def _take(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update({name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def _check(self) -> None:
        self._check_rates("lr", "weight_decay")
        given = self.for_c()
        call("sluice_optimizer_check", self.name.encode(), given, len(given))

    def _check_rates(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 <= _float(value) < math.inf):
                raise InvalidArgumentError(f"{name} is {value!r}; a number of at least 0 is needed")

    def replaced(self, **settings: Any) -> Any:
        """Returns the same optimizer with other values of some settings."""
        return type(self)(**{**self.__dict__, **settings})

    def for_c(self, by_step: bool = False) -> ctypes.Array[_abi.Setting]:
        """Returns the settings as C structs; by_step: only those that may change from step to step."""
        made = []
        for keyword, parts in _keywords(self.name).items():
            for part, value in zip(parts, self._parts(keyword, parts), strict=True):
                if part["by_step"] or not by_step:
                    made.append(_setting(keyword, part, value))
        return (_abi.Setting * len(made))(*made)

    def _parts(self, keyword: str, parts: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        value = getattr(self, keyword)
        if "[" not in parts[0]["python"]:
            return [value]
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise InvalidArgumentError(f"{keyword} are {value!r}; {len(parts)} numbers are needed")
        return value

    @property
    def rates(self) -> tuple[float, float]:
        """`lr` and `weight_decay`."""
        given: Any = self
        return given.lr, given.weight_decay

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer keeps an array for momentum."""
        return all(getattr(self, part["python"]) > 0 for part in table()[self.name] if part["needs_array"])

    @property
    def implied(self) -> Mapping[str, Any]:
        """The further settings that groups of the same optimizer of torch.optim, or of transformers, state, with the values that hold
        here."""
        return self._implied

    def shape_of_state(self, array: str, shape: tuple[int, ...], by_elements: bool) -> tuple[int, ...] | None:
        """The shape of one of Engine.state_arrays() for a parameter of this shape; None: it has no such array."""
        return shape

    def same_but_for_a_step(self, other: Optimizer) -> bool:
        """Whether the two differ only in settings that may change from step to step."""
        if type(self) is not type(other) or self.has_momentum != other.has_momentum:
            return False
        return all(getattr(self, name) == getattr(other, name) for name in self.fixed)

    @property
    def of_step(self) -> tuple[str, ...]:
        """The names of the settings that may change from step to step."""
        keywords = _keywords(self.name).items()
        return ("lr", "weight_decay", *(name for name, parts in keywords if all(part["by_step"] for part in parts)))

    @property
    def fixed(self) -> list[str]:
        """The names of the other settings."""
        return [name for name in self.__dict__ if name not in self.of_step]

    @property
    def may_change(self) -> str:
        """`of_step` as text."""
        return " and ".join((", ".join(self.of_step[:-1]), self.of_step[-1]))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} of {self} cannot be set; make another optimizer with replaced()")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _setting(keyword: str, part: Mapping[str, Any], value: Any) -> _abi.Setting:
    """Returns a setting as a C struct. Its type is checked here, since C has one type for all settings; the library
    checks its range."""
    kind = part["type"]
    kinds = {"switch": bool, "choice": str, "whole": numbers.Integral}
    if not isinstance(value, kinds.get(kind, numbers.Real)) or (isinstance(value, bool) and kind != "switch"):
        raise InvalidArgumentError(f"{keyword} is {value!r}; {_NEEDED[kind]} is needed")
    if isinstance(value, str):  # no choice contains a ?, so the library also refuses text that C cannot represent
        return _abi.Setting(part["python"].encode(), 0.0, value.encode(errors="replace").replace(b"\0", b"?"))
    return _abi.Setting(part["python"].encode(), _float(value), None)


class AdamW(Optimizer):
    """AdamW as torch.optim writes it: the weight decay goes into the parameter."""

    name = "adamw"
    _implied = {"decoupled_weight_decay": True}
    _own = {"lr": 1e-3, "weight_decay": 1e-2}


class Adam(AdamW):
    """Adam as torch.optim writes it: the weight decay goes into the gradient."""

    name = "adam"
    _implied = {"decoupled_weight_decay": False}
    _own = {"lr": 1e-3, "weight_decay": 0.0}


class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): one array of state, and steps of the size `lr`."""

    name = "lion"
    _own = {"lr": 1e-4, "weight_decay": 0.0}


class SGD(Optimizer):
    """SGD as torch.optim writes it, with dampening 0: one array of state, or none without momentum."""

    name = "sgd"
    _implied = {"dampening": 0}
    _own = {"lr": 1e-3, "weight_decay": 0.0}


class Adafactor(Optimizer):
    """Adafactor (Shazeer, Stern 2018) as transformers writes it, with beta2 = 1 - t^-0.8: a matrix's second moment is
    kept by rows and columns. `lr` is the learning rate: with `scale_parameter` a share of the parameter's root mean
    square, with `relative_step` a factor of min(0.01, 1 / sqrt(t)); None: 1e-3, or 1 with `relative_step`. `beta1` above
    0 adds momentum, an array of state."""

    name = "adafactor"
    whole_arrays = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
    _implied = {"decay_rate": -0.8, "warmup_init": False}
    _own = {"lr": None, "weight_decay": 0.0}

    def _take(self, values: Mapping[str, Any]) -> None:
        lr, beta1 = values["lr"], values["beta1"]
        lr = (1.0 if values["relative_step"] else 1e-3) if lr is None else lr
        super()._take({**values, "lr": lr, "beta1": 0.0 if beta1 is None else beta1})

    @property
    def implied(self) -> Mapping[str, Any]:
        """See Optimizer: transformers has None where there is no momentum."""
        return self._implied if self.has_momentum else {**self._implied, "beta1": None}

    def shape_of_state(self, array: str, shape: tuple[int, ...], by_elements: bool) -> tuple[int, ...] | None:
        """See Optimizer: matrices have sums of rows and columns, vectors an array of elements."""
        matrix = len(shape) >= 2
        if array == "exp_avg_sq_row":
            return shape[:-1] if matrix else None
        if array == "exp_avg_sq_col":
            return (*shape[:-2], shape[-1]) if matrix else None
        return None if array == "exp_avg_sq" and matrix else shape


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) as torch.optim writes it, with the iteration in float32, for parameters of two dimensions.
    AdamW updates all others, and those with `by_elements` (embeddings, the head), with `adamw_betas` and `adamw_eps`.
    `adjust_lr_fn`: "original", or "match_rms_adamw", with which learning rates are as for AdamW. `adamw_lr`: AdamW's own
    learning rate, where sluice.torch.wrap() makes the groups; None: `lr`."""

    name = "muon"
    _implied = {"ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5}
    _own = {"lr": 1e-3, "weight_decay": 0.1, "adamw_lr": None}

    def _take(self, values: Mapping[str, Any]) -> None:
        rule = values["adjust_lr_fn"]  # torch.optim has None for "original"
        super()._take({**values, "adjust_lr_fn": "original" if rule is None else rule})

    def _check(self) -> None:
        super()._check()
        if self.__dict__["adamw_lr"] is not None:
            self._check_rates("adamw_lr")

    def shape_of_state(self, array: str, shape: tuple[int, ...], by_elements: bool) -> tuple[int, ...] | None:
        """See Optimizer: matrices have momentum, and the rest AdamW's averages."""
        if array == "master":
            return shape
        matrix = len(shape) == 2 and not by_elements
        return shape if matrix == (array == "momentum_buffer") else None
