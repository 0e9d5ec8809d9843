"""Estimates what PyTorch itself will allocate in a step, by running the model on fake tensors without memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import sys
import threading
import traceback
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..errors import Error, InvalidArgumentError, knows_its_keywords
from ..model import Size, size_of
from ._estimate_values import ON_VALUES, NumbersFromTensors, Values
from ._gpu import CPU, HOST, WORKSPACES, Gpu
from ._modes import mapped, parts_of, tensors_among
from ._split_backward import Left

_OPAQUE = (torch.Tensor, type, str, bytes, types.ModuleType, types.FunctionType, types.MethodType)
_CONTAINERS = (OrderedDict, dict, list, deque, set)
_FIXED = HOST  # code of libraries that is loaded in the first step, thread stacks, small objects
_RESERVES = (512 << 20, _FIXED)  # until the first call is estimated, the first that fits is planned with
_PARTS_OF_GPU = (2, 4, 8, 16)  # what PyTorch gets of a GPU's memory where nothing is known of it is one of so many parts, and what is free
_GROUPED = torch.ops.aten._grouped_mm.default
# Results of these keep memory of their first argument's size, which PyTorch's rules for fakes leave out.
_AS_LARGE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.col2im.default,
}
_DETACH = torch.ops.aten.detach.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_SHARE = 0.25  # of the peak, for what the allocator keeps between blocks and operators use inside
# The C library mostly gives a block of this size or more back to the system as soon as it is freed (mallopt(3), M_MMAP_THRESHOLD; not where
# the block lay in free memory of smaller ones), so that of such blocks less is allowed for.
_LARGE, _SHARE_OF_LARGE = 32 << 20, 0.125
# With the place of the argument that says whether it is a transposed one.
_CONVOLUTIONS = {torch.ops.aten.convolution.default: 6, torch.ops.aten.convolution_backward.default: 7}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes besides the parameters: the most that are alive at once, what is planned for on the CPU, and those that are alive between
    forward and backward. casts: those of parameters by autocast that backward needs, which the others leave out. left: those that a
    backward pass leaves for the gradients of weights."""

    peak: int
    reserve: int
    kept: int = 0
    casts: int = 0
    left: int = 0

    def with_casts(self) -> Estimate:
        """The same where autograd keeps the casts."""
        return Estimate(self.peak + self.casts, self.reserve + with_margin(self.casts), self.kept + self.casts, left=self.left)


# The stance of torch.compile(), and whether there are modes, are the process's: of two threads that set them by turns, one would put back
# the other's for ever.
_one_at_a_time = threading.RLock()


