"""Every kernel for every architecture: it compiles, spills no register, and draws no warning.

Of marlin_wgmma's main loop the machine code is looked at too.

Some 1000 pairs of build and architecture; what nothing has changed about is taken from the disk cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib import metadata
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


def nvdisasm() -> str | None:
    """The disassembler, of its own package or of a toolkit."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or ()
    except metadata.PackageNotFoundError:
        return shutil.which("nvdisasm")
    return next((str(file.locate()) for file in files if file.name == "nvdisasm"), None)


def main_loop(sass: str) -> list[str]:
    """Names of the instructions of the innermost loop around all products."""
    first, last = sass.find("HGMMA"), sass.rfind("HGMMA")
    assert first >= 0
    for label in reversed(list(re.finditer(r"^(\.L\w+):", sass[:first], re.MULTILINE))):
        back = re.compile(rf"\bBRA\b[^\n;]*`\({re.escape(label[1])}\)").search(sass, last)
        if back:
            loop = sass[label.end() : back.end()]
            return re.findall(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", loop)
    raise AssertionError("no loop around the products")


# Every tile of these. Types, groups and zeros change what surrounds the products.
LOOPS = [
    index
    for index, (arch, build) in enumerate(PAIRS)
    if build.name == "marlin_wgmma"
    and tuple(build.defines[macro] for macro in ("GROUP", "ZEROS", "BF16"))
    in ((128, 0, 0), (0, 0, 0), (32, 0, 1), (128, 1, 0), (64, 2, 0), (32, 1, 0), (0, 2, 1))
]


@pytest.mark.parametrize("index", LOOPS, ids=[name_of(PAIRS[index]) for index in LOOPS])
def test_products_keep_to_uniform_registers(index: int, tmp_path: Path) -> None:
    """No R2UR in the main loop of marlin_wgmma.

    Addresses of stages are the same for all lanes, and products take them from uniform registers. Where the
    compiler does not see that lanes stay together (after a `continue` of the loop around, say, or where each
    lane finds out its warp's number) it keeps addresses in ordinary registers, and copies them before every
    product: a tenth of the time.
    """
    program = nvdisasm()
    if program is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiling(index).result().cubin + b"\0")  # CuPy's NVRTC leaves the last byte out
    done = subprocess.run([program, "-c", cubin], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loop = main_loop(done.stdout)
    macros = PAIRS[index][1].defines
    assert loop.count("HGMMA") == macros["K_STAGE"] // 16 // macros["WG_K"] * macros["J"]  # all of a stage
    assert loop.count("R2UR") == 0
