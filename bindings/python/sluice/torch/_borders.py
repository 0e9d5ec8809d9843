"""Messages between the stages of a pipeline: values with tensors in them, and the gradients that come back."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from .._handle import of_thread
from ..errors import Error, InvalidArgumentError
from ..ranks import Message, Ranks
from ._gpu import CPU

_HEADER = 16384  # the bytes that say what a value is
_VALUES, _VALUES_OF, _GRADIENTS, _GRADIENTS_OF = (
    f"{what} that stages pass {way}"
    for way in ("on", "back")
    for what in ("the tensors", "the kinds of what is in the values")
)


class Kind(NamedTuple):
    """The kind of a tensor. Its elements lie side by side, as in a contiguous one, or in the order of other strides (channels_last)."""

    dtype: str
    shape: tuple[int, ...]
    gradient: bool  # whether it has a gradient
    strides: tuple[int, ...]
    on_gpu: bool  # whether it is on the GPU of the stage that has it; then it passes through registered memory of the host

    @staticmethod
    def of(tensor: torch.Tensor) -> Kind:
        shape = tuple(tensor.shape)
        strides = tensor.stride() if _is_dense(tensor) else torch.empty(shape, device="meta").stride()
        return Kind(str(tensor.dtype).removeprefix("torch."), shape, tensor.requires_grad, strides, tensor.device.type != "cpu")

    @staticmethod
    def told(dtype: str, shape: Sequence[int], gradient: bool, strides: Sequence[int], on_gpu: bool) -> Kind:
        """The kind again that was written as JSON."""
        return Kind(dtype, tuple(shape), gradient, tuple(strides), on_gpu)

    def empty(self) -> torch.Tensor:
        """Memory of the host for it."""
        dtype = getattr(torch, self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device="cpu", pin_memory=self.on_gpu)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape and type, in the host's memory, whose elements lie as this one's."""
        there = not self.on_gpu and tensor.stride() == self.strides and _is_dense(tensor)
        if there:
            return tensor
        with of_thread.waiting():  # for a GPU
            return self.empty().copy_(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor) if tensor.numel() else tensor.is_contiguous()


