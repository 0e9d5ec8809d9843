"""What autograd keeps of a wrapped model: references to parameters, and other tensors as they are."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..errors import Error, StateError
from ._absent import storage_of
from ._calls import Call, Calls, Owner
from ._casts import Cast, Casts
from ._demand import Demand
from ._homes import Home, View, has_memory
from ._presence import Presence
from ._shortage import Shortage
from ._modes import outside_of_graphs


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Saved(NamedTuple):
    """The reference that autograd keeps to a parameter, a view of it, or a cast."""

    home: Home
    version: int
    cast: Cast | None
    view: View  # the view of the parameter's memory, or of the cast's


class _Plain(NamedTuple):
    """Another tensor that autograd keeps, with the version that it must still have in backward."""

    tensor: torch.Tensor
    version: int


class _Others(NamedTuple):
    """What outer hooks of saved tensors keep of a tensor, and how they unpack it."""

    kept: Any
    unpack: Callable[[Any], torch.Tensor]


class _Scope:
    """One call of the model. PyTorch is asked which hooks and modes there are, since a KeyboardInterrupt may come between
    any two lines that note them."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._others: Hooks | None = innermost()
        self._casts = Casts(saved.by_storage)
        self._casting: list[torch.nn.Module] = []  # modules whose calls began under autocast, and have not ended

    def open(self, model: torch.nn.Module) -> None:
        """Makes autograd keep references. Where hooks are not allowed (in transforms of torch.func), it keeps the parameters
        themselves, which are brought in when backward touches them."""
        why = refusal()
        if why is None:
            push((self._pack, self._saved.unpack))
        elif self._saved.gpu is not None:
            raise StateError(
                f"a model that is wrapped on a GPU is called where autograd keeps parameters themselves ({why}), which backward would not "
                "find there; call it without disable_saved_tensors_hooks(), or wrap the model on the CPU"
            )
        self.begin_module(model)

    def begin_module(self, module: torch.nn.Module) -> None:
        """Notes casts until the module's call ends. Autocast may be turned on inside of the model's forward, and a mode must
        end where it began."""
        if self._casting or torch.is_autocast_enabled("cpu" if self._saved.gpu is None else self._saved.gpu.device.type):
            self._casting.append(module)
            if len(self._casting) == 1:
                self._casts.__enter__()

    def end_module(self, module: torch.nn.Module) -> None:
        """Ends the module's call, and calls inside it that an exception ended."""
        if module in self._casting:
            while self._casting.pop() is not module:
                pass
            if not self._casting:
                self._end_casts()

    def _end_casts(self) -> None:
        if _get_current_dispatch_mode() is self._casts:
            self._casts.__exit__(None, None, None)

    def close(self) -> None:
        """Removes the hooks and the mode, after those that came later."""
        self._end_casts()
        remove(self)

    @outside_of_graphs  # also where the function that calls backward() is compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        reference = self._saved.reference(tensor, self._casts)
        if reference is not None:
            return reference
        if self._others is not None:  # PyTorch itself calls the innermost hooks alone
            return _Others(self._others[0](tensor), self._others[1])
        # An operation that keeps its own result would refer to itself: a graph that no backward frees would stay.
        return _Plain(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


class _Open(threading.local):
    """The calls of the model in this thread that have not ended."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


class _Call:
    """A call of the model, as far as it has begun."""

    def __init__(self) -> None:
        self.before: int | None = None  # how many calls the thread was in; None: it has not begun, or has ended
        self.on_gpu: Call | None = None
        self.returned = False
        self.output: Any = None


class SavedTensors:
    """The calls of one wrapped model, and the hooks of saved tensors in them. They keep the presence alive."""

    def __init__(
        self, presence: Presence, demand: Demand, shortage: Shortage, calls: Calls | None, note: Callable[[], None] | None = None
    ) -> None:
        """demand: plans for calls; shortage: says what a call lacks of a GPU's memory; calls: where a GPU computes; note: is called
        before a backward pass gives its first gradient, wherever it has saved tensors or calls modules."""
        self.presence, self._demand, self._shortage, self._calls, self._note = presence, demand, shortage, calls, note
        self.by_storage = presence.by_storage
        self.gpu = presence.engine.gpu  # where the parameters are; None: in the memory of the CPU
        self._open = _Open()

    def begin_module(self, module: torch.nn.Module) -> None:
        """Begins a call of one of the model's modules that have parameters, in this thread."""
        if self._note is not None:
            self._note()
        if scopes := self._open.scopes:
            scopes[-1].begin_module(module)

    def end_module(self, module: torch.nn.Module) -> None:
        """That call ends."""
        if scopes := self._open.scopes:
            scopes[-1].end_module(module)

    def guard(self, model: torch.nn.Module, owner: Owner | None, ended: Callable[[], None]) -> None:
        """Lets calls of the model begin before all hooks and end after them, also where PyTorch runs none, as after a KeyboardInterrupt.
        owner: what belongs to the model on a GPU; ended: comes when the thread is in no call any more."""
        self._owner, self._ended = owner, ended
        self._begin_call = outside_of_graphs(self._begin)
        self._end_call = outside_of_graphs(self._end)
        # This must not refer to the model: its parameters refer to this, and Python's collector does not look into all of them.
        model.__dict__["_call_impl"] = functools.partial(self._call, model, functools.partial(type(model)._call_impl, model))
        if model._compiled_call_impl is not None:  # by model.compile(), before it was wrapped
            model._compiled_call_impl = functools.partial(self._call, model, model._compiled_call_impl)

    def _call(self, model: torch.nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces Module._call_impl and what Module.compile() makes of it, which is `run`."""
        if self._demand.estimating:
            return run(*args, **kwargs)
        call = _Call()
        try:
            try:
                self._begin_call(call, model, args, kwargs)
                call.output = run(*args, **kwargs)
                call.returned = True
                return call.output
            finally:
                self._end_call(call, model)
        except torch.OutOfMemoryError as error:
            told = self._shortage.told(error, (args, kwargs))
            if told is error:
                raise
            raise told from error
        finally:
            self._end_call(call, model)  # a KeyboardInterrupt may have come in the middle of that

    def _begin(self, call: _Call, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.presence.users.__enter__()
        scopes = self._open.scopes
        call.before = len(scopes)
        self._demand.begin(model, args, kwargs)
        self._shortage.begin(args, kwargs)
        if self._calls is not None and self._owner is not None:
            call.on_gpu = self._calls.enter(self._owner)
        scopes.append(_Scope(self))
        scopes[-1].open(model)

    def _end(self, call: _Call, model: torch.nn.Module) -> None:
        """Ends what has begun of the call. Does nothing where all has ended."""
        if call.before is None:
            return
        scopes = self._open.scopes
        while len(scopes) > call.before:
            scopes[-1].close()
            scopes.pop()
        try:
            if self._calls is not None and call.on_gpu is not None:
                on_gpu, call.on_gpu = call.on_gpu, None
                self._calls.leave(on_gpu, call.output)
            self._demand.end(model, call.output)
            if not scopes and (self._calls is None or torch._C._current_graph_task_id() == -1):
                with contextlib.nullcontext() if call.returned else contextlib.suppress(Error):  # the call's own error is told
                    self._ended()
        finally:
            call.before = None
            self.presence.users.__exit__()

    def reference(self, tensor: torch.Tensor, casts: Casts | None = None) -> _Saved | None:
        """The reference that autograd keeps to a parameter, a view of it, or a cast; None for any other tensor."""
        if tensor.layout != torch.strided or not has_memory(tensor):
            return None
        home, cast = self.by_storage.get(storage_of(tensor)), None
        if home is None and casts is not None and (cast := casts.find(tensor)) is not None:
            home = cast.home
        return None if home is None else _Saved(home, home.version, cast, View.of(tensor))

    @outside_of_graphs
    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor for what was kept of it."""
        if self._note is not None:
            self._note()
        if isinstance(saved, _Others):
            return saved.unpack(saved.kept)
        return _same_version(saved) if isinstance(saved, _Plain) else self._bring_in(saved)

    def _bring_in(self, saved: _Saved) -> torch.Tensor:
        home = saved.home
        if home.version != saved.version:
            raise RuntimeError(
                f"backward goes through a graph that was made before '{home.name}' was changed (by optimizer.step() or "
                "within full_parameters()), so its gradients would be wrong; run forward again"
            )
        try:
            if self._calls is not None:
                self._calls.begin_pass()
                self.presence.pinned = {*self.presence.pinned, *home.units}  # until the backward of the next call begins
            for unit in home.units:
                self.presence.use(unit)
        except StateError as error:
            raise StateError(f"'{home.name}' is needed: {error}") from None
        if home.moved:
            home.check_memory()
        return saved.view.over(home.memory if saved.cast is None else saved.cast.make())


def _same_version(saved: _Plain) -> torch.Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, and was "
            f"saved at version {saved.version}"
        )
    return saved.tensor


# ---- the hooks of saved tensors that are in force in a thread: PyTorch has a stack of them, and calls the innermost alone ----


def innermost() -> Hooks | None:
    """This thread's innermost hooks."""
    top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


def refusal() -> str | None:
    """Why no hooks may come into force in this thread, if so."""
    why: str | None = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return why


def push(hooks: Hooks) -> None:
    """Brings hooks into force in this thread."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def remove(scope: _Scope) -> None:
    """Ends a call's hooks in this thread, if they are in force. Those above them stay."""
    above: list[Hooks] = []
    try:
        while (hooks := innermost()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if getattr(hooks[0], "__self__", None) is scope:
                break
            above.append(hooks)
    finally:  # also after a KeyboardInterrupt
        for other in reversed(above):
            push(other)
