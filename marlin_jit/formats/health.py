"""What the scales and zero points of a layer look like: what is odd about them, and how they are spread.

Nothing here refuses anything: it is what `marlin-jit inspect` reports, also of files that `pack` refuses. All
indices are [group, column] in plain order, also for files that store scales in Marlin order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import Parameters, SourceLayer
from marlin_jit.formats.marlin_files import MarlinLayer
from marlin_jit.formats.packed import PackedLayer
from marlin_jit.layout import permute_scales
from marlin_jit.weight import QuantWeight

__all__ = ["PROBLEMS", "Distribution", "Finding", "Grid", "distribution", "findings", "read_grid"]

PROBLEMS = {
    "nan": "NaN",
    "infinite": "infinite",
    "negative": "negative",
    "zero": "zero",
    "overflow": "so large that (8 - zero point)*scale overflows",
    "out_of_range": "outside 0..15",
}
"""Problems of a `Finding`, in words that follow "are"."""

_MAX_CODE = 15
_ZERO_SUFFIXES = (".qzeros", ".weight_zero_point", ".zp", ".delta")


@dataclass(frozen=True)
class Finding:
    """Values of one tensor with one problem.

    Attributes
    ----------
    tensor : str
        Full name.
    problem : str
        A key of `PROBLEMS`.
    count, size : int
        How many values have it, of how many.
    first : tuple of int
        [group, column] of the first one.
    """

    tensor: str
    problem: str
    count: int
    size: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        what = "zero points" if self.problem == "out_of_range" else "values"
        return (
            f"{self.tensor}: {self.count} of {self.size} {what} are {PROBLEMS[self.problem]}, the first at "
            f"{list(self.first)}"
        )


@dataclass(frozen=True)
class Grid:
    """Scales and zero points of a layer in plain order, without padding.

    Attributes
    ----------
    scale : float16 or bfloat16 [G, N]
    zero_point : float32 [G, N] or None
        Integers, or ``-zero/scale``, which is NaN where the scale is 0. None if it is 8 everywhere or is not
        known without reading the codes.
    delta : float32 [G, N] or None
        ``(8 - zero_point)*scale``, what the packed file stores; None where `zero_point` is.
    """

    scale: NDArray[Any]
    zero_point: NDArray[np.float32] | None
    delta: NDArray[np.float32] | None


@dataclass(frozen=True)
class Distribution:
    """How the scales and zero points of a layer are spread.

    Attributes
    ----------
    name : str
    scale : tuple of float or None
        Minimum, lower quartile, median, upper quartile and maximum of |scale|, over those that are finite and
        not 0; None where there is none.
    zero_points : float64 [19]
        Share of zero points that are below 0, nearest to 0, 1, ..., 16, and above 16.
    """

    name: str
    scale: tuple[float, float, float, float, float] | None
    zero_points: NDArray[np.float64]


def read_grid(layer: SourceLayer, found: Parameters, *, codes: bool = False) -> Grid:
    """Return the scales and zero points of a layer, `found` by its `parameters`.

    Parameters
    ----------
    layer : SourceLayer
    found : Parameters
    codes : bool
        Also read the codes where real zeros come only with them (GGUF).
    """
    scale = _plain(layer, found, found.scale)
    if found.symmetric:
        return Grid(scale, None, None)
    wide = scale.astype(np.float32)
    with np.errstate(all="ignore"):
        if found.zero_point is not None:
            zero_point = _plain(layer, found, found.zero_point).astype(np.float32)
            return Grid(scale, zero_point, (np.float32(8) - zero_point) * wide)
        if isinstance(layer, PackedLayer):
            delta = _plain(layer, found, layer.files.read(f"{layer.name}.delta"))
        elif codes and (zero := _real_zeros(layer)) is not None:
            delta = zero + np.float32(8) * wide
        else:
            return Grid(scale, None, None)
        return Grid(scale, np.where(wide == 0, np.float32(np.nan), np.float32(8) - delta / wide), delta)


def findings(layer: SourceLayer, grid: Grid) -> tuple[Finding, ...]:
    """Return what is odd about scales and zero points, those of the scales first."""
    found = _odd_scales(layer.scale_name, grid)
    return tuple(finding for finding in (*found, *_odd_zero_points(layer, grid)) if finding.count)


def distribution(name: str, grid: Grid, *, symmetric: bool) -> Distribution:
    """Return how scales and zero points are spread; `symmetric` zero points are all 8."""
    sizes = np.abs(grid.scale.astype(np.float32))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    low, lower, middle, upper, high = np.quantile(sizes, (0, 0.25, 0.5, 0.75, 1)) if sizes.size else [0.0] * 5
    spread = (float(low), float(lower), float(middle), float(upper), float(high)) if sizes.size else None
    points = np.full(1, 8, np.float32) if symmetric else np.zeros(0, np.float32)
    if grid.zero_point is not None:
        points = grid.zero_point[~np.isnan(grid.zero_point)]
    nearest = np.clip(np.rint(points), -1, _MAX_CODE + 2).astype(np.int64)
    counts = np.bincount(nearest + 1, minlength=_MAX_CODE + 4)
    return Distribution(name, spread, counts / max(points.size, 1))


def _real_zeros(layer: SourceLayer) -> NDArray[np.float32] | None:
    """Return `QuantWeight.zero`; None where a layer cannot be read, as with NaN among its scales."""
    try:
        weight = layer.read()
    except CheckpointError:
        return None
    return weight.zero if isinstance(weight, QuantWeight) else None


def _plain(layer: SourceLayer, found: Parameters, values: NDArray[Any]) -> NDArray[Any]:
    """Return values [G, N] in plain order and without padding, however the layer stores them."""
    if not isinstance(layer, (MarlinLayer, PackedLayer)):
        return values
    groups = 1 if found.group_size == -1 else found.K // found.group_size
    plain: NDArray[Any] = permute_scales(values)[:groups, : found.N]
    return plain


def _odd_scales(tensor: str, grid: Grid) -> Iterator[Finding]:
    scale = grid.scale.astype(np.float32)
    yield _finding(tensor, "nan", np.isnan(scale))
    yield _finding(tensor, "infinite", np.isinf(scale))
    yield _finding(tensor, "negative", scale < 0)
    yield _finding(tensor, "zero", scale == 0)
    if grid.delta is not None:
        with np.errstate(over="ignore"):
            kernels_read = grid.delta.astype(grid.scale.dtype).astype(np.float32)
        yield _finding(tensor, "overflow", np.isinf(kernels_read) & np.isfinite(scale))


def _odd_zero_points(layer: SourceLayer, grid: Grid) -> Iterator[Finding]:
    if grid.zero_point is None or grid.delta is None:
        return
    tensor = next((name for name in layer.tensors if name.endswith(_ZERO_SUFFIXES)), layer.scale_name)
    yield _finding(tensor, "nan", np.isnan(grid.delta) & np.isfinite(grid.scale.astype(np.float32)))
    known = np.isfinite(grid.zero_point)
    if (grid.zero_point[known] == np.rint(grid.zero_point[known])).all():  # real ones may be anywhere
        outside = known & ((grid.zero_point < 0) | (grid.zero_point > _MAX_CODE))
        yield _finding(tensor, "out_of_range", outside)


def _finding(tensor: str, problem: str, bad: NDArray[np.bool_]) -> Finding:
    count = int(np.count_nonzero(bad))
    first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape)) if count else ()
    return Finding(tensor, problem, count, bad.size, first)
