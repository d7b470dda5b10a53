"""marlin_decode in machine code: a warp waits for its weights before it asks for the next block's.

Loads are waited for by counters, and all loads of weights share one (docs/notes/decode.md). A wait right
after the next block's loads would wait for them too, a whole latency of memory for every block of k. It
would still be right, only 20% slower, and a change of the compiler's mind could bring it back.
"""

from __future__ import annotations

import struct

import pytest

from marlin_jit import jit
from marlin_jit.errors import MarlinJitError
from marlin_jit.launch import Build, all_builds

try:
    jit.nvrtc_version()
except MarlinJitError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

BUILDS = [build for build in all_builds("90a") if build.name == "marlin_decode"]


def machine_code(cubin: bytes, name: str) -> list[tuple[int, int]]:
    """The instructions of a kernel, two 64-bit words each, from section .text of the ELF file."""
    cubin += b"\0" * 64  # CuPy cuts off the last byte
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        at = names + header[0]
        if cubin[at : cubin.index(b"\0", at)].decode() == f".text.{name}":
            words = struct.unpack_from(f"<{header[5] // 8}Q", cubin, header[4])
            return list(zip(words[::2], words[1::2], strict=True))
    raise AssertionError(f"no section .text.{name}")


def loads_weights(low: int, high: int) -> bool:
    """LDG.E.NA.128.CONSTANT, as nvdisasm calls it: 16 bytes, read once, of memory that does not change."""
    return low & 0xFFF == 0x981 and high & 0xFFFF00 == 0x5E9D00


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: "-".join(str(value) for _, value in build.macros))
def test_no_wait_follows_the_loads_of_the_next_block(build: Build) -> None:
    kernel = jit.compile_cubin(build.source, "90a", build.defines, name=build.name)
    code = machine_code(kernel.cubin, build.name)
    loads = [i for i, words in enumerate(code) if loads_weights(*words)]
    assert len(loads) == 24, "a first block, and two sets in the loop"
    counters = {code[i][1] >> 46 & 7 for i in loads[8:]}
    for group in (loads[8:16], loads[16:]):
        behind = code[group[0] + 1 : group[-1] + 200]
        waits = [i for i, (_, high) in enumerate(behind) if any(high >> 52 + c & 1 for c in counters)]
        assert not waits, f"it waits {waits[0] + 1} instructions after the first load"
