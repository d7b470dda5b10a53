"""``marlin-jit bench``: our paths beside cuBLAS and the native kernel, on this machine."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from marlin_jit.bench import DTYPES, device_facts, measure_layer
from marlin_jit.cli.show import print_json, print_line, print_table
from marlin_jit.errors import ShapeError

__all__ = ["bench"]

_DEFAULT_M = (1, 16, 64, 256, 1024)
_COLUMNS = {
    "symmetric": "symmetric",
    "asymmetric": "asymmetric",
    "pair": "correction pair",
    "native": "native int4",
    "cublas": "cuBLAS fp16",
}
"""Measured variants and their headings, in the table's order."""


@click.command(context_settings={"show_default": True})
@click.option("--m", "ms", multiple=True, type=click.IntRange(1), help="Rows of x; may be repeated.")
@click.option("--k", type=click.IntRange(1), default=4096, help="Input features of the layer.")
@click.option("--n", type=click.IntRange(1), default=14336, help="Output features of the layer.")
@click.option("--group", type=click.Choice(["32", "64", "128", "-1"]), default="128", help="Group size.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float16", help="Of x and the result.")
@click.option("--json", "as_json", is_flag=True, help="Write everything measured as JSON.")
def bench(ms: tuple[int, ...], k: int, n: int, group: str, dtype: str, as_json: bool) -> None:
    """Time the kernels on this machine.

    A random layer is multiplied by each path, checked against float64, and timed with a cold L2 cache in CUDA
    graph replays. Times are medians in microseconds a launch. Nothing is read or written but the kernel
    cache.
    """
    ms = ms or _DEFAULT_M
    group_size = int(group)
    if group_size != -1 and k % group_size:
        raise ShapeError(f"group size {group_size} does not divide K = {k}: choose another --k or --group")
    facts = device_facts()
    console = Console(stderr=True)
    with console.status("preparing a random layer") as status:
        records = measure_layer(
            k, n, ms, group_size=group_size, dtype=dtype, progress=lambda text: status.update(text)
        )
    if as_json:
        print_json({"device": facts, "unit": "microseconds a launch, median", "records": records})
        return
    print_line(f"{facts['gpu']}, K {k} x N {n}, group size {group_size}, {dtype}; microseconds a launch")
    print_table(*result_table(records))
    for variant, reason in failures(records):
        print_line(f"{_COLUMNS[variant]}: {reason}")


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


def failures(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Variant and reason of what was not timed, each once."""
    return list(dict.fromkeys((r["variant"], r["reason"]) for r in records if r["reason"]))


def _speedup(other: float | None, ours: float | None) -> str:
    return "-" if other is None or ours is None else f"{other / ours:.2f}"
