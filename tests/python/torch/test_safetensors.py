"""wrap(weights=) reads files of safetensors, and refuses those that are not whole, with the reason."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.sluice_process import SOURCE

import sluice
import sluice.torch
from sluice.torch import _safetensors

CORPUS = SOURCE / "tests" / "fuzz" / "corpus" / "safetensors_header"  # the fuzzer of the engine's reader begins with it, too
WHOLE = {"two_tensors", "types_of_all_kinds"}


def refused(folder):
    """The text of the error with which wrap() refuses a folder."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(sluice.CorruptError) as found:
        sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", weights=folder)
    return str(found.value)


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir() if path.name not in WHOLE))
def test_a_file_that_is_not_whole_is_refused_with_its_name(name, tmp_path):
    shutil.copy(CORPUS / name, tmp_path / "model.safetensors")
    assert str(tmp_path / "model.safetensors") in refused(tmp_path)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_whole_file_has_the_values_of_the_formats_own_reader(name, tmp_path):
    shutil.copy(CORPUS / name, tmp_path / "model.safetensors")
    tensors = _safetensors.tensors_of(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    known = {n: value for n, value in theirs.items() if value.dtype in _safetensors.TYPES}
    tensors = {n: stored for n, stored in tensors.items() if stored.dtype is not None}
    assert tensors.keys() == known.keys() and len(known) > 1
    for n, value in known.items():
        assert tensors[n].shape == value.shape and tensors[n].dtype == value.dtype
        read = torch.empty(value.numel(), dtype=value.dtype)
        tensors[n].read(0, read)
        assert torch.equal(read, value.flatten())


def test_what_is_accepted_of_changed_files_lies_in_them_side_by_side(tmp_path):
    """Bytes of a whole file's header are changed at random."""
    whole, file = (CORPUS / "types_of_all_kinds").read_bytes(), tmp_path / "model.safetensors"
    chosen, accepted = random.Random(1), 0
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(chosen.randint(1, 3)):
            changed[chosen.randrange(len(whole) - 12)] = chosen.choice(b'0123456789-.e[]{}",: a\0\xff')
        file.write_bytes(changed)
        try:
            tensors = _safetensors.tensors_of(tmp_path)
        except sluice.CorruptError:
            continue
        accepted += 1
        end = 8 + int.from_bytes(changed[:8], "little")
        for stored in sorted(tensors.values(), key=lambda stored: stored.runs[0].begin):
            assert stored.runs[0].begin >= end, changed
            item = 0 if stored.dtype is None else stored.dtype.itemsize  # other types are not read
            end = stored.runs[0].begin + stored.runs[0].elements * item
        assert end <= len(changed), changed
    assert accepted > 10, "nothing was tried"


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(sluice.InvalidArgumentError, match="model.safetensors' is not a file"):
        sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", weights=tmp_path)


# ---- which files of a folder count ----


def values(bias):
    return {"weight": torch.full((2, 2), bias), "bias": torch.full((2,), bias)}


def bias_of(folder):
    """The bias that a model has which is wrapped with the folder."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", weights=folder)
    found = model.bias.detach().clone()
    sluice.torch.close(model, values=False)
    return found.tolist()


def store_index(folder, **files):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_the_files_that_count_are_those_of_transformers(tmp_path):
    save_file(values(3.0), tmp_path / "other.safetensors")
    assert bias_of(tmp_path) == [3, 3]
    save_file({"weight": torch.ones(2, 2), "bias": torch.full((2,), 9.0)}, tmp_path / "one.safetensors")
    with pytest.raises(sluice.InvalidArgumentError, match=r"'(bias|weight)' is in '.*one.safetensors' and in '.*other.safetensors'"):
        bias_of(tmp_path)
    save_file({"bias": torch.full((2,), 2.0)}, tmp_path / "two.safetensors")
    store_index(tmp_path, weight="one.safetensors", bias="two.safetensors")
    assert bias_of(tmp_path) == [2, 2]
    save_file(values(1.0), tmp_path / "model.safetensors")
    assert bias_of(tmp_path) == [1, 1]


@pytest.mark.parametrize("index, error, says", [
    ({"weight": "one.safetensors", "bias": "gone.safetensors"}, sluice.NotFoundError, "gone.safetensors' is missing"),
    ({"weight": "one.safetensors", "bias": "one.safetensors", "x\x1b[31m": "one.safetensors"}, sluice.CorruptError, r"puts tensor 'x\\x1b\[31m' in"),
    ({"weight": "../one.safetensors"}, sluice.CorruptError, "not a plain file name"),
    ({"weight": 5}, sluice.CorruptError, "'weight_map' has an unexpected value"),
    ({"weight": "a\x1b[31m.safetensors"}, sluice.CorruptError, r"in 'a\\x1b\[31m.safetensors', which is not a plain file name"),
])  # fmt: skip
def test_an_index_that_is_wrong_is_refused(index, error, says, tmp_path):
    save_file(values(1.0), tmp_path / "one.safetensors")
    store_index(tmp_path, **index)
    with pytest.raises(error, match=says):
        bias_of(tmp_path)


@pytest.mark.parametrize("index, says", [
    ('{"weight_map": {"weight": "one.safetensors", "bias": "one.safetensors", "bias": "two.safetensors"}}', "the key 'bias' is there twice"),
    ("[]", "'weight_map' is missing"),
    ("{", "is not valid JSON"),
])  # fmt: skip
def test_what_is_no_index_is_refused(index, says, tmp_path):
    save_file(values(1.0), tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(sluice.CorruptError, match=f"index.json.*{says}"):
        bias_of(tmp_path)


def test_types_that_are_not_read_are_refused_and_reported(tmp_path):
    narrow = torch.ones(2).to(torch.float8_e4m3fn)
    save_file({**values(1.0), "x\x1b[31mred": narrow}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"'x\\x1b\[31mred' is there, which is none of the model's"):
        assert bias_of(tmp_path) == [1, 1]
    save_file({**values(1.0), "bias": narrow}, tmp_path / "model.safetensors")
    with pytest.raises(sluice.InvalidArgumentError, match="'bias' has a type in '.*model.safetensors' that is not read"):
        bias_of(tmp_path)


def test_a_nan_is_the_same_value_under_both_names_of_a_tied_parameter(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
            self.other.weight = self.one.weight

    strange = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    save_file({"one.weight": strange, "other.weight": strange.clone()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Tied()
    sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", weights=tmp_path)
    assert torch.equal(model.other.weight.detach().view(torch.int32), strange.view(torch.int32))
