"""``marlin-jit tune [PACKED]...``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import marlin_jit
from marlin_jit.autotune import MS
from marlin_jit.bench import DTYPES, random_weight
from marlin_jit.cli.options import check_group
from marlin_jit.cli.show import print_json, print_line, print_table
from marlin_jit.device import current_device
from marlin_jit.formats.packed import PackedModel
from marlin_jit.plan import Zeros
from marlin_jit.tuned import Tuning, identity, path_for
from marlin_jit.weight import MarlinWeight, packed_points_below_8

__all__ = ["tune"]

_ZEROS = {"none": Zeros.NONE, "integer": Zeros.POINTS, "real": Zeros.DELTAS}


@click.command(context_settings={"show_default": True})
@click.argument("packed", nargs=-1, type=click.Path(path_type=Path))
@click.option("--m", "ms", multiple=True, type=click.IntRange(1), help="Rows of x; may be repeated.")
@click.option("--k", type=click.IntRange(1), help="Input features of a random layer, in place of PACKED.")
@click.option("--n", type=click.IntRange(1), help="Its output features.")
@click.option("--group", type=click.Choice(["32", "64", "128", "-1"]), default="128", help="Its group size.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float16", help="Of its scales and x.")
@click.option("--zeros", type=click.Choice(list(_ZEROS)), default="none", help="Its zero points.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=10.0, help="Time for each kind of layer."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
def tune(
    packed: tuple[Path, ...],
    ms: tuple[int, ...],
    k: int | None,
    n: int | None,
    group: str,
    dtype: str,
    zeros: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Time plans for layers on this machine's GPU, and keep the fastest for later products.

    With PACKED files or folders (written by `marlin-jit pack`), each kind of layer in them is tuned for:
    shape, group size, type and zero points. Otherwise give --k and --n.

    Without this, plans come from a model of the work, which is a few per cent off. The last bits of results
    may change with the plan.
    """
    if bool(packed) == bool(k or n) or bool(k) != bool(n):
        raise click.UsageError("give PACKED, or both --k and --n")
    if k:
        check_group(k, int(group))
    gpu = current_device().name
    layers = _layers(packed)
    if k and n:
        layers = iter([random_weight(k, n, int(group), DTYPES[dtype], _ZEROS[zeros])])
    found: list[tuple[MarlinWeight, Tuning]] = []
    console = Console(stderr=True)
    with console.status("tuning", spinner="dots"):
        for w in layers:
            found += [(w, one) for one in marlin_jit.tune(w.to_device(), ms or MS, seconds=seconds)]
    path = path_for(gpu)
    if as_json:
        print_json({"gpu": gpu, "file": str(path), "tuned": [_record(w, one) for w, one in found]})
        return
    of_layer = ("K", "N", "group", "dtype", "zeros", "M")
    headings = (*of_layer, "planned us", "best us", "gain", "plans tried", "kernel")
    print_table(dict.fromkeys(headings, "right"), [_row(w, one) for w, one in found])
    print_line(f"kept in {path}")


def _layers(packed: tuple[Path, ...]) -> Iterator[MarlinWeight]:
    """The first layer of each kind: of the others no codes are read."""
    seen = set()
    for path in packed:
        model = marlin_jit.load(path)
        for name, entry in model.entries.items():
            kind = replace(entry, source_format=""), _zeros_of(model, name)
            if kind not in seen:
                seen.add(kind)
                yield model[name]


def _zeros_of(model: PackedModel, name: str) -> Zeros:
    """The kind of a layer's zero points, which its metadata does not tell: as `MarlinWeight.points16`."""
    if f"{name}.delta" not in model.files:
        return Zeros.NONE
    points = packed_points_below_8(model.files.read(f"{name}.s"), model.files.read(f"{name}.delta"))
    return Zeros.DELTAS if points is None else Zeros.POINTS


def _record(w: MarlinWeight, one: Tuning) -> dict[str, Any]:
    layer = {"k": w.K, "n": w.N, "group_size": w.group_size, "dtype": str(w.dtype)}
    layer |= {"zeros": _zeros_name(one), "m": one.problem.m}
    times = {"planned_us": one.planned_us, "us": one.us, "tried": one.tried}
    return layer | times | {"plan": identity(one.plan)}


def _row(w: MarlinWeight, one: Tuning) -> list[str]:
    gain = f"{100 * (1 - one.us / one.planned_us):.1f}%" if one.us < one.planned_us else "-"
    kind = [str(w.K), str(w.N), str(w.group_size), str(w.dtype), _zeros_name(one), str(one.problem.m)]
    return [*kind, f"{one.planned_us:.1f}", f"{one.us:.1f}", gain, str(one.tried), one.plan.build.name]


def _zeros_name(one: Tuning) -> str:
    return next(name for name, zeros in _ZEROS.items() if zeros == one.problem.zeros)
