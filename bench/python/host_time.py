#!/usr/bin/env python3
"""Measures the host time that a wrapped model's step, with everything on the device, takes beyond the same step of plain PyTorch.

    SLUICE_CUDA_DRIVER=build/lib/libsluice_fake_cuda.so python bench/python/host_time.py

A Llama of transformers with 16 layers of tiny sizes is wrapped on the tests' fake driver, where the CPU computes in no time. So nearly all of a
step is host time: of PyTorch, the wrapper and the engine. The figure is the CPU time of the computing thread, also in backward. The script
prints the seconds of a step of each side, their difference, and per step the calls of the engine and of Python functions."""
import collections
import ctypes
import os
import statistics
import sys
import time

import torch
import transformers
from side_by_side import ROOT, parser_of

sys.path.insert(0, str(ROOT / "bindings" / "python"))
import sluice  # noqa: E402
import sluice.torch  # noqa: E402

WARM = 5


def made(layers):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
                                      num_key_value_heads=1, vocab_size=64, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)


def steps(model, optimizer, count):
    """Returns the seconds of each step."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    found = []
    for _ in range(count):
        begin = time.thread_time()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)  # as on a GPU
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.thread_time() - begin)
    return found


class Counter:
    """Counts calls of the engine's functions, by name, and their seconds, in which the fake driver does the GPU's work."""

    def __init__(self):
        from sluice import _handle

        self.calls, self.seconds = collections.Counter(), 0.0
        inner = _handle.call

        def call(function, *arguments):
            self.calls[function] += 1
            begin = time.thread_time()
            try:
                return inner(function, *arguments)
            finally:
                self.seconds += time.thread_time() - begin

        _handle.call = call


def functions_called(run):
    """Returns the numbers of calls of functions in sluice, and of all Python functions."""
    counts = collections.Counter()

    def trace(frame, event, argument):
        if event == "call":
            counts["sluice" if "/sluice/" in frame.f_code.co_filename else "others"] += 1

    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


def main():
    a = parser_of(__doc__, as_json=False, layers=16, steps=25).parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(os.environ["SLUICE_CUDA_DRIVER"]).sluice_fake_cuda_share_memory(ctypes.c_uint64(1 << 30), 0, ctypes.c_uint64(0), 1, 1)
    plain = made(a.layers)
    of_plain = statistics.median(steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=True), a.steps)[WARM:])
    counter = Counter()
    facts = sluice.DeviceFacts(2e10, 2e10, 3e10, 2e10, 2e10, 0)
    model, optimizer = sluice.torch.wrap(made(a.layers), sluice.AdamW(lr=1e-3), memory="8GiB", device="cuda", device_memory="800MiB",
                                         reserve="64MiB", place="device", device_facts=facts,
                                         units={f"layer {n}": [f"model.layers.{n}"] for n in range(a.layers)})
    steps(model, optimizer, WARM)
    counter.seconds = 0.0
    found = statistics.median(steps(model, optimizer, a.steps)[WARM:])
    inside = counter.seconds / a.steps
    print(f"{1e3 * found:.2f} ms a step, {1e3 * of_plain:.2f} of plain PyTorch, {1e3 * inside:.2f} in the engine and the fake driver: "
          f"{1e3 * (found - of_plain - inside):.2f} in the wrapper, for {len(sluice.torch.engine_of(model).units)} units")
    counter.calls.clear()
    steps(model, optimizer, 1)
    print(f"calls of the engine: {sum(counter.calls.values())}: " + ", ".join(f"{n} {name[14:]}" for name, n in counter.calls.most_common()))
    called, alone = functions_called(lambda: steps(model, optimizer, 1)), functions_called(lambda: steps(plain, torch.optim.SGD(plain.parameters()), 1))
    print(f"calls of functions in sluice: {called['sluice']}; of others {called['others']}, of plain PyTorch {alone['others']}")
    os._exit(0)


if __name__ == "__main__":
    main()
