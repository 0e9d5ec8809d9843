"""Files of tests that are written for the CPU, run again on the fake GPU: see support/fake_gpu.py. A process of its own has it, since
a process has one driver for its whole life. What a GPU does not have is skipped there, by fake_gpu.cpu_alone, with the reason.

Not here are files about what a GPU refuses (ranks, reproducible sums, spans), or about the host's memory alone, and those that
have a GPU already. test_on_card_later.py has the rest: files run in parallel."""

from support.on_card import each_of

# The GPU does its work as early as it may. Each line is one process, whose start takes as long as a file.
test_files_pass_on_a_gpu_too = each_of([
    ("early", ["test_saved.py", "test_wrapping.py", "test_gradients.py", "test_types.py", "test_edits.py", "test_threads.py"]),
    ("early", ["test_meta.py", "test_pretrained.py", "test_trainer.py", "test_interrupts.py", "test_plan.py", "test_compile.py",
               "test_operators.py"]),
])  # fmt: skip
