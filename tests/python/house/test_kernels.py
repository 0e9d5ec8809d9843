"""The file of the GPU's kernels."""

import struct

import pytest
from support.sluice_process import BUILD

KERNELS = BUILD / "lib" / "libsluice_kernels.fatbin"
ID_BYTES = 64  # a digest in hexadecimal digits, before the fat binary
PTX, MACHINE_CODE = 1, 2


def code_in(fat_binary):
    """The kind and the architecture of each entry, as CUDA's fatbinary_section.h and its tools write them."""
    magic, _, header_bytes, entries_bytes = struct.unpack_from("<IHHQ", fat_binary)
    assert magic == 0xBA55ED50 and header_bytes + entries_bytes == len(fat_binary)
    found, at = [], header_bytes
    while at < len(fat_binary):
        kind, _, entry_header_bytes, code_bytes = struct.unpack_from("<HHIQ", fat_binary, at)
        found.append((kind, *struct.unpack_from("<I", fat_binary, at + 28)))
        at += entry_header_bytes + code_bytes
    assert at == len(fat_binary)
    return found


@pytest.mark.skipif(not KERNELS.exists(), reason=f"{KERNELS.name} is not built")
def test_the_kernels_have_code_for_each_architecture_and_for_later_ones():
    assert sorted(code_in(KERNELS.read_bytes()[ID_BYTES:])) == [(PTX, 100), (MACHINE_CODE, 80), (MACHINE_CODE, 90), (MACHINE_CODE, 100)]
