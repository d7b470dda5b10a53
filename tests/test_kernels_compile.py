"""Every kernel for every architecture: it compiles, spills no register, and draws no warning.

Some 1000 pairs of build and architecture; what nothing has changed about is taken from the disk cache.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from marlin_jit import jit
from marlin_jit.errors import MarlinJitError
from marlin_jit.launch import Build, all_builds

try:
    jit.nvrtc_version()
except MarlinJitError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

ARCHS = ("80", "86", "89", "90a", "100", "120")
KERNELS = Path(jit.__file__).parent / "kernels"


def name_of(pair: tuple[str, Build]) -> str:
    arch, build = pair
    return f"sm_{arch}-{build.name}-" + "-".join(f"{macro}={value}" for macro, value in build.macros)


PAIRS = [(arch, build) for arch in ARCHS for build in all_builds(arch)]


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


@cache
def compiling(index: int) -> Future[jit.CompiledKernel]:
    arch, build = PAIRS[index]
    return pool().submit(jit.compile_cubin, build.source, arch, build.defines, name=build.name)


@pytest.mark.parametrize("index", range(len(PAIRS)), ids=[name_of(pair) for pair in PAIRS])
def test_compiles_without_spills(index: int) -> None:
    for following in range(index, min(index + (os.cpu_count() or 1), len(PAIRS))):
        compiling(following)  # the next ones run beside this one
    _, build = PAIRS[index]
    kernel = compiling(index).result()
    assert 0 < kernel.registers <= 255
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    if build.name == "marlin_wgmma":
        # What warpgroups pass on to each other is counted from there: with fewer they would wait for ever.
        assert kernel.registers == {1: 168, 2: 80}[build.defines["MIN_BLOCKS"]]
    complaints = [
        line for line in kernel.log.splitlines() if "warning" in line.lower() or "loss" in line.lower()
    ]
    assert complaints == []


@pytest.mark.parametrize("arch", ARCHS)
def test_builds_are_distinct_and_use_every_kernel_file(arch: str) -> None:
    builds = all_builds(arch)
    assert len(set(builds)) == len(builds)
    hopper = {"wgmma.cu"} if arch != "90a" else set()
    assert {build.source for build in builds} == {path.name for path in KERNELS.glob("*.cu")} - hopper
