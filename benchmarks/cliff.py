"""Look for numbers of rows at which the symmetric product takes longer than with more rows.

python -m benchmarks.cliff [-o OUT.json] [--plot OUT.svg] [--shape 4096x28672] [--max-seconds 60]

Kernels, tiles and schedules change with M; where the planner changes them badly, time over M has a cliff. The
other benchmarks time powers of two and would not see it. Float16, groups of 128.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from benchmarks.plot import require_matplotlib, save
from benchmarks.report import align, compact, fraction, number, write_text
from benchmarks.run import Budget, environment, parse_shape
from benchmarks.shapes import SHAPES
from marlin_jit import launch, timing
from marlin_jit.bench import BUSY_FIELDS, VARIANTS, Problem, call, read_nvidia_smi
from marlin_jit.device import unavailable_reason
from marlin_jit.dispatch import Explanation, explain
from marlin_jit.timing import CupyTimer, Timer, Timing, time_launches

SCHEMA = "marlin-jit-cliff/1"
MAX_M = 8192
RANDOM_ROWS, SEED = 100, 0
NOISE = 0.05
"""By how much time may fall as M grows before it counts."""
OVER_ALIGNED = 1.15
"""What time may be over that of the next M that fills its tiles."""
PASSES = 2
OPTIONS: dict[str, Any] = {"replays": 5, "warmup_ms": 4.0, "point_ms": 12.0}
"""Of `time_launches`: little of each M, since there are many, and each is taken several times."""

_GROUP_SIZE, _DTYPE = 128, "float16"
_OURS = VARIANTS["symmetric"]
_BUSY_US = 0.5e6  # nvidia-smi starts, and reads, within that


def aligned(m: int) -> int:
    """`m`, or the next larger M that fills tiles: a multiple of 8 up to 32, of 16 up to 128, of 128 above."""
    tile = 8 if m <= 32 else 16 if m <= 128 else 128
    return -(-m // tile) * tile


def rows_to_time(most: int = MAX_M, count: int = RANDOM_ROWS, seed: int = SEED) -> list[int]:
    """Numbers of rows, ascending: where kernels change, at random, and what each is compared with.

    Parameters
    ----------
    most : int
        The largest, a power of two.
    count : int
        Random ones among them, log-uniform, beside the powers of two and their neighbours.
    seed : int
        Of the random ones.

    Returns
    -------
    list of int
        With every M its `aligned` one.
    """
    near = {(1 << i) + d for i in range(most.bit_length()) for d in (-1, 0, 1)}
    regular = {m for m in near if 1 <= m <= most}
    draw, drawn = random.Random(seed), set[int]()
    while len(drawn) < count:
        drawn.add(int((most + 1) ** draw.random()))
        drawn -= regular
    chosen = regular | drawn
    return sorted(chosen | {aligned(m) for m in chosen})


def falls(times: Mapping[int, float], tolerance: float = NOISE) -> list[dict[str, Any]]:
    """Where time falls as M grows.

    Parameters
    ----------
    times : mapping of int to float
        Microseconds by M.
    tolerance : float
        A fraction: time over that of a larger M by no more than this is noise.

    Returns
    -------
    list of dict
        By M: m, us, and the larger M that takes least, later_m and later_us. Of several that take least, the
        largest.
    """
    found = []
    best: tuple[float, int] | None = None
    for m in sorted(times, reverse=True):
        us = times[m]
        if best is not None and us > (1 + tolerance) * best[0]:
            found.append({"m": m, "us": us, "later_m": best[1], "later_us": best[0]})
        if best is None or us < best[0]:
            best = us, m
    return found[::-1]


def over_aligned(times: Mapping[int, float], limit: float = OVER_ALIGNED) -> list[dict[str, Any]]:
    """Where rows that fill tiles only in part take longer than full tiles would.

    Parameters
    ----------
    times : mapping of int to float
        Microseconds by M. An M whose `aligned` one was not timed is passed over.
    limit : float
        What time may be over that of the aligned M.

    Returns
    -------
    list of dict
        By M: m, us, aligned_m, aligned_us.
    """
    pairs = [(m, aligned(m)) for m in sorted(times) if aligned(m) in times]
    return [
        {"m": m, "us": times[m], "aligned_m": full, "aligned_us": times[full]}
        for m, full in pairs
        if times[m] > limit * times[full]
    ]


def point(k: int, n: int, m: int, passes: Sequence[Timing], how: Explanation) -> dict[str, Any]:
    """What is written of one M: the median over the samples of all passes, and what was launched."""
    plan = how.plan
    return {
        "k": k,
        "n": n,
        "m": m,
        "us": round(timing.merge(passes).us, 4),
        "pass_us": [round(taken.us, 4) for taken in passes],
        "kernel": how.path if plan is None else plan.build.name,
        "m_tile": None if plan is None else plan.build.defines.get("M_TILE"),
    }


def document(
    points: Sequence[dict[str, Any]],
    *,
    date: str,
    environment: dict[str, Any],
    tolerance: float,
    seconds: float,
    complete: bool,
    passes: int = PASSES,
) -> dict[str, Any]:
    """The object that a result file holds: how it was measured, the cliffs found, and all points."""
    by_layer: dict[tuple[int, int], dict[int, float]] = {}
    for p in points:
        by_layer.setdefault((p["k"], p["n"]), {})[p["m"]] = p["us"]

    def of_all(rule: Callable[[dict[int, float]], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [{"k": k, "n": n} | found for (k, n), times in by_layer.items() for found in rule(times)]

    return {
        "schema": SCHEMA,
        "date": date,
        "environment": environment,
        "method": {
            **OPTIONS,
            "passes": passes,
            "group_size": _GROUP_SIZE,
            "dtype": _DTYPE,
            "rotated_bytes": timing.ROTATED_BYTES,
            "random_rows": RANDOM_ROWS,
            "seed": SEED,
            "tolerance": tolerance,
            "over_aligned": OVER_ALIGNED,
            "statistic": "median over the samples of all passes, microseconds a launch",
        },
        "seconds": round(seconds, 1),
        "complete": complete,
        "falls": of_all(lambda times: falls(times, tolerance)),
        "over_aligned": of_all(over_aligned),
        "points": list(points),
    }


def summary(data: dict[str, Any]) -> str:
    """What was found, a line a cliff."""
    lines = [] if data["complete"] else ["incomplete: the time allowed was spent"]
    for rule, other, title in (
        ("falls", "later", f"time falls by more than {100 * data['method']['tolerance']:g}% as M grows"),
        ("over_aligned", "aligned", f"more than {OVER_ALIGNED:g} times the next M that fills its tiles"),
    ):
        lines.append(f"{title}: {len(data[rule]) or 'nowhere'}")
        rows = []
        for c in data[rule]:
            other_m, other_us = c[f"{other}_m"], c[f"{other}_us"]
            cells = [f"{c['k']} x {c['n']}", str(c["m"]), number(c["us"]), str(other_m), number(other_us)]
            rows.append([*cells, fraction(c["us"] / other_us)])
        if rows:
            lines += align([["K x N", "M", "us", f"{other} M", "us", "ratio"], *rows])
    return "\n".join(lines)


def time_pass(
    problem: Problem,
    ms: Iterable[int],
    out: Any,
    timer: Timer,
    budget: Budget,
    taken: dict[int, list[Timing]],
) -> bool:
    """Time the product once at each M, in this order, and add it to `taken`; False if time ran out.

    Parameters
    ----------
    problem : Problem
    ms : iterable of int
    out : array
        Memory for the result of the most rows; fewer rows are written into its first ones.
    timer : Timer
    budget : Budget
    taken : dict of int to list of Timing
    """
    for m in ms:
        if budget.left < 1.0:
            return False
        timed = time_launches(product(problem, m, out), problem.copies, timer, **OPTIONS)
        taken.setdefault(m, []).append(timed)
    return True


def product(problem: Problem, m: int, out: Any) -> Callable[[int], None]:
    """What launches the product of `m` rows with copy i of the weight."""
    x, y, weights = problem.x[:m], out[:m], problem.weights(_OURS.symmetric)

    def run(i: int) -> None:
        call(_OURS, x, weights[i], y)

    return run


def read_busy(run: Callable[[int], None], copies: int, us: float, timer: Timer) -> dict[str, str]:
    """Clock and power, read while as many launches as fill half a second are queued."""
    count = math.ceil(_BUSY_US / us)

    def keep_busy() -> None:
        for i in range(count):
            run(i % copies)

    timer.run(keep_busy)
    reading = read_nvidia_smi(BUSY_FIELDS)
    timer.synchronize()
    return reading


def measure_layer(
    k: int, n: int, ms: Sequence[int], timer: Timer, budget: Budget, passes: int = PASSES
) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """Time one layer at every M: the points, a reading of clock and power, whether all passes were made.

    Every other pass goes backwards: a GPU at its power limit gets slower while it is measured, which would
    make a slope of a single pass.

    Raises
    ------
    ValueError
        The product of the most rows is wrong: nothing is timed then.
    """
    problem = Problem(k, n, ms, group_size=_GROUP_SIZE, dtype=_DTYPE)
    most, out, weight = max(ms), problem.output(max(ms)), problem.weights(_OURS.symmetric)[0]
    how = {m: explain(problem.x[:m], weight) for m in ms}
    planned = {e.plan.build: e.plan for e in how.values() if e.plan is not None}
    launch.load_all(planned.values())  # before anything is timed
    call(_OURS, problem.x[:most], weight, out[:most])
    problem.require_right(out[:most], _OURS.symmetric, f"{k} x {n} at M = {most}")
    taken: dict[int, list[Timing]] = {}
    reading: dict[str, Any] = {"k": k, "n": n, "m": most}
    complete = time_pass(problem, ms, out, timer, budget, taken)
    if complete:  # the GPU is as hot as it gets here
        reading |= read_busy(product(problem, most, out), problem.copies, taken[most][0].us, timer)
    for turn in range(1, passes):
        order = ms[::-1] if turn % 2 else ms
        complete = complete and time_pass(problem, order, out, timer, budget, taken)
    return [point(k, n, m, taken[m], how[m]) for m in ms if m in taken], reading, complete


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw time over M, a line a layer, as SVG: the same bytes from the same document."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for k, n in dict.fromkeys((p["k"], p["n"]) for p in data["points"]):
        mine = sorted((p["m"], p["us"]) for p in data["points"] if (p["k"], p["n"]) == (k, n))
        axes.plot(
            [m for m, _ in mine], [us for _, us in mine], marker=".", linewidth=1, label=f"K {k} x N {n}"
        )
    axes.set(xscale="log", yscale="log", xlabel="M (rows of x)", ylabel="microseconds a launch")
    powers = [1 << i for i in range(MAX_M.bit_length())]
    axes.set_xticks(powers, [str(m) for m in powers], fontsize=8)
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path, "svg", salt=SCHEMA)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shape", "shapes", multiple=True, callback=parse_shape, help="KxN; may be repeated.")
@click.option(
    "--tolerance", type=click.FloatRange(0), default=NOISE, help="Fraction by which time may fall as M grows."
)
@click.option("--passes", type=click.IntRange(1), default=PASSES, help="Times every M is taken.")
@click.option(
    "--max-seconds", type=click.FloatRange(10), default=60.0, help="Stop and report after this time."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Result file (JSON).")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture of times over M (SVG)."
)
def main(
    shapes: tuple[tuple[int, int], ...],
    tolerance: float,
    passes: int,
    max_seconds: float,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Time the symmetric product over M = 1 to 8192 and list the M that take longer than larger ones."""
    budget = Budget(max_seconds)
    reason = unavailable_reason()
    if reason is not None:
        click.echo(f"error: {reason}", err=True)
        sys.exit(2)
    if plot is not None:
        require_matplotlib()  # said before minutes are spent
    for path in (output, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    smi_before = read_nvidia_smi()
    ms, timer = rows_to_time(), CupyTimer()
    points: list[dict[str, Any]] = []
    readings: list[dict[str, Any]] = []
    complete = True
    for k, n in shapes or SHAPES:
        click.echo(f"K {k} x N {n}: {budget.spent:.0f} s spent", err=True)
        found, reading, complete = measure_layer(k, n, ms, timer, budget, passes)
        points += found
        readings.append(reading)
        if not complete:
            break
    data = document(
        points,
        date=date,
        environment=environment(smi_before, read_nvidia_smi()) | {"nvidia_smi_during": readings},
        tolerance=tolerance,
        seconds=budget.spent,
        complete=complete,
        passes=passes,
    )
    click.echo(summary(data))
    if output is not None:
        write_text(output, compact(data, "points") + "\n")
    if plot is not None:
        draw(data, plot)


if __name__ == "__main__":
    main()