class _Alive(Values):
    """Adds up the memory of the tensors that are made while it is active, as long as they live."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__(fake)
        self.ignored: set[int] = set()  # storages of parameters
        self._seen: set[int] = set()
        self._casts: set[int] = set()  # the storages of parameters' casts
        self._needed_casts: set[int] = set()  # those that backward needs
        self.casts = 0  # their bytes
        self.current = self.peak = 0
        self._large = 0  # of the current bytes, those of large storages
        self.needed = 0  # the peak with the margin of the C library's allocator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _in_groups(*args, **(kwargs or {})) if func is _GROUPED else super().__torch_dispatch__(func, types, args, kwargs)
        if func is _LSTM:
            result = _with_workspace(result, args)
        for tensor in tensors_among(result) if func is not _DETACH else ():  # which is how arguments of the call are kept for backward
            self._note(tensor.untyped_storage(), args[0].nbytes if func in _AS_LARGE else 0)
        if (place := _CONVOLUTIONS.get(func)) is not None:
            # oneDNN has copies of all that it uses, in layouts of its own; of a transposed one, as seen, two.
            inside = sum(tensor.nbytes for tensor in (*tensors_among(args), *tensors_among(result)))
            self._need(2 * inside if args[place] else inside)
        if func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self.ignored:
            self._casts.add(id(result.untyped_storage()))
            torch.set_autocast_cache_enabled(False)  # which autocast that the model itself turns on has enabled again
        return result

    @contextlib.contextmanager
    def casts_made_again(self) -> Iterator[None]:
        """Inside of the `with`, neither autocast's cache nor backward keeps casts of parameters, as in a wrapped model without room for
        them."""
        with contextlib.ExitStack() as hooks:
            with contextlib.suppress(RuntimeError):  # they are not allowed
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
                hooks.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        if (key := id(tensor.untyped_storage())) in self._casts:
            if key not in self._needed_casts:
                self._needed_casts.add(key)
                self.casts += tensor.untyped_storage().nbytes()
            return tuple(tensor.shape), tensor.stride(), tensor.dtype
        return tensor if tensor.grad_fn is None else tensor.detach()

    def take_back(self, what: str) -> None:
        """Takes the tensors that hooks and other code outside of the model have kept from where these are, since they would meet those of
        the real run, which gives such code its own. Raises InvalidArgumentError where that cannot be done."""
        if self.current:
            torch.clear_autocast_cache()  # which outlives the model's own autocast within another one of the caller's
            gc.collect()
        if self.current:
            _take_from_holders([t for t in gc.get_objects() if type(t) is FakeTensor and t.fake_mode is self.fake])
        if self.current:
            raise InvalidArgumentError(
                f"to estimate this {what} Sluice has run the model on tensors without values, and code outside of it, such as a hook, keeps "
                f"{self.current} bytes of them where they cannot be taken back: make anew what it keeps them in, and state `reserve`, with "
                "which nothing is estimated"
            )

    def _note(self, storage: Any, least: int) -> None:
        key = id(storage)
        if key in self._seen or key in self.ignored:
            return
        self._seen.add(key)
        size = max(storage.nbytes(), least)
        self.current += size
        self._large += size if size >= _LARGE else 0
        self.peak = max(self.peak, self.current)
        self._need(0)
        weakref.finalize(storage, self._gone, key, size)

    def _need(self, inside: int) -> None:
        """Notes what is needed now, with the bytes that an operator uses inside."""
        large = self._large + int(self._large * _SHARE_OF_LARGE)
        self.needed = max(self.needed, with_margin(self.current - self._large) + large + inside)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._casts.discard(key)
        self._needed_casts.discard(key)
        self.current -= size
        self._large -= size if size >= _LARGE else 0


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    size, stride, dtype = kept
    return torch.empty_strided(size, stride, dtype=dtype)


def _in_groups(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """_grouped_mm for fakes, also in f32, which PyTorch's own rule for fakes refuses though the CPU takes it."""
    groups = [len(offs)] if a.dim() == b.dim() == 2 else [len(a)] if a.dim() == b.dim() else []
    return a.new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)


def _with_workspace(result: Any, args: Sequence[Any]) -> Any:
    """Returns the result of oneDNN's LSTM for fakes, with the workspace that it keeps for its backward pass, which PyTorch's own rule
    leaves empty: for each step, and one before, its gates, and the states of two layers and their gradients. Rows of states and gradients
    between layers are as wide as the input where that is wider."""
    given, output, size = args[0], result[0], args[0].element_size()
    hidden = output.shape[-1]
    wide, own, gates = _leading(max(given.shape[-1], hidden)), _leading(hidden), _leading(4 * hidden)
    of_row = 16 * wide + 16 * own + size * (2 * wide + own + gates)
    *others, workspace = result
    is_kept = args[-1]
    return (*others, workspace.new_empty((len(output) + 1) * output.shape[1] * of_row if is_kept else 0, dtype=torch.uint8))


def _leading(width: int) -> int:
    """How far apart oneDNN puts the rows of a matrix with this width, in elements."""
    aligned = -(-width // 16) * 16
    return aligned if aligned % 256 else aligned + 16


def kind_of(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
) -> tuple[Any, tuple[int, ...]]:
    """Returns the kind of this call, which calls with comparable estimates share, and its sizes."""
    kinds: list[Any] = []
    sizes: list[int] = []
    _add_kind((args, kwargs), kinds, sizes)
    return (id(module), module.training, train, *autocast_types(), tuple(kinds)), tuple(sizes)


def _add_kind(value: Any, kinds: list[Any], sizes: list[int]) -> None:
    if (parts := parts_of(value)) is not None:
        kinds.append((type(value), *(value if isinstance(value, Mapping) else [len(value)])))
        for part in parts:
            _add_kind(part, kinds, sizes)
    elif isinstance(value, torch.Tensor):
        kinds.append((value.dtype, value.dim(), value.requires_grad))
        sizes += _sizes_of(value)
    elif value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and value < 2):
        kinds.append(value)
    elif isinstance(value, int):
        kinds.append(int)
        sizes.append(value)
    else:
        held = [] if isinstance(value, float) else tensors_in([value])
        kinds.append((type(value), *((t.dtype, t.dim()) for t in held)))
        sizes += [size for t in held for size in _sizes_of(t)]


