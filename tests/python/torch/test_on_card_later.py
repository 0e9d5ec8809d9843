"""As test_on_card.py, where the GPU does its work as late as it may, or at random."""

from support.on_card import each_of

test_files_pass_on_a_gpu_too = each_of([
    ("late", ["test_at_once.py", "test_loop.py", "test_team.py"]),
    ("late", ["test_autograd.py", "test_closing.py", "test_half.py", "test_misuse.py", "test_engine_of.py"]),
    ("random", ["test_saving.py", "test_large.py", "test_muon.py"]),
    ("random", ["test_models.py", "test_examples.py"]),
])  # fmt: skip
