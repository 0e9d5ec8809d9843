"""What wrap(weights=) reads of files of safetensors: those that are not whole are refused, and say why."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
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
    tensors = _safetensors.SafetensorsFolder(tmp_path)._tensors
    theirs = load_file(tmp_path / "model.safetensors")
    known = {n: value for n, value in theirs.items() if value.dtype in _safetensors._TYPES.values()}
    assert tensors.keys() == known.keys() and len(known) > 1
    for n, value in known.items():
        assert tensors[n].shape == value.shape and tensors[n].dtype == value.dtype
        read = torch.empty(value.numel(), dtype=value.dtype)
        _safetensors.SafetensorsFolder.read(tensors[n], 0, read)
        assert torch.equal(read, value.flatten())


def test_what_is_accepted_of_changed_files_lies_in_them_side_by_side(tmp_path):
    """Bytes of a whole file's header are changed at random."""
    whole, file = (CORPUS / "types_of_all_kinds").read_bytes(), tmp_path / "model.safetensors"
    chosen, accepted = random.Random(1), 0
    for _ in range(3000):
        changed = bytearray(whole)
        for _ in range(chosen.randint(1, 3)):
            changed[chosen.randrange(len(whole) - 12)] = chosen.choice(b'0123456789-.e[]{}",: a\0\xff')
        file.write_bytes(changed)
        try:
            tensors = _safetensors.SafetensorsFolder(tmp_path)._tensors
        except sluice.CorruptError:
            continue
        accepted += 1
        end = 8 + int.from_bytes(changed[:8], "little")
        for stored in sorted(tensors.values(), key=lambda stored: stored.runs[0].begin):
            assert stored.runs[0].begin >= end, changed
            end = stored.runs[0].begin + stored.runs[0].elements * stored.dtype.itemsize
        assert end <= len(changed), changed
    assert accepted > 30, "nothing was tried"


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(sluice.InvalidArgumentError, match="model.safetensors' is not a file"):
        sluice.torch.wrap(model, sluice.AdamW(), memory="4GiB", weights=tmp_path)