def _sizes_of(tensor: torch.Tensor) -> Sequence[int]:
    """The sizes of a tensor, or of all parts of a nested one, which has none of its own."""
    if tensor.is_nested and tensor.layout == torch.strided:
        return [size for part in tensor.unbind() for size in part.shape]
    return tensor.shape


def autocast_types() -> list[torch.dtype | None]:
    """The types of autocast that are in force; None: it is off."""
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]


def with_margin(alive: int) -> int:
    """The bytes to plan for where so many are alive at once, without those that are the same at any size."""
    return alive + int(alive * _SHARE)


def reserves_of(
    model: torch.nn.Module, stated: Size | None, batch: Any, train: bool, gpu: Gpu | None, of_gpu: int
) -> tuple[Sequence[int], int | None]:
    """The reserves that may be planned for PyTorch, the best first, and the estimated peak, or None. The plan for a GPU, of whose memory
    `of_gpu` bytes may be taken, does not change any more, so that it is a large part where nothing is known."""
    if stated is not None:
        return [size_of(stated, "reserve")], None
    if batch is None:
        return _RESERVES if gpu is None else [of_gpu // part for part in _PARTS_OF_GPU], None
    found = estimate(model, batch, train, CPU if gpu is None else gpu.device)
    return [found.reserve if gpu is None else reserve_for(found)], found.peak


def reserve_for(found: Estimate) -> int:
    """Returns the bytes of a GPU's memory that are planned for PyTorch for a call with this estimate."""
    return with_margin(found.peak) + WORKSPACES


@knows_its_keywords
def estimate(model: torch.nn.Module, batch: Any, train: bool, device: torch.device = CPU) -> Estimate:
    """Estimates a step on a batch: what the model is called with, a dict of keyword arguments, a tuple of arguments, or one argument, of
    whose tensors shapes and types count, and values where the model depends on them. Where the output has no `loss`, a cross entropy of
    the outputs is allowed for, in f32 and of a shifted copy."""
    kwargs = batch if isinstance(batch, Mapping) else {}
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    return estimate_call(model, model, args, kwargs, train, device, "sample_batch", "model(sample_batch)")


def _refusal(
    model: torch.nn.Module, called: torch.nn.Module, error: Exception, so_far: int, what: str, call: str
) -> InvalidArgumentError:
    why = "it was run without memory"
    if isinstance(error, ON_VALUES):
        why = "its operations depend on values"
    elif _is_of_bodies(error):
        why = "an operator with bodies (torch.cond, while_loop, scan) was run without memory"
    begin = max(_RESERVES[0], with_margin(so_far) + _FIXED) >> 20
    return InvalidArgumentError(
        f"what the model takes for this {what} cannot be estimated: in {_module_of(model, called, error)} {why}, and "
        f"{type(error).__name__} came of it ({error}). If {call} runs by itself, state what PyTorch takes instead: begin with "
        f"wrap(reserve='{begin}MiB'); a warning then says by how much the first step took more"
    )


def _lacks_values(error: BaseException) -> bool:
    """Whether PyTorch has raised this, or what the model raised it after: it tells by RuntimeErrors of what it cannot do without values."""
    return isinstance(error, RuntimeError) or (error.__context__ is not None and _lacks_values(error.__context__))


def _is_of_bodies(error: BaseException) -> bool:
    """Whether it comes from one of PyTorch's operators with bodies, whose own code runs the bodies again for gradients."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1].startswith("torch.") and any(name.startswith("torch._higher_order_ops.") for name in modules)


def _module_of(model: torch.nn.Module, called: torch.nn.Module, error: Exception) -> str:
    """The innermost module of the model that was called when the error was raised, for messages."""
    names = {id(module): name for name, module in model.named_modules()}
    found = called
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        found = module if isinstance(module, torch.nn.Module) and id(module) in names else found
    name = names.get(id(found), "")
    return f"'{name}' ({type(found).__name__})" if name else type(found).__name__


def estimate_call(
    model: torch.nn.Module,
    called: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
    device: torch.device = CPU,
    what: str = "call",
    call_of_it: str = "it",
    left: Left | None = None,
) -> Estimate:
    """Estimates a call of the model, or of a module of it, under the modes that are in force. Model, arguments and states
    of random numbers stay as they are. device: where what is on the meta device will be, and on a GPU all else. Raises
    what the model itself raises, and InvalidArgumentError where there can be no estimate; what, call_of_it: the call, for its message.
    left: where its backward pass leaves gradients of weights, if it does."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    alive = _Alive(fake)
    try:
        with _one_at_a_time, _random_states_kept(device), _without_nested_tensors():
            call = mapped([list(args), dict(kwargs)], lambda tensor: fake_of(alive, tensor, train, device, is_argument=True))
            with faked(model, alive, train, call, device) as tensors:
                _give_up_gradients(tensors)
                alive.ignored.update(id(tensor.untyped_storage()) for tensor in tensors)
                # Anomaly mode looks at the values of gradients, which fakes have none of; the real run keeps it.
                unchecked, uncompiled = torch.autograd.set_detect_anomaly(False), torch.compiler.set_stance("force_eager")
                with uncompiled, unchecked, fake, alive, NumbersFromTensors(), torch.set_grad_enabled(train), alive.casts_made_again():
                    kept = _step(called, call[0], call[1], train, alive)
                    bytes_left = _finish(left, alive)
            del call, tensors
            alive.take_back(what)
    except Error:
        raise
    except Exception as error:
        if not (_lacks_values(error) or _is_of_bodies(error)):
            if sys.version_info >= (3, 11):
                error.add_note(f"Sluice had run the model without values, to estimate this {what}; state `reserve` to leave that out.")
            raise
        raise _refusal(model, called, error, alive.peak, what, call_of_it) from error
    return Estimate(alive.peak, alive.needed + _FIXED, kept, alive.casts, bytes_left)


@contextlib.contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Restores the states of random numbers, so that layers that chance leaves out are the same in the real run. device: that computes,
    which has one of its own where it is a GPU."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


@contextlib.contextmanager
def _without_nested_tensors() -> Iterator[None]:
    """In evaluation torch.nn's encoders leave out what is padded, by tensors that have no fakes; with it they take no less."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _step(called: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], train: bool, alive: _Alive) -> int:
    output = called(*args, **kwargs)
    kept = alive.current
    loss = _loss_of(output) if train else None
    if loss is not None and loss.requires_grad:
        loss.backward()
    return kept


def _finish(left: Left | None, alive: _Alive) -> int:
    """Computes the gradients that a backward pass has left, and returns the bytes of what it has left."""
    before = alive.current
    if left is not None:
        left.finish()
    return before - alive.current


def _give_up_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """In a wrapped model the engine has them."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def _loss_of(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [_cross_entropy_of(t) for t in tensors_among(output) if t.requires_grad]
    return torch.stack(parts).sum() if parts else None


def _cross_entropy_of(output: torch.Tensor) -> torch.Tensor:
    values = output.real if output.is_complex() else output
    shifted = values.clone(memory_format=torch.contiguous_format).float()
    rows = shifted.reshape(-1, shifted.shape[-1] if shifted.dim() > 0 else 1)
    return torch.nn.functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))


