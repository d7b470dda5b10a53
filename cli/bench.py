"""``marlin-jit bench``: our paths beside cuBLAS and the native kernel, on this machine.

With ``--host`` what a call costs the host instead, with ``--roofline`` how far times are from the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from marlin_jit.bench import DTYPES, Problem, device_facts, measure_layer
from marlin_jit.cli import picture, roofline
from marlin_jit.cli.options import check_group
from marlin_jit.cli.show import print_json, print_line, print_table
from marlin_jit.host_cost import measure_host
from marlin_jit.roofline import MS, measure_roofline

__all__ = ["bench"]

_LAYER, _MS = (4096, 14336), (1, 16, 64, 256, 1024)
_HOST_LAYER, _HOST_MS = (1024, 1024), (1, 16)  # so small that the device is never behind the host
_COLUMNS = {
    "symmetric": "symmetric",
    "asymmetric": "asymmetric",
    "pair": "correction pair",
    "native": "native int4",
    "cublas": "cuBLAS fp16",
}
"""Measured variants and their headings, in the table's order."""
_CALLS = {
    "out": "matmul(x, w, out=out)",
    "new": "matmul(x, w)",
    "first": "matmul(x, w, out=out), first with this M",
}


@click.command(context_settings={"show_default": True})
@click.option("--m", "ms", multiple=True, type=click.IntRange(1), help="Rows of x; may be repeated.")
@click.option(
    "--k", type=click.IntRange(1), show_default="4096; with --host 1024", help="Input features of the layer."
)
@click.option(
    "--n",
    type=click.IntRange(1),
    show_default="14336; with --host 1024",
    help="Output features of the layer.",
)
@click.option("--group", type=click.Choice(["32", "64", "128", "-1"]), default="128", help="Group size.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float16", help="Of x and the result.")
@click.option("--host", is_flag=True, help="Time the host's part of a call instead.")
@click.option("--roofline", "over_m", is_flag=True, help="Times over M beside the floor of this device.")
@click.option(
    "--plot",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the roofline to FILE (.png or .svg). Needs matplotlib.",
)
@click.option("--force", is_flag=True, help="Replace FILE of --plot if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Write everything measured as JSON.")
def bench(
    ms: tuple[int, ...],
    k: int | None,
    n: int | None,
    group: str,
    dtype: str,
    host: bool,
    over_m: bool,
    file: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Time the kernels on this machine.

    A random layer is multiplied by each path, checked against float64, and timed with a cold L2 cache in CUDA
    graph replays. Times are medians in microseconds a launch. Nothing is read or written but the kernel
    cache, and FILE.

    With --host, what one call of matmul takes on the host. With --roofline, our times over M beside the
    floor, which is measured too, and beside the other libraries that are installed.
    """
    if host and over_m:
        raise click.UsageError("--host and --roofline measure different things: give one of them")
    if file is not None and not over_m:
        raise click.UsageError("--plot draws the roofline: also give --roofline")
    if force and file is None:
        raise click.UsageError("--force replaces a picture: also give --plot FILE")
    if file is not None:
        picture.check(file, force=force)
    usual_k, usual_n = _HOST_LAYER if host else _LAYER
    k, n, group_size = k or usual_k, n or usual_n, int(group)
    check_group(k, group_size)
    if host:
        _bench_host(k, n, ms or _HOST_MS, group_size, dtype, as_json)
    elif over_m:
        _bench_roofline(k, n, ms or MS, group_size, dtype, as_json, file, force)
    else:
        _bench_layer(k, n, ms or _MS, group_size, dtype, as_json)


def _bench_layer(k: int, n: int, ms: tuple[int, ...], group_size: int, dtype: str, as_json: bool) -> None:
    facts = device_facts()
    with _preparing() as progress:
        records = measure_layer(k, n, ms, group_size=group_size, dtype=dtype, progress=progress)
    if as_json:
        print_json({"device": facts, "unit": "microseconds a launch, median", "records": records})
        return
    print_line(f"{facts['gpu']}, K {k} x N {n}, group size {group_size}, {dtype}; microseconds a launch")
    print_table(*result_table(records))
    for variant, reason in failures(records):
        print_line(f"{_COLUMNS[variant]}: {reason}")


def _bench_host(k: int, n: int, ms: tuple[int, ...], group_size: int, dtype: str, as_json: bool) -> None:
    facts = device_facts()
    with _preparing() as progress:
        problem = Problem(k, n, ms, group_size=group_size, dtype=dtype, copies=1)
        records = measure_host(problem, ms, progress=progress)
    if as_json:
        layer = {"k": k, "n": n, "group_size": group_size, "dtype": dtype}
        print_json({"device": facts, "layer": layer, "unit": "microseconds a call", "records": records})
        return
    print_line(
        f"{facts['gpu']}, K {k} x N {n}, group size {group_size}, {dtype}; the host's microseconds a call"
    )
    print_table(*host_table(records))
    for reason in dict.fromkeys(f"M = {r['m']}: {r['reason']}" for r in records if r["reason"]):
        print_line(reason)


def _bench_roofline(
    k: int,
    n: int,
    ms: tuple[int, ...],
    group_size: int,
    dtype: str,
    as_json: bool,
    file: Path | None,
    force: bool,
) -> None:
    facts = device_facts()
    with _preparing() as progress:
        found = measure_roofline(k, n, ms, group_size=group_size, dtype=dtype, progress=progress)
    if as_json:
        print_json({"device": facts, "unit": "microseconds a launch, median", **found.as_dict()})
    else:
        print_line(f"{facts['gpu']}, K {k} x N {n}, group size {group_size}, {dtype}; microseconds a launch")
        print_line(roofline.floor_line(found.rates))
        print_table(*roofline.table(found))
        for line in roofline.absent(found):
            print_line(line)
    if file is not None:
        roofline.draw(file, facts["gpu"], found, force=force)


@contextmanager
def _preparing() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done; yield what changes the text."""
    with Console(stderr=True).status("preparing a random layer") as status:
        yield lambda text: status.update(text)


def result_table(records: list[dict[str, Any]]) -> tuple[dict[str, str], list[list[str]]]:
    """Columns and rows for `print_table`: a row an M, then how much faster the symmetric kernel is."""
    times = {(r["m"], r["variant"]): r["us"] for r in records}
    columns = ["M", *_COLUMNS.values(), "x cuBLAS", "x native"]
    rows = []
    for m in dict.fromkeys(r["m"] for r in records):
        ours = times.get((m, "symmetric"))
        cells = [times.get((m, variant)) for variant in _COLUMNS]
        speedups = [_speedup(times.get((m, other)), ours) for other in ("cublas", "native")]
        rows.append([str(m), *("-" if us is None else f"{us:.1f}" for us in cells), *speedups])
    return dict.fromkeys(columns, "right"), rows


def host_table(records: list[dict[str, Any]]) -> tuple[dict[str, str], list[list[str]]]:
    """Columns and rows for `print_table`: a row an M and kind of call."""
    columns = {"M": "right", "call": "left", "best": "right", "median": "right", "path": "left"}
    rows = []
    for r in records:
        times = ["-" if us is None else f"{us:.2f}" for us in (r["best_us"], r["median_us"])]
        rows.append([str(r["m"]), _CALLS[r["call"]], *times, r["path"]])
    return columns, rows


def failures(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Variant and reason of what was not timed, each once."""
    return list(dict.fromkeys((r["variant"], r["reason"]) for r in records if r["reason"]))


def _speedup(other: float | None, ours: float | None) -> str:
    return "-" if other is None or ours is None else f"{other / ours:.2f}"
