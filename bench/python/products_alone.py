"""Computes the matrix products of the linear layers of a training step in f32, and nothing else, by the library that Sluice's program
loads (oneDNN's sgemm): no step by that library takes less time. Benches run it as a rank of one thread beside the sides they compare."""
import ctypes
import json
import sys
import time

from side_by_side import peak_bytes, torch_ranks


def products_side(ranks, linears, steps):
    """Returns the report of so many ranks at once. linears: of one rank's step, as (how many, rows, outputs, inputs)."""
    return torch_ranks(__file__, ranks, {"linears": linears, "steps": steps})


class Linear:
    """The three products of a linear layer whose weight is stored as [outputs, inputs]."""

    def __init__(self, library, count, rows, outputs, inputs):
        import numpy

        self.multiply, self.count = library.dnnl_sgemm, count
        self.sizes = rows, outputs, inputs
        self.x, self.y, self.weight = (numpy.full(shape, 0.5, "f4") for shape in ((rows, inputs), (rows, outputs), (outputs, inputs)))
        self.dx, self.dweight = numpy.empty_like(self.x), numpy.empty_like(self.weight)

    def product(self, a, is_a_transposed, b, is_b_transposed, c):
        size, one, zero = ctypes.c_int64, ctypes.c_float(1), ctypes.c_float(0)
        order = [ctypes.c_char(b"T" if is_transposed else b"N") for is_transposed in (is_a_transposed, is_b_transposed)]
        k = a.shape[0] if is_a_transposed else a.shape[1]
        at = [(ctypes.c_void_p(array.ctypes.data), size(array.shape[1])) for array in (a, b, c)]
        if status := self.multiply(*order, size(c.shape[0]), size(c.shape[1]), size(k), one, *at[0], *at[1], zero, *at[2]):
            raise RuntimeError(f"dnnl_sgemm: status {status}")

    def step(self):
        for _ in range(self.count):
            self.product(self.x, False, self.weight, True, self.y)
            self.product(self.y, False, self.weight, False, self.dx)
            self.product(self.y, True, self.x, False, self.dweight)


def run_rank(a):
    library = ctypes.CDLL("libdnnl.so.2")
    layers = [Linear(library, *linear) for linear in a["linears"]]
    seconds = []
    for _ in range(a["steps"] + 1):
        begin = time.perf_counter()
        for layer in layers:
            layer.step()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds[1:], "peak": peak_bytes()}))


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[2]))