# ---- fake tensors in place of a model's own ----


@contextlib.contextmanager
def faked(
    model: torch.nn.Module, values: Values, train: bool, call: Sequence[Any] = (), device: torch.device = CPU
) -> Iterator[list[torch.Tensor]]:
    """Inside of the `with`, fake tensors stand in for the model's parameters and buffers, wherever its modules hold them,
    for tensors of objects among its arguments (caches), and for results that the model has kept, which are yielded. Afterwards
    modules, and the lists, dicts, sets and objects that they hold, have what they had, whatever forward and backward put there.
    device: where those on the meta device will be; a GPU: where all will be."""
    with values.fake:
        made = {id(p): _like(p, device).requires_grad_(p.requires_grad and train) for p in model.parameters()}
        made |= {id(b): values.give(_like(b, device), b) for b in model.buffers() if id(b) not in made}
    gradients = [(p, p.grad) for p in model.parameters()]
    held = [(holder, _contents(holder)) for holder in _holders(call)]
    made |= {id(t): fake_of(values, t, train, device) for t in _plain_tensors(contents for _, contents in held)}
    known = {id(holder) for holder, _ in held}
    held += [(holder, _contents(holder)) for holder in _holders([model]) if id(holder) not in known]
    of_graphs = [t for t in _plain_tensors(contents for _, contents in held) if t.grad_fn is not None and id(t) not in made]
    made |= {id(t): fake_of(values, t, train, device) for t in of_graphs}
    try:
        for holder, contents in held:
            swapped = _swapped(contents, made)
            if not _same(swapped, contents):
                _fill(holder, swapped)
        yield list(made.values())
    finally:
        for holder, contents in held:
            if not _same(_contents(holder), contents):
                _fill(holder, contents)
        for p, gradient in gradients:
            if p.grad is not gradient:
                p.grad = gradient


