"""Compiling ahead of time: every kernel build an architecture can need, side by side, into the disk cache.

A program that compiles at first use waits a moment for each new kernel. `warmup` takes that wait to where it
does not matter: the building of an image, or the start of a service. It needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from marlin_jit import jit
from marlin_jit._array import BFLOAT16, FLOAT16
from marlin_jit.device import current_device
from marlin_jit.errors import CompileError, DTypeError, ShapeError
from marlin_jit.launch import all_builds
from marlin_jit.layout import GROUP_SIZES
from marlin_jit.plan import Build

Progress = Callable[[int, int, Build, jit.CompiledKernel], None]


def warmup(
    archs: Iterable[str] | None = None,
    *,
    dtypes: Iterable[Any] | None = None,
    group_sizes: Iterable[int] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[jit.CompiledKernel]:
    """Compile kernels into the disk cache before they are needed.

    Parameters
    ----------
    archs : iterable of str, optional
        Architectures such as ``"90a"``; the current device's if not given.
    dtypes : iterable of dtype, optional
        Only kernels for float16, for bfloat16; both if not given.
    group_sizes : iterable of int, optional
        Only kernels for these group sizes (32, 64, 128, -1); all if not given.
    jobs : int, optional
        Compilations at the same time; one a processor if not given.
    progress : callable, optional
        Called from this thread after each kernel with (done, total, build, compiled).

    Returns
    -------
    list of CompiledKernel
        In order of `archs` and, within one, of the builds.

    Raises
    ------
    CompileError
        A kernel does not compile, or NVRTC is missing. Kernels that were done by then stay in the cache.
    DeviceError
        No architecture is given and there is no device; or CuPy is not installed.
    DTypeError, ShapeError
        A dtype or a group size for which there are no kernels.

    Notes
    -----
    Only the compilation is done ahead. Before capturing a CUDA graph, make the same calls once: that also
    loads the kernels and allocates their scratch memory.
    """
    chosen = (
        [*archs] if archs is not None else [jit.arch_for(current_device().capability, jit.supported_archs())]
    )
    tasks = [
        (arch, build)
        for arch in dict.fromkeys(chosen)
        for build in select_builds(arch, dtypes=dtypes, group_sizes=group_sizes)
    ]
    jit.nvrtc_version()  # a missing NVRTC is said once, not by every worker
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    done: dict[int, jit.CompiledKernel] = {}
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        try:
            futures = {
                pool.submit(jit.compile_cubin, build.source, arch, build.defines, name=build.name): index
                for index, (arch, build) in enumerate(tasks)
            }
            for future in as_completed(futures):
                index = futures[future]
                done[index] = future.result()
                if progress is not None:
                    progress(len(done), len(tasks), tasks[index][1], done[index])
        except BaseException:  # an interrupt too: only what runs already is waited for
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[index] for index in range(len(tasks))]


def select_builds(
    arch: str, *, dtypes: Iterable[Any] | None = None, group_sizes: Iterable[int] | None = None
) -> Sequence[Build]:
    """The builds for ``arch`` that serve the dtypes and group sizes; arguments as for `warmup`.

    A build says what it serves through its macros: ``BF16`` (0 or 1) and ``GROUP`` (0 for one group a
    column). One without such a macro serves all.
    """
    bf16 = None if dtypes is None else {_bf16_macro(dtype) for dtype in dtypes}
    groups = None if group_sizes is None else {_group_macro(size) for size in group_sizes}

    def serves(build: Build, macro: str, wanted: Collection[int] | None) -> bool:
        return wanted is None or macro not in build.defines or int(build.defines[macro]) in wanted

    try:
        builds = all_builds(arch)
    except ValueError as error:
        raise CompileError(str(error)) from None
    return [build for build in builds if serves(build, "BF16", bf16) and serves(build, "GROUP", groups)]


def _bf16_macro(dtype: Any) -> int:
    found = np.dtype(BFLOAT16 if dtype == "bfloat16" else dtype)
    if found not in (FLOAT16, BFLOAT16):
        raise DTypeError(f"there are kernels for float16 and bfloat16, not for {found}")
    return int(found == BFLOAT16)


def _group_macro(size: int) -> int:
    if size not in GROUP_SIZES:
        raise ShapeError(f"there are kernels for group sizes {GROUP_SIZES}, not for {size}")
    return max(size, 0)
