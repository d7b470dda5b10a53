"""``marlin-jit warmup [PACKED]...``."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import marlin_jit
from marlin_jit import ahead, jit
from marlin_jit.cli.show import print_json, print_line
from marlin_jit.device import current_device
from marlin_jit.errors import DeviceError
from marlin_jit.launch import architectures

__all__ = ["warmup"]


@click.command()
@click.argument("packed", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help=(
        f"Architecture: {', '.join(architectures())}. May be repeated. Default: that of the current device."
    ),
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["float16", "bfloat16"]),
    help="Only kernels for this type. May be repeated.",
)
@click.option(
    "--group",
    "group_sizes",
    multiple=True,
    type=click.Choice(["32", "64", "128", "-1"]),
    help="Only kernels for this group size. May be repeated.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilations at the same time. Default: one a core."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def warmup(
    packed: tuple[Path, ...],
    archs: tuple[str, ...],
    dtypes: tuple[str, ...],
    group_sizes: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
) -> None:
    """Compile kernels into the cache ahead of time. Needs no GPU.

    With PACKED files or folders (written by `marlin-jit pack`), only kernels for the types and group sizes
    found in them are compiled; otherwise all kernels are.
    """
    wanted_dtypes = set(dtypes)
    wanted_groups = {int(size) for size in group_sizes}
    for path in packed:
        entries = marlin_jit.load(path).entries.values()
        wanted_dtypes |= {entry.dtype for entry in entries}
        wanted_groups |= {entry.group_size for entry in entries}
    chosen = [arch.removeprefix("sm_") for arch in archs] or [_device_arch()]
    only_dtypes = sorted(wanted_dtypes) or None
    only_groups = sorted(wanted_groups) or None
    total = sum(
        len(ahead.select_builds(arch, dtypes=only_dtypes, group_sizes=only_groups)) for arch in chosen
    )

    started = time.perf_counter()
    with Progress(
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=as_json or not Console(stderr=True).is_terminal,
    ) as bar:
        task = bar.add_task("compiling", total=total)
        compiled = ahead.warmup(
            chosen,
            dtypes=only_dtypes,
            group_sizes=only_groups,
            jobs=jobs,
            progress=lambda done, *_: bar.update(task, completed=done),
        )
    seconds = time.perf_counter() - started

    new = Counter(kernel.arch for kernel in compiled if not kernel.cached)
    held = Counter(kernel.arch for kernel in compiled if kernel.cached)
    directory = jit.cache_directory()
    if as_json:
        result = {
            "architectures": {arch: {"compiled": new[arch], "cached": held[arch]} for arch in chosen},
            "seconds": round(seconds, 3),
            "cache": None if directory is None else str(directory),
        }
        print_json(result)
        return
    for arch in chosen:
        print_line(f"sm_{arch}: {new[arch]} compiled, {held[arch]} already in the cache")
    where = "memory only: no cache directory can be written" if directory is None else str(directory)
    print_line(f"{seconds:.1f} s, cache: {where}")


def _device_arch() -> str:
    try:
        return jit.arch_for(current_device().capability, jit.supported_archs())
    except DeviceError as error:
        raise DeviceError(f"{error}; name an architecture with --arch, e.g. --arch 90a") from None
