"""The optimizers, each as a small set of settings."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, ClassVar

from .errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What all have. The settings named in `of_step` may change from step to step, and be other for each group; the rest
    is fixed when an engine is made, and so is whether there is momentum."""

    name: ClassVar[str]
    of_step: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    whole_arrays: ClassVar[tuple[str, ...]] = ()  # of state: of a parameter as a whole, and always f32

    @property
    def coefficients(self) -> dict[str, float]:
        """What it averages by: `beta1`, `beta2`, `epsilon`, `momentum`, of those what it has."""
        raise NotImplementedError

    @property
    def rates(self) -> tuple[float, float]:
        """`lr` and `weight_decay`."""
        given: Any = self
        return given.lr, given.weight_decay

    @property
    def has_momentum(self) -> bool:
        """Whether it keeps an array for it."""
        return True

    def shape_of_state(self, array: str, shape: tuple[int, ...], by_elements: bool) -> tuple[int, ...] | None:
        """Of one of Engine.state_arrays() for such a parameter; None: the parameter has no such array."""
        return shape

    def same_but_for_a_step(self, other: Optimizer) -> bool:
        """Whether they differ in no more than what may change from step to step."""
        if type(self) is not type(other) or self.has_momentum != other.has_momentum:
            return False
        return all(getattr(self, name) == getattr(other, name) for name in self.fixed)

    @property
    def fixed(self) -> list[str]:
        """The names of the settings that cannot change."""
        return [field.name for field in dataclasses.fields(self) if field.name not in self.of_step]

    @property
    def may_change(self) -> str:
        """The names of those that can, as text."""
        return " and ".join((", ".join(self.of_step[:-1]), self.of_step[-1]))

    def __post_init__(self) -> None:
        for name, value in zip(("lr", "weight_decay"), self.rates):
            if not (_is_positive(value) or value == 0):
                raise InvalidArgumentError(f"{name} is {value!r}; a number of at least 0 is needed")


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0 < float(value) < math.inf


def _is_share(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0 <= float(value) < 1


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}; True or False is needed")


def _is_pair(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and len(values) == 2


def _check_betas(betas: tuple[float, float], name: str = "betas") -> None:
    if not _is_pair(betas) or not all(_is_share(beta) for beta in betas):
        raise InvalidArgumentError(f"{name} are {betas}; two numbers of at least 0 and below 1 are needed")


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW as torch.optim writes it: the weight decay goes into the parameter."""

    name: ClassVar[str] = "adamw"
    of_step: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "betas", "eps")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self.betas)
        if not _is_positive(self.eps):
            raise InvalidArgumentError(f"eps is {self.eps}; a number above 0 is needed")

    @property
    def coefficients(self) -> dict[str, float]:
        return {"beta1": self.betas[0], "beta2": self.betas[1], "epsilon": self.eps}


@dataclasses.dataclass(frozen=True)
class Adam(AdamW):
    """Adam as torch.optim writes it: the weight decay goes into the gradient."""

    name: ClassVar[str] = "adam"
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): one array of state, and steps of the size `lr`."""

    name: ClassVar[str] = "lion"
    of_step: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "betas")
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self.betas)

    @property
    def coefficients(self) -> dict[str, float]:
        return {"beta1": self.betas[0], "beta2": self.betas[1]}


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """SGD as torch.optim writes it, with dampening 0: one array of state, or none without momentum."""

    name: ClassVar[str] = "sgd"
    of_step: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum")
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_share(self.momentum):
            raise InvalidArgumentError(f"momentum is {self.momentum}; a number of at least 0 and below 1 is needed")
        _check_switch("nesterov", self.nesterov)
        if self.nesterov and self.momentum == 0:
            raise InvalidArgumentError("nesterov is asked for without momentum; give a momentum above 0")

    @property
    def coefficients(self) -> dict[str, float]:
        return {"momentum": self.momentum}

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0


