"""Backends of torch.compile() for tests."""

import contextlib
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Counted:
    """A backend with the bits of uncompiled operations, which counts its graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class _Mode(TorchDispatchMode):
    """A mode that does not see what is compiled, as Sluice's are."""

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def graphs_of_three_calls():
    """How often a function is compiled that is called three times under such a mode: once, but where this thread is told that there is
    another mode that has to see all operations."""
    counted = Counted()
    function = torch.compile(lambda x: x.sin() + 1, backend=counted)
    with _Mode():
        for _ in range(3):
            function(torch.ones(3))
    return counted.graphs


@contextlib.contextmanager
def compiled_elsewhere():
    """Inside of the `with` another thread is in the midst of compiling a function."""
    begun, may_end = threading.Event(), threading.Event()

    def wait(graph, inputs):
        begun.set()
        assert may_end.wait(60)
        return graph.forward

    other = threading.Thread(target=lambda: torch.compile(lambda x: x.tan(), backend=wait)(torch.ones(3)))
    other.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        may_end.set()
        other.join()
