"""Every kernel for every architecture: it compiles, spills no register, and draws no warning.

There are more than a thousand pairs of build and architecture, so by default each build is compiled for one
architecture, dealt out so that every architecture gets every kernel in every block shape. With
``MARLIN_JIT_TEST_ALL_BUILDS=1`` all pairs are compiled; do that once after a change to a kernel. What was
compiled is taken from the disk cache when nothing it depends on has changed.
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
# Macros that choose what a kernel computes; the others choose the shape of a block (STAGES follows).
VARIANT = ("BF16", "GROUP", "ASYMMETRIC", "PACKED")


def selected() -> list[tuple[str, Build]]:
    """Pairs of architecture and build to compile."""
    if os.environ.get("MARLIN_JIT_TEST_ALL_BUILDS", "0") not in ("", "0"):
        return [(arch, build) for arch in ARCHS for build in all_builds(arch)]
    pairs = []
    for turn, arch in enumerate(ARCHS):
        shapes: dict[tuple[object, ...], list[Build]] = {}
        for build in all_builds(arch):
            shapes.setdefault(block_shape(build), []).append(build)
        for s, variants in enumerate(shapes.values()):
            few = len(variants) < len(ARCHS)
            pairs += [
                (arch, build) for v, build in enumerate(variants) if few or (s + v) % len(ARCHS) == turn
            ]
    return pairs


def block_shape(build: Build) -> tuple[object, ...]:
    macros = ((macro, value) for macro, value in build.macros if macro not in (*VARIANT, "STAGES"))
    return (build.source, build.name, *macros)


def name_of(pair: tuple[str, Build]) -> str:
    arch, build = pair
    return f"sm_{arch}-{build.name}-" + "-".join(f"{macro}={value}" for macro, value in build.macros)


PAIRS = selected()


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
    kernel = compiling(index).result()
    assert 0 < kernel.registers <= 255
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    complaints = [
        line for line in kernel.log.splitlines() if "warning" in line.lower() or "loss" in line.lower()
    ]
    assert complaints == []


@pytest.mark.parametrize("arch", ARCHS)
def test_builds_are_distinct_and_use_every_kernel_file(arch: str) -> None:
    builds = all_builds(arch)
    assert len(set(builds)) == len(builds)
    assert {build.source for build in builds} == {path.name for path in KERNELS.glob("*.cu")}


@pytest.mark.parametrize("arch", ARCHS)
def test_selection_has_every_block_shape(arch: str) -> None:
    chosen = {block_shape(build) for chosen_arch, build in PAIRS if chosen_arch == arch}
    assert chosen == {block_shape(build) for build in all_builds(arch)}


def test_selection_has_every_variant() -> None:
    def variant(build: Build) -> tuple[object, ...]:
        return (block_shape(build), *((m, v) for m, v in build.macros if m in VARIANT))

    chosen = {variant(build) for _, build in PAIRS}
    assert chosen == {variant(build) for arch in ARCHS for build in all_builds(arch)}
