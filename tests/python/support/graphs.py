"""A backend of torch.compile() for tests."""

import torch


class Counted:
    """A backend with the bits of uncompiled operations, which counts its graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
