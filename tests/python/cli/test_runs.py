"""Whole runs of the command line: twins that differ in placement alone. Tolerance: zero. Signals are in tests/bindings/training_test.cc."""
import json

import pytest
from kill_campaign import PLACES, SLUICE
from support.runs import assert_same, common, sluice, train, without_earlier
from transformers import GPT2LMHeadModel

pytestmark = pytest.mark.skipif(not SLUICE.exists(), reason=f"{SLUICE} is not built")
CHUNK = 512 * 1024  # elements of the smallest chunk


def plan(place, model, dtype, *more):
    return json.loads(sluice("plan", "--json", *common(place, model, dtype, *more)))


def ways(model):
    some = "ln1+attention+" + ("swiglu" if "llama" in model else "gelu")
    memory, disk = ["--memory", "600MiB", *PLACES["memory"]], ["--memory", "600MiB", *PLACES["disk"]]
    # fmt: off
    return {
        "state on disk": [*memory, "--place-state", "disk", "--recompute", "none", "--group", "4"],
        "gradients on disk, full": [*memory, "--place-gradients", "disk", "--recompute", "full", "--group", "2"],
        "selective, uneven groups": [*memory, "--recompute", some, "--group", "3"],
        "all on disk, near": [*disk, "--recompute", "none", "--group", "1", "--prefetch", "1"],
        "all on disk, far": [*disk, "--recompute", some, "--group", "4", "--prefetch", "6"],
        "all on disk, large chunks": [*disk, "--recompute", "full", "--chunk-elements", str(2 * CHUNK)],
    }
    # fmt: on


MODELS = [
    ("llama-tied", "f32"),
    ("wide-untied", "f16"),  # GPT-2
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("tiny", "f32"), ("tiny", "bf16"), ("tiny-llama", "f32"), ("wide-untied", "bf16"))),
]  # fmt: skip


@pytest.mark.parametrize("model, dtype", MODELS)
def test_placement_recomputation_groups_prefetch_and_chunks_never_change_a_bit(place, model, dtype):
    name = f"{model}-{dtype}"
    memory = ["--memory", "600MiB", *PLACES["memory"], "--recompute", "none", "--group", "1"]
    expected, rows = train(place, f"{name}-memory", model, dtype, *memory)
    assert all(row["disk_read"] == row["disk_written"] == 0 for row in rows)
    moved = {}
    for way, flags in ways(model).items():
        flags = without_earlier(flags)
        found, rows = train(place, f"{name}-{way.replace(' ', '-')}", model, dtype, *flags)
        assert_same(found, expected)
        moved[way] = sum(row["disk_read"] + row["disk_written"] for row in rows)
    assert moved.pop("selective, uneven groups") == 0
    # Gradients are written where their room is needed; the frames of this model have room for all of them.
    gradients = moved.pop("gradients on disk, full")
    assert gradients > 0 or model == "wide-untied"
    assert min(moved.values()) > 0
    # Without groups each micro-batch loads everything again.
    assert moved["all on disk, near"] > max(1.5 * moved["all on disk, far"], moved["state on disk"])


def test_the_savings_happen(place):
    def host(*flags):
        found = plan(place, "wide-untied", "f32", *without_earlier(flags))
        return found, found["bytes"]["host"]

    memory = ["--memory", "600MiB", *PLACES["memory"], "--group", "4", "--recompute"]
    kept, kept_bytes = host(*memory, "none")
    full, full_bytes = host(*memory, "full")
    assert (kept["recompute"], full["recompute"]) == ("none", "full")
    assert full_bytes["activation"] < kept_bytes["activation"]
    on_disk, disk_bytes = host(*memory, "none", "--place-state", "disk")
    assert disk_bytes["optimizer state"] == 0 < kept_bytes["optimizer state"]
    model = GPT2LMHeadModel.from_pretrained(place / "wide-untied")
    assert on_disk["bytes"]["disk"]["optimizer state"] >= 8 * sum(p.numel() for p in model.parameters())
    assert on_disk["step"]["bytes_read"] > 0 == kept["step"]["bytes_read"]
    assert {unit["state"] for unit in on_disk["units"]} == {"disk"}
    assert on_disk["chunk_elements"] >= CHUNK  # by this machine's disk
    stated = [host(*memory, "none", "--place-state", "disk", "--chunk-elements", str(n))[0] for n in (CHUNK, 2 * CHUNK)]
    assert stated[0]["chunk_elements"] == CHUNK < stated[1]["chunk_elements"]
    assert max(sum(p.numel() for p in block.parameters()) for block in model.transformer.h) > CHUNK
