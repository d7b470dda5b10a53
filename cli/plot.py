"""The picture that ``marlin-jit inspect --plot FILE`` draws, a row a layer.

On the left |scale| on a logarithmic axis: a thin line from the smallest to the largest, a thick one over the
middle half, a dot at the median. On the right the share of each zero point as a heat map.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marlin_jit.cli import picture
from marlin_jit.cli.main import one_line
from marlin_jit.formats.health import Distribution

__all__ = ["draw"]

_ROW = 0.16  # inches, which a label of 7 points needs
_MOST_INCHES = 60.0  # of rows: 9000 pixels; with more layers than fit, only some are labelled
_LABEL = 60  # characters
_ZERO_POINTS = ("<0", *map(str, range(17)), ">16")


def draw(path: Path, title: str, layers: Sequence[Distribution], *, force: bool) -> None:
    """Draw the distributions of scales and zero points; the file appears when it is complete.

    Raises
    ------
    CheckpointError
        `path` exists and may not be replaced.
    MarlinJitError
        matplotlib is not installed.
    """
    rows = max(len(layers), 1)
    height = min(_ROW * rows, _MOST_INCHES)
    figure = picture.figure_class()(figsize=(12, height + 2), dpi=150, layout="constrained")
    figure.suptitle(one_line(title), fontsize=10, parse_math=False)
    scales, points = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    _draw_scales(scales, layers)
    image = _draw_zero_points(points, layers)
    bar = figure.colorbar(image, ax=points, fraction=0.05, shrink=min(1, 3 / height), anchor=(0, 1))
    bar.ax.tick_params(labelsize=8)
    bar.set_label("share", fontsize=8)
    step = -(-rows // int(_MOST_INCHES / _ROW))
    labels = [_label(layer.name) for layer in layers[::step]]
    # Names are a stranger's text, and a $ in it is no formula.
    scales.set_yticks(range(0, len(layers), step), labels, fontsize=7, parse_math=False)
    scales.set_ylim(rows - 0.5, -0.5)
    for axes in (scales, points):
        axes.tick_params(axis="x", which="both", labeltop=rows > 40, labelsize=8)
    picture.save(figure, path, force=force)


def _draw_scales(axes: Any, layers: Sequence[Distribution]) -> None:
    known = [(row, layer.scale) for row, layer in enumerate(layers) if layer.scale is not None]
    if known:
        rows = [row for row, _ in known]
        low, lower, middle, upper, high = zip(*(spread for _, spread in known), strict=True)
        axes.hlines(rows, low, high, colors="tab:blue", linewidth=1)
        axes.hlines(rows, lower, upper, colors="tab:blue", linewidth=4)
        axes.plot(middle, rows, "o", color="black", markersize=2.5)
    axes.set_xscale("log")
    axes.set_xlabel("|scale|: smallest to largest, middle half, median")
    axes.grid(axis="x", alpha=0.3)


def _draw_zero_points(axes: Any, layers: Sequence[Distribution]) -> Any:
    share = np.array([layer.zero_points for layer in layers]).reshape(len(layers), len(_ZERO_POINTS))
    extent = (-0.5, len(_ZERO_POINTS) - 0.5, max(len(layers), 1) - 0.5, -0.5)
    # Square roots of shares as colours, or the few of 16 would be as pale as nothing.
    norm = importlib.import_module("matplotlib.colors").PowerNorm(0.5, 0, 1)
    image = axes.imshow(
        share if layers else np.zeros((1, len(_ZERO_POINTS))),
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        norm=norm,
        extent=extent,
    )
    axes.set_xticks(range(len(_ZERO_POINTS)), _ZERO_POINTS)
    axes.set_xlabel("zero point (nearest)")
    return image


def _label(name: str) -> str:
    """Return a name as a font can show it, the middle left out where it is long."""
    text = one_line(name).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _LABEL else f"{text[: _LABEL // 3]}...{text[-(2 * _LABEL // 3 - 3) :]}"
