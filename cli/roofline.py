"""What ``marlin-jit bench --roofline`` shows: a table over M, and the figure of ``--plot FILE``.

The figure has two panels over M: times beside the floor, both axes logarithmic, and how much of the floor's
speed each library reaches.
"""

from __future__ import annotations

from pathlib import Path

from marlin_jit.cli import picture
from marlin_jit.cli.main import one_line
from marlin_jit.roofline import Point, Rates, Roofline

__all__ = ["VARIANTS", "absent", "draw", "floor_line", "table"]

VARIANTS = {
    "symmetric": "marlin-jit",
    "humming": "humming",
    "native": "native int4",
    "cublas": "cuBLAS fp16",
}
"""Measured variants and their names, in the order of the table and the legend; ours is the first."""

_OURS = "symmetric"
_STYLES = {
    "symmetric": {"color": "#c0392b", "linewidth": 2.2, "marker": "o", "markersize": 4.0, "zorder": 4},
    "humming": {"color": "#2980b9", "linewidth": 1.4, "marker": "s", "markersize": 3.0},
    "native": {"color": "#95a5a6", "linewidth": 1.4, "marker": "^", "markersize": 3.0},
    "cublas": {"color": "#2c3e50", "linewidth": 1.4, "marker": "D", "markersize": 2.6},
}


def floor_line(rates: Rates) -> str:
    """What the floor is made of."""
    line = f"floor: bytes at {rates.bytes_us / 1e6:.2f} TB/s (a copy of device memory)"
    if rates.flops_us is None:
        return f"{line}; the operations are not in it: {rates.reason}"
    return f"{line}, or operations at {rates.flops_us / 1e6:.0f} TFLOP/s (cuBLAS fp16, {rates.gemm_size}^3)"


def absent(roofline: Roofline) -> list[str]:
    """A line for each reason for which something has no time."""
    reasons = dict.fromkeys((r["variant"], r["reason"]) for r in roofline.records if r["reason"])
    return [f"{VARIANTS[variant]}: {reason}" for variant, reason in reasons]


def table(roofline: Roofline) -> tuple[dict[str, str], list[list[str]]]:
    """Columns and rows for `print_table`: a row an M, with a column for each rival that has a time."""
    points = roofline.points
    rivals = [v for v in VARIANTS if v != _OURS and any(v in point.us for point in points)]
    columns = ["M", "us", "floor", "ratio", "achieved", *(VARIANTS[v] for v in rivals)]
    rows = []
    for point in points:
        ours = point.us.get(_OURS)
        ratio = "-" if ours is None else f"{ours / point.floor_us:.2f}"
        others = [_us(point.us.get(v)) for v in rivals]
        rows.append([str(point.m), _us(ours), _us(point.floor_us), ratio, achieved(point), *others])
    return dict.fromkeys(columns, "right"), rows


def achieved(point: Point) -> str:
    """Our rate, in the unit of what bounds the point: ``3.41 TB/s`` or ``655 TFLOP/s``."""
    us = point.us.get(_OURS)
    if us is None:
        return "-"
    return f"{point.nbytes / us / 1e6:.2f} TB/s" if point.moves else f"{point.flops / us / 1e6:.0f} TFLOP/s"


def draw(path: Path, gpu: str, roofline: Roofline, *, force: bool) -> None:
    """Draw the two panels; the file appears when it is complete.

    Raises
    ------
    CheckpointError
        `path` exists and may not be replaced.
    MarlinJitError
        matplotlib is not installed.
    """
    points = sorted(roofline.points, key=lambda point: point.m)
    ms = [point.m for point in points]
    figure = picture.figure_class()(figsize=(11, 4.4), dpi=150, layout="constrained")
    layer = f"K {roofline.k} x N {roofline.n}, group {roofline.group_size}, {roofline.dtype}"
    lines = f"{layer}, on {gpu}", floor_line(roofline.rates)
    figure.suptitle("\n".join(map(one_line, lines)), fontsize=10, parse_math=False)
    times, fractions = figure.subplots(1, 2)
    floor = [point.floor_us for point in points]
    bottom = min([*floor, *(us for point in points for us in point.us.values())]) / 1.6
    times.fill_between(ms, bottom, floor, color="#bdc3c7", alpha=0.35, linewidth=0)
    times.plot(ms, floor, "--", color="#7f8c8d", label="floor")
    fractions.axhline(1, linestyle="--", color="#7f8c8d", linewidth=1.5)
    for variant, label in VARIANTS.items():
        known = [point for point in points if variant in point.us]
        if not known:
            continue
        rows = [point.m for point in known]
        times.plot(rows, [point.us[variant] for point in known], label=label, **_STYLES[variant])
        fractions.plot(rows, [point.fraction(variant) for point in known], **_STYLES[variant])
    times.set(yscale="log", ylabel="microseconds a launch")
    times.set_ylim(bottom=bottom)
    times.yaxis.set_major_formatter("{x:g}")
    fractions.set(ylabel="floor / time")
    fractions.set_ylim(0, max([1.0, *(p.fraction(v) or 0 for p in points for v in p.us)]) * 1.06)
    powers = [m for m in ms if m & (m - 1) == 0] or ms
    for axes in (times, fractions):
        axes.set(xscale="log", xlabel="M (rows of x)")
        axes.set_xticks(powers, [str(m) for m in powers], fontsize=7)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    times.legend(fontsize=8)
    picture.save(figure, path, force=force)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