def fake_of(
    values: Values, tensor: torch.Tensor, train: bool, device: torch.device = CPU, *, is_argument: bool = False
) -> torch.Tensor:
    """A fake tensor that is like this one, and a leaf of backward where this one is. device: a GPU where it is to be. is_argument: of the
    model's call."""
    made: torch.Tensor = values.fake.from_tensor(tensor.detach())
    with values.fake:
        made = made.to(device) if device.type != "cpu" else made
        made.requires_grad_(train and tensor.requires_grad)
        made = made.clone() if train and tensor.grad_fn is not None else made  # which operations may write to
    return values.give(made, tensor, is_argument=is_argument)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    is_moved = tensor.is_meta or device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device if is_moved else tensor.device)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that these objects hold."""
    return _plain_tensors(_contents(holder) for holder in _holders(values))


def _plain_tensors(held: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in these holders that are not fake."""
    found: list[torch.Tensor] = []
    for contents in held:
        for value in contents.values() if isinstance(contents, dict) else contents:
            several = value if type(value) is tuple else (value,)
            found += [t for t in several if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor)]
    return found


def _holders(values: Sequence[Any]) -> list[Any]:
    """All dicts, lists, deques and sets in these values, attributes of modules and other objects included."""
    found: list[Any] = []
    seen: set[int] = set()
    open_ends: list[Any] = list(values)
    while open_ends:
        value = open_ends.pop()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            found.append(value)
            contents = _contents(value)
            open_ends += contents.values() if isinstance(contents, dict) else contents
        elif isinstance(value, (tuple, frozenset)):
            open_ends += value
        elif isinstance(attributes := getattr(value, "__dict__", None), dict) and _is_of_the_model(value):
            open_ends.append(attributes)
    return found


def _is_of_the_model(value: Any) -> bool:
    """Whether an object belongs to the model, and not to PyTorch itself, such as the compiler's state, or to Python, whose queues and locks
    other threads may use meanwhile."""
    library = type(value).__module__.partition(".")[0]
    is_anothers = library.startswith("torch") or library in sys.stdlib_module_names
    return isinstance(value, (torch.nn.Module, types.SimpleNamespace)) or not is_anothers


def _base_of(holder: Any) -> Any:
    """The container whose kind this is. Its methods do what they say, those of a class that is made of it may make or refuse contents."""
    return next(kind for kind in _CONTAINERS if isinstance(holder, kind))


def _contents(holder: Any) -> Any:
    base = _base_of(holder)
    return dict(base.items(holder)) if issubclass(base, dict) else set(holder) if base is set else list(base.__iter__(holder))


def _same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {id(item) for item in one} == {id(item) for item in other}
    if isinstance(one, dict) and any(a is not b for a, b in zip(one, other, strict=True)):
        return False
    values = (one.values(), other.values()) if isinstance(one, dict) else (one, other)
    return all(a is b for a, b in zip(*values, strict=True))


def _fill(holder: Any, contents: Any) -> None:
    base = _base_of(holder)
    base.clear(holder)
    if issubclass(base, dict):
        for key, value in contents.items():
            base.__setitem__(holder, key, value)
    else:
        base.update(holder, contents) if base is set else base.extend(holder, contents)


def _take_from_holders(tensors: Sequence[torch.Tensor]) -> None:
    """Removes the tensors from containers, attributes and variables of functions."""
    taken = {id(tensor) for tensor in tensors}
    for holder in gc.get_referrers(*tensors):
        if isinstance(holder, types.CellType):
            holder.cell_contents = None
        elif not isinstance(holder, (_CONTAINERS, types.FrameType, type)):
            holder = getattr(holder, "__dict__", None)  # which some versions of Python make when it is asked for
        if isinstance(holder, _CONTAINERS) and holder is not tensors:
            _remove(taken, holder)


def _remove(taken: set[int], holder: Any) -> None:
    contents = _contents(holder)
    if not isinstance(contents, dict):
        _fill(holder, [value for value in contents if id(value) not in taken])
    elif "__module__" not in contents:  # else it is that of a class
        for key in [key for key, value in contents.items() if id(value) in taken]:
            _base_of(holder).__delitem__(holder, key)


def _swapped(contents: Any, made: Mapping[int, torch.Tensor]) -> Any:
    def swap(value: Any) -> Any:
        if type(value) is tuple and any(id(item) in made for item in value):
            return tuple(made.get(id(item), item) for item in value)
        return made.get(id(value), value)

    if isinstance(contents, dict):
        return {key: swap(value) for key, value in contents.items()}
    return contents if isinstance(contents, set) else [swap(value) for value in contents]
