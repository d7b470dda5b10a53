"""Check the planner against measurement: how far is the plan that it chooses from the best one?

python -m benchmarks.sweep [-o OUT.json] [--shape 4096x4096] [--m 16] [--group 32] [--zeros points]

Of each problem the plans that it thinks within 1.3 times the best are timed, in turn, as `marlin_jit.tune`
does. A result file holds every plan with its predicted and its measured time: what the model is fitted to.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from benchmarks.report import align, compact, number, write_text
from benchmarks.run import Budget, environment, parse_shape
from benchmarks.shapes import SHAPES
from marlin_jit import autotune, plan
from marlin_jit.bench import DTYPES, random_weight, read_nvidia_smi
from marlin_jit.device import unavailable_reason
from marlin_jit.timing import CupyTimer

SCHEMA = "marlin-jit-sweep/1"
OTHER_SHAPES = ((4096, 6144), (2560, 6912), (4224, 5002), (5120, 13824), (13824, 5120), (8192, 57344))
MS = (
    *(16, 24, 32, 48, 64, 80, 96, 100, 112, 128, 160, 192, 200, 224, 256, 300, 320, 384, 448, 512),
    *(640, 700, 768, 896, 1024, 1280, 1536, 2048, 2500, 3072, 4096, 6144, 8192),
)
"""33 numbers of rows: with ten layers 330 problems."""
NEAR = 0.05
"""How far from the best, as a fraction, a plan may be that counts as well chosen."""

_ROUNDS, _SAMPLE_US = 5, 600.0
_OF_THE_WEIGHT = ("BF16", "GROUP", "ZEROS")
Record = dict[str, Any]


def name_of(p: plan.Plan) -> str:
    """What tells a plan from the others of its problem: kernel, build constants, schedule."""
    macros = " ".join(f"{name}={value}" for name, value in p.build.macros if name not in _OF_THE_WEIGHT)
    return f"{p.build.name} {macros} grid={'x'.join(map(str, p.grid))} split={p.split_tiles} each={p.each}"


def records_of(k: int, n: int, m: int, found: Sequence[plan.Plan], times: Iterable[float]) -> list[Record]:
    """One record a plan, the planner's own first: the problem, measured and predicted time, and the plan."""
    what = {"k": k, "n": n, "m": m}
    return [
        what | {"us": round(us, 2), "predicted": round(p.microseconds, 2), "plan": name_of(p)}
        for p, us in zip(found, times, strict=True)
    ]


def losses(records: Iterable[Record]) -> list[Record]:
    """By problem: k, n, m, the chosen plan's time `us`, the `best` one's, and the excess, `loss`."""
    found = []
    for (k, n, m), of_problem in groupby(records, key=lambda r: (r["k"], r["n"], r["m"])):
        us = [record["us"] for record in of_problem]
        found.append({"k": k, "n": n, "m": m, "us": us[0], "best": min(us), "loss": us[0] / min(us) - 1})
    return found


def summary(records: Sequence[Record], worst: int = 8) -> str:
    """How many problems got a plan near the best, and those farthest from it."""
    all_of = losses(records)
    near = sum(one["loss"] <= NEAR for one in all_of)
    mean = statistics.mean(one["loss"] for one in all_of)
    lines = [
        f"{len(records)} plans of {len(all_of)} problems timed: the chosen one is within {NEAR:.0%} of the "
        f"best at {near / len(all_of):.1%} of them, {mean:.2%} over it in the mean"
    ]
    rows = [["K x N", "M", "chosen us", "best us", "loss"]]
    for one in sorted(all_of, key=lambda one: -one["loss"])[:worst]:
        layer = f"{one['k']} x {one['n']}", str(one["m"])
        rows.append([*layer, number(one["us"]), number(one["best"]), f"{one['loss']:.1%}"])
    return "\n".join([*lines, *align(rows)])


def sweep_layer(
    k: int, n: int, ms: Sequence[int], group: int, dtype: str, zeros: plan.Zeros, budget: Budget
) -> tuple[list[Record], bool]:
    """Time the plans of one layer; the records, and whether time sufficed for all M."""
    weight = random_weight(k, n, group, DTYPES[dtype], zeros)
    tried = autotune.candidates(weight, ms)
    weights, x, timer = autotune.rotated(weight), autotune.random_rows(weight, max(ms)), CupyTimer()
    records: list[Record] = []
    for problem, found in tried:
        if budget.left < 1.0:
            return records, False
        rows = x[: problem.m]
        times = autotune.time_plans(found, weights, rows, timer, rounds=_ROUNDS, sample_us=_SAMPLE_US)
        records += records_of(k, n, problem.m, found, times)
    return records, True


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shape", "shapes", multiple=True, callback=parse_shape, help="KxN; may be repeated.")
@click.option("--m", "ms", multiple=True, type=click.IntRange(1), help="Rows of x; may be repeated.")
@click.option("--group", type=click.Choice(["32", "64", "128", "-1"]), default="128")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float16")
@click.option("--zeros", type=click.Choice([z.name.lower() for z in plan.Zeros]), default="none")
@click.option(
    "--max-seconds", type=click.FloatRange(10), default=120.0, help="Stop and report after this time."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Result file (JSON).")
def main(
    shapes: tuple[tuple[int, int], ...],
    ms: tuple[int, ...],
    group: str,
    dtype: str,
    zeros: str,
    max_seconds: float,
    output: Path | None,
) -> None:
    """Time the plans that the planner thinks good, and say how good its choice among them is."""
    reason = unavailable_reason()
    if reason is not None:
        click.echo(f"error: {reason}", err=True)
        sys.exit(2)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    budget = Budget(max_seconds)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    smi_before = read_nvidia_smi()
    records: list[Record] = []
    complete = True
    for k, n in shapes or (*SHAPES, *OTHER_SHAPES):
        click.echo(f"K {k} x N {n}: {budget.spent:.0f} s spent", err=True)
        which = sorted(set(ms or MS)), int(group), dtype, plan.Zeros[zeros.upper()]
        found, complete = sweep_layer(k, n, *which, budget)
        records += found
        if not complete:
            click.echo("incomplete: the time allowed was spent", err=True)
            break
    if not records:
        click.echo("error: no time was left to measure anything", err=True)
        sys.exit(2)
    click.echo(summary(records))
    data = {
        "schema": SCHEMA,
        "date": date,
        "environment": environment(smi_before, read_nvidia_smi()),
        "method": {"group_size": int(group), "dtype": dtype, "zeros": zeros, "rounds": _ROUNDS}
        | {"sample_us": _SAMPLE_US, "statistic": "median over rounds, microseconds a launch"},
        "seconds": round(budget.spent, 1),
        "complete": complete,
        "records": records,
    }
    if output is not None:
        write_text(output, compact(data, "records") + "\n")


if __name__ == "__main__":
    main()
