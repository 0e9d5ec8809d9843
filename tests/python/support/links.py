"""Links between ranks, other than those that the machine would have."""

import contextlib

from sluice.ranks import Ranks


@contextlib.contextmanager
def no_shared_memory():
    """A `with` in which ranks that join share no memory, and exchange all bytes over Gloo."""
    linked = Ranks.linked
    Ranks.linked = staticmethod(lambda links, what, *, host, **given: linked(links, what, **given))
    try:
        yield
    finally:
        Ranks.linked = staticmethod(linked)
