"""Modes of PyTorch that see each operation of their thread."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class Mode(TorchDispatchMode):
    """A mode of its thread under which functions are compiled. PyTorch's own __enter__() also sets flags of the whole process, which stay
    set for ever where two threads enter and leave modes by turns; then compiled functions are compiled anew at each call."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this nothing is compiled while it is active, and PyTorch never tries again."""
        return True

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode()