def described(value: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """A value as JSON, in which tensors are their numbers in the list, which is filled. device: where the stage computes."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device not in (device, CPU):
            there = "on the CPU" + ("" if device == CPU else f" or {device}, where this stage computes,")
            raise InvalidArgumentError(f"a tensor that is {value.layout} and on {value.device} passes between stages; dense ones {there} can")
        if not any(t is value for t in tensors):
            tensors.append(value)
        return {"tensor": next(number for number, t in enumerate(tensors) if t is value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [described(each, device, tensors) for each in value]}
    if type(value) is dict:
        return {"dict": [[described(key, device, tensors), described(each, device, tensors)] for key, each in value.items()]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InvalidArgumentError(
        f"a value of type {type(value).__name__} passes between stages; tensors, tuples, lists, dicts, None, numbers and texts can. Pass what is "
        "in a namedtuple, or in an object of another class, as a tuple or a dict"
    )


def restored(told: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value again."""
    if not isinstance(told, dict):
        return told
    ((kind, of),) = told.items()
    if kind == "tensor":
        return tensors[of]
    if kind == "dict":
        return {restored(key, tensors): restored(each, tensors) for key, each in of}
    parts = [restored(each, tensors) for each in of]
    return parts if kind == "list" else tuple(parts)


class _Received(torch.autograd.Function):
    """Gives a received tensor a place in the graph that ends with it, so that the next layer may also write to it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor], take: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.take = take
        return box.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.take(gradient)
        return None, None, None


_Begun = tuple[Optional[Message], torch.Tensor]  # a message, None where it has no bytes; and its memory


class Border:
    """The messages between this stage and a neighbour, in one step: values in one direction, gradients in the other one. Each ascend by
    items. kinds: of the tensors of each value, where they are known before; else they come with the first one. device: where this stage
    computes. place: tells a border from others between the same stages. most: of how many items messages in one direction may be under
    way. add_event: Engine.add_event()."""

    def __init__(
        self,
        ranks: Ranks,
        other: int,
        kinds: Optional[list[Kind]],
        device: torch.device,
        place: str = "",
        most: int = 1,
        add_event: Callable[..., None] = lambda *_: None,
    ) -> None:
        self._ranks, self._other, self.kinds, self._known, self._device = ranks, other, kinds, kinds is not None, device
        self._place, self._most, self._add_event = place, most, add_event
        self._received: dict[int, list[_Begun]] = {}  # by item: what was begun
        self._sent: list[tuple[int, _Begun]] = []  # with the item, which ascends
        # All that was begun and not awaited, by the message's id, with its name and when it began.
        self._open: dict[int, tuple[_Begun, str, int]] = {}

    # ---- values ----

    def send(self, item: int, value: Any) -> list[torch.Tensor]:
        """Begins to send a value. Returns its tensors."""
        tensors: list[torch.Tensor] = []
        told = described(value, self._device, tensors)
        kinds = [Kind.of(t) for t in tensors]
        self.kinds = kinds if self.kinds is None else self.kinds
        if kinds != self.kinds:
            raise InvalidArgumentError(
                f"this stage passes on {kinds} in micro-batch {item}, and {self.kinds} in another one of a batch of these shapes; cut the "
                "model where shapes and types depend on those of the batch alone (stages=...)"
            )
        header = json.dumps([told, kinds]).encode()
        if len(header) > _HEADER:
            raise InvalidArgumentError(
                f"a value that passes between stages takes {len(header)} bytes without its tensors, and {_HEADER} are the most"
            )
        self._send(item, _VALUES_OF, torch.frombuffer(bytearray(header.ljust(_HEADER)), dtype=torch.uint8))
        for t, kind in zip(tensors, kinds, strict=True):
            dense = kind.laid_out(t.detach())
            # A tensor that no operation has made, such as a buffer, may be written while it is under way.
            self._send(item, _VALUES, dense.clone() if t.grad_fn is None and not kind.on_gpu else dense)
        return tensors

    def begin_value(self, item: int) -> None:
        """Begins to receive a value."""
        self._received[item] = [self._receive(_VALUES_OF, torch.empty(_HEADER, dtype=torch.uint8, device="cpu"))]
        if self._known:
            self._received[item] += self._tensors(_VALUES, self.kinds or ())

    def value(self, item: int, take: Callable[[int, torch.Tensor], None]) -> Any:
        """Waits for a value. take: gets the gradient of the tensor with that number."""
        header, *begun = self._received.pop(item)
        told, given = json.loads(self._awaited(header).numpy().tobytes())
        self.kinds = [Kind.told(*kind) for kind in given]
        if not self._known:
            begun = self._tensors(_VALUES, self.kinds)
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        tensors = [
            _Received.apply(anchor, [t], functools.partial(take, number)) if kind.gradient else t
            for number, (t, kind) in enumerate(zip(self._came(begun, self.kinds), self.kinds, strict=True))
        ]
        return restored(told, tensors)

    # ---- gradients ----

    def begin_gradients(self, item: int) -> None:
        """Begins to receive a value's gradients, where their kinds are known."""
        if self._known:
            self._received[item] = self._gradients()

    def gradients(self, item: int) -> list[Optional[torch.Tensor]]:
        """Waits for the gradients of the tensors that have one; None for those that the other stage did not use."""
        there, *begun = self._received.pop(item) if self._known else self._gradients()
        used = self._awaited(there).tolist()
        tensors = self._came(begun, self._with_gradient())
        self.end_sent(item)  # the other stage has it
        return [t if is_used else None for t, is_used in zip(tensors, used, strict=True)]

    def send_gradients(self, item: int, came: Mapping[int, torch.Tensor]) -> None:
        """Begins to send the gradients of a value that was received, by the numbers of its tensors, when earlier ones are away."""
        self.limit_sent(item)
        wanted = [(number, kind) for number, kind in enumerate(self.kinds or ()) if kind.gradient]
        self._send(item, _GRADIENTS_OF, torch.tensor([number in came for number, _ in wanted], dtype=torch.uint8, device="cpu"))
        for number, kind in wanted:
            self._send(item, _GRADIENTS, kind.laid_out(came[number]) if number in came else kind.empty().zero_())

    def _gradients(self) -> list[_Begun]:
        wanted = self._with_gradient()
        there = torch.empty(len(wanted), dtype=torch.uint8, device="cpu")
        return [self._receive(_GRADIENTS_OF, there), *self._tensors(_GRADIENTS, wanted)]

    def _with_gradient(self) -> list[Kind]:
        return [kind for kind in self.kinds or () if kind.gradient]

    # ---- messages ----

    def _tensors(self, name: str, kinds: Sequence[Kind]) -> list[_Begun]:
        return [self._receive(name, kind.empty()) for kind in kinds]

    def _came(self, begun: Sequence[_Begun], kinds: Sequence[Kind]) -> list[torch.Tensor]:
        """Waits for tensors of these kinds, which are then where this stage has them."""
        came = [self._awaited(each) for each in begun]
        return [t.to(self._device, non_blocking=True) if kind.on_gpu else t for t, kind in zip(came, kinds, strict=True)]

    def _receive(self, name: str, into: torch.Tensor) -> _Begun:
        return self._begin(self._ranks.receive, name, into)

    def _send(self, item: int, name: str, tensor: torch.Tensor) -> None:
        self._sent.append((item, self._begin(self._ranks.send, name, tensor)))

    def _begin(self, begin: Callable[[int, str, int, int], Message], name: str, tensor: torch.Tensor) -> _Begun:
        if not tensor.numel():
            return None, tensor
        begun = begin(self._other, name + self._place, tensor.data_ptr(), tensor.numel() * tensor.element_size()), tensor
        self._open[id(begun[0])] = begun, name + self._place, time.monotonic_ns()
        return begun

    def _awaited(self, begun: _Begun) -> torch.Tensor:
        message, memory = begun
        if message is not None:
            _, name, begin = self._open.pop(id(message))
            waits = time.monotonic_ns()
            message.wait()
            self._add_event("rank wait", name, waits)
            self._add_event("message", name, begin, memory.nbytes)  # it may have come before it is awaited
        return memory

    def limit_sent(self, item: int) -> None:
        """Waits until no more is under way than may be, this item's messages among it."""
        self.end_sent(item - self._most)

    def end_sent(self, item: int) -> None:
        """Waits until what was sent up to this item is away."""
        while self._sent and self._sent[0][0] <= item:
            self._awaited(self._sent.pop(0)[1])

    def end(self) -> None:
        """Waits until all that was sent is away."""
        for _, begun in self._sent:
            self._awaited(begun)

    def drain(self) -> None:
        """Waits, after the error of a rank, until no message needs its memory."""
        for (message, _), *_ in self._open.values():
            with contextlib.suppress(Error):
                assert message is not None
                message.wait()
