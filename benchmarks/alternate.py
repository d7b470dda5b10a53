"""What zero points, activation order, batch invariance and the correction pair cost, timed in turn.

python -m benchmarks.alternate [-o OUT.json] [--shape 4096x28672] [--m 64] [--passes 7]

Most of this is less than a run drifts: a GPU at its power cap changes its clock by several per cent within a
run. Here every pass takes the symmetric product, then the others, the next pass backwards, and a cost is the
median over the passes of the difference within a pass.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import write_text
from benchmarks.run import environment, parse_shape
from benchmarks.shapes import MS, SHAPES
from marlin_jit import MarlinWeight
from marlin_jit._array import namespace
from marlin_jit.bench import DTYPES, VARIANTS, Problem, Variant, call, read_nvidia_smi
from marlin_jit.device import unavailable_reason
from marlin_jit.timing import CupyTimer, Timer, time_launches

SCHEMA = "marlin-jit-alternation/1"
BASE = "symmetric"
ORDERED = "ordered"  # the same weight with a random activation order
INVARIANT = "invariant"  # the same weight, a row's bits independent of the other rows
PAIR_MAX_M = INVARIANT_MAX_M = 256


def alternate(
    problem: Problem, names: list[str], m: int, timer: Timer, passes: int, **options: Any
) -> dict[str, list[float]]:
    """Microseconds a launch of each variant, one number a pass.

    Raises
    ------
    ValueError
        A result is wrong: nothing is timed then.
    """
    out = problem.output(m)
    products = {name: product_of(problem, name, m) for name in names}
    for name, (variant, x, weights) in products.items():
        call(variant, x, weights[0], out)
        problem.require_right(out, variant.symmetric, f"{name} at M = {m}")
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(passes):
        for name in names if turn % 2 == 0 else names[::-1]:

            def launch(i: int, product: Any = products[name]) -> None:
                variant, x, weights = product
                call(variant, x, weights[i], out)

            taken[name].append(time_launches(launch, problem.copies, timer, **options).us)
    return taken


def product_of(problem: Problem, name: str, m: int) -> tuple[Variant, Any, list[MarlinWeight]]:
    """How, with what activations and which weights a variant is called; the result is the same for all."""
    variant, x = VARIANTS[BASE if name in (ORDERED, INVARIANT) else name], problem.x[:m]
    if name == INVARIANT:
        variant = dataclasses.replace(variant, path="batch_invariant")
    weights = problem.weights(variant.symmetric)
    if name != ORDERED:
        return variant, x, weights
    xp = namespace(x)
    perm = xp.asarray(np.random.default_rng(0).permutation(problem.k).astype(np.int32))
    source = xp.empty_like(x)
    source[:, perm] = x
    return variant, source, [dataclasses.replace(w, perm=perm) for w in weights]


def costs(taken: dict[str, list[float]], name: str) -> tuple[float, float]:
    """Median over the passes of what `name` takes more than `BASE`: microseconds, and a fraction."""
    both = list(zip(taken[name], taken[BASE], strict=True))
    return statistics.median(a - b for a, b in both), statistics.median(a / b - 1 for a, b in both)


def table(points: list[dict[str, Any]]) -> str:
    """One line a point."""
    lines = [
        "    K x N         M  symmetric (us)  zero points  activation order  batch invariant  pair (us more)"
    ]
    for p in points:
        taken = p["us"]
        line = f"{p['k']:6d} x {p['n']:6d} {p['m']:5d} {statistics.median(taken[BASE]):15.1f}"
        line += f" {100 * costs(taken, 'asymmetric')[1]:+11.1f}%"
        for name, width in ((ORDERED, 16), (INVARIANT, 15)):
            line += f" {100 * costs(taken, name)[1]:+{width}.1f}%" if name in taken else " " * (width + 2)
        if "pair" in taken:
            line += f" {costs(taken, 'pair')[0]:15.1f}"
        lines.append(line)
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shape", "shapes", multiple=True, callback=parse_shape, help="KxN; may be repeated.")
@click.option("--m", "ms", multiple=True, type=click.IntRange(1), help="Rows of x; may be repeated.")
@click.option("--group", "group_size", type=click.Choice(["32", "64", "128", "-1"]), default="128")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float16")
@click.option("--passes", type=click.IntRange(1), default=7)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Result file (JSON).")
def main(
    shapes: tuple[tuple[int, int], ...],
    ms: tuple[int, ...],
    group_size: str,
    dtype: str,
    passes: int,
    output: Path | None,
) -> None:
    """Time ours plain, with zero points, in activation order, batch-invariant, and as the correction pair."""
    reason = unavailable_reason()
    if reason is not None:
        click.echo(f"error: {reason}", err=True)
        sys.exit(2)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    smi_before = read_nvidia_smi()
    options = {"replays": 5, "warmup_ms": 8.0, "point_ms": 30.0}
    timer, points = CupyTimer(), []
    for k, n in shapes or SHAPES:
        problem = Problem(k, n, ms or MS, group_size=int(group_size), dtype=dtype)
        for m in ms or MS:
            names = [BASE, "asymmetric", ORDERED]
            names += [INVARIANT] if m <= INVARIANT_MAX_M else []
            names += ["pair"] if m <= PAIR_MAX_M else []
            points.append(
                {"k": k, "n": n, "m": m, "us": alternate(problem, names, m, timer, passes, **options)}
            )
        del problem
    click.echo(table(points))
    if output is not None:
        document = {
            "schema": SCHEMA,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "environment": environment(smi_before, read_nvidia_smi()),
            "method": {**options, "passes": passes, "group_size": int(group_size), "dtype": dtype},
            "points": points,
        }
        write_text(output, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