@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer, Stern 2018) as transformers writes it, with beta2 = 1 - t^-0.8: of matrices the second moment
    is kept by rows and columns. `lr` is the learning rate, with `scale_parameter` as a share of the parameter's root
    mean square; with `relative_step` a factor of min(0.01, 1 / sqrt(t)); None: 1e-3, or 1 with `relative_step`. `beta1`
    above 0 adds momentum: an array of state."""

    name: ClassVar[str] = "adafactor"
    of_step: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "beta1")
    whole_arrays: ClassVar[tuple[str, ...]] = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
    lr: float | None = None
    beta1: float = 0.0
    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    weight_decay: float = 0.0
    relative_step: bool = False
    scale_parameter: bool = True

    def __post_init__(self) -> None:
        for name in ("relative_step", "scale_parameter"):
            _check_switch(name, getattr(self, name))
        if self.lr is None:
            object.__setattr__(self, "lr", 1.0 if self.relative_step else 1e-3)
        super().__post_init__()
        if not _is_share(self.beta1):
            raise InvalidArgumentError(f"beta1 is {self.beta1}; a number of at least 0 and below 1 is needed")
        if not _is_pair(self.eps) or not all(_is_positive(eps) for eps in self.eps):
            raise InvalidArgumentError(f"eps is {self.eps}; two numbers above 0 are needed")
        if not _is_positive(self.clip_threshold):
            raise InvalidArgumentError(f"clip_threshold is {self.clip_threshold}; a number above 0 is needed")

    @property
    def coefficients(self) -> dict[str, float]:
        return {"beta1": self.beta1, "epsilon": self.eps[0]}

    @property
    def has_momentum(self) -> bool:
        return self.beta1 > 0

    def shape_of_state(self, array: str, shape: tuple[int, ...], by_elements: bool) -> tuple[int, ...] | None:
        """Sums of rows and columns of matrices, elements of vectors."""
        matrix = len(shape) >= 2
        if array == "exp_avg_sq_row":
            return shape[:-1] if matrix else None
        if array == "exp_avg_sq_col":
            return (*shape[:-2], shape[-1]) if matrix else None
        return None if array == "exp_avg_sq" and matrix else shape


@dataclasses.dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (Jordan et al. 2024) as torch.optim writes it, with the iteration in float32, for parameters of two dimensions;
    all others, and those that are updated by elements (embeddings, the head), are AdamW's, with `adamw_betas` and
    `adamw_eps`. `adjust_lr_fn`: "original", or "match_rms_adamw", with which learning rates are as AdamW's. `adamw_lr`: of
    what is AdamW's, where sluice.torch.wrap() makes the groups; None: `lr`."""

    name: ClassVar[str] = "muon"
    of_step: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum", "adamw_betas", "adamw_eps")
    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: str = "original"
    adamw_lr: float | None = None
    adamw_betas: tuple[float, float] = (0.9, 0.999)
    adamw_eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_share(self.momentum) or self.momentum == 0:
            raise InvalidArgumentError(f"momentum is {self.momentum}; a number above 0 and below 1 is needed")
        _check_switch("nesterov", self.nesterov)
        if self.adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise InvalidArgumentError(f"adjust_lr_fn is {self.adjust_lr_fn!r}; it may be original, match_rms_adamw")
        if self.adamw_lr is not None and not (_is_positive(self.adamw_lr) or self.adamw_lr == 0):
            raise InvalidArgumentError(f"adamw_lr is {self.adamw_lr}; a number of at least 0 is needed")
        _check_betas(self.adamw_betas, "adamw_betas")
        if not _is_positive(self.adamw_eps):
            raise InvalidArgumentError(f"adamw_eps is {self.adamw_eps}; a number above 0 is needed")

    @property
    def coefficients(self) -> dict[str, float]:
        beta1, beta2 = self.adamw_betas
        return {"beta1": beta1, "beta2": beta2, "epsilon": self.adamw_eps, "momentum": self.momentum}

    def shape_of_state(self, array: str, shape: tuple[int, ...], by_elements: bool) -> tuple[int, ...] | None:
        """Matrices have momentum, the rest has AdamW's averages."""
        if array == "master":
            return shape
        matrix = len(shape) == 2 and not by_elements
        return shape if matrix == (array == "momentum_buffer") else None
