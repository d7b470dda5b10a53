"""Min-max quantization: from a dense weight to 4-bit codes, group by group, without calibration data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from marlin_jit._array import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    as_dtype,
    as_integer,
    column_chunks,
    is_device_array,
    namespace,
    on_device,
    to_host,
)
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.rounding import channel
from marlin_jit.weight import SCALE_DTYPES, QuantWeight

_LEVELS = np.float32(15)
"""Steps between the lowest code and the highest."""


def quantize(
    w: Array,
    group_size: int = 128,
    symmetric: bool = False,
    dtype: Any = np.float16,
    rounding: Literal["frac4", "sign_bit"] | None = None,
) -> QuantWeight:
    """Round a dense weight to 4-bit codes, spreading them evenly over the range of each group.

    Parameters
    ----------
    w : float16, bfloat16 or float32 array [K, N]
        Finite.
    group_size : int
        Rows that share a scale: any divisor of K, or -1 for all of a column. :func:`marlin_jit.pack.pack`
        takes 32, 64, 128 and -1.
    symmetric : bool
        False: codes span minimum to maximum (``scale = (max - min)/15``, ``zero = min``). True: codes span
        ``-7.5*scale`` to ``7.5*scale``, with ``scale = max|w|/7.5`` and code 8 at 0.
    dtype : float16 or bfloat16
        Dtype of scale and zero.
    rounding : {None, "frac4", "sign_bit"}
        The channel for cross-iteration rounding that the weight carries (:mod:`marlin_jit.rounding`): for
        each weight the four bits of its code's fraction, or on which side of its code it lies. Codes, scale
        and zero are the same with and without.

    Returns
    -------
    QuantWeight
        On the device of `w`. Codes are chosen against the scale and zero as stored, so no element is further
        from its code's value than half a scale, plus what the rounding of scale and zero to `dtype` may cut
        off at the ends of the range. A group that is constant is kept exactly, as far as `dtype` can hold the
        constant (asymmetric: scale 0; symmetric: code 7, 8 or 9).

    Raises
    ------
    DTypeError, ShapeError
        An argument of the wrong kind, a group size that does not divide K.
    ValueRangeError
        NaN or infinite weights, a group whose scale or zero overflows `dtype`, or no such `rounding`.

    Notes
    -----
    Works on ranges of columns, so temporary arrays stay small beside `w`.
    """
    xp, dtype, rows = checked_arguments(w, group_size, dtype)
    if rounding not in (None, "frac4", "sign_bit"):
        raise ValueRangeError(f'rounding must be None, "frac4" or "sign_bit", got {rounding!r}')
    K, N = w.shape
    with on_device(w), np.errstate(over="ignore", invalid="ignore"):
        q = xp.empty((K, N), dtype=np.uint8)
        scale = xp.empty((K // rows, N), dtype=dtype)
        zero = None if symmetric else xp.empty((K // rows, N), dtype=dtype)
        channels = {} if rounding is None else {rounding: xp.empty((K, N), dtype=np.uint8)}
        for start, stop in column_chunks(K, N, is_device_array(w), scratch=16):
            columns = slice(start, stop)
            values = w[:, columns].astype(np.float32).reshape(K // rows, rows, stop - start)
            grid = Grid.spanning(xp, values.min(axis=1), values.max(axis=1), symmetric, dtype)
            scale[:, columns] = grid.scale
            if zero is not None:
                zero[:, columns] = grid.zero
            if rounding is None:
                codes = grid.codes(xp, values)
            else:
                codes, residual = grid.codes_and_residuals(xp, values)
                sides = channel(xp, rounding, codes, residual)
                channels[rounding][:, columns] = sides.reshape(K, stop - start)
            q[:, columns] = codes.astype(np.uint8).reshape(K, stop - start)
        _check_range(xp, w, rows, scale, zero)
    return QuantWeight(q, scale, zero, group_size, **channels)


def checked_arguments(w: Array, group_size: int, dtype: Any) -> tuple[Any, np.dtype[Any], int]:
    """Return the module of `w`, the dtype of the scales and the rows of a group, or raise as `quantize`."""
    if w is None:
        raise DTypeError("expected a NumPy or CuPy array, got NoneType")
    xp = namespace(w)
    dtype = as_dtype(dtype)
    if w.dtype not in (FLOAT16, BFLOAT16, FLOAT32):
        raise DTypeError(f"w must be float16, bfloat16 or float32, got {w.dtype}")
    if dtype not in SCALE_DTYPES:
        raise DTypeError(f"dtype must be float16 or bfloat16, got {dtype}")
    if w.ndim != 2 or 0 in w.shape:
        raise ShapeError(f"w must be a non-empty matrix [K, N], got shape {w.shape}")
    K = w.shape[0]
    rows = K if group_size == -1 else as_integer("group_size", group_size)
    if rows < 1 or K % rows:
        raise ShapeError(f"group size {group_size} does not divide K = {K} (the rows of w)")
    return xp, dtype, rows


@dataclass(frozen=True)
class Grid:
    """Which values the 16 codes of some groups stand for.

    Attributes
    ----------
    scale : array [G, n]
    zero : array [G, n] or None
        As stored; None puts code 8 at 0.
    """

    scale: Array
    zero: Array | None

    @classmethod
    def spanning(cls, xp: Any, low: Array, high: Array, symmetric: bool, dtype: np.dtype[Any]) -> Grid:
        """Return the grid of groups whose values reach from `low` to `high`, float32 [G, n]."""
        if symmetric:
            return cls(_symmetric_scale(xp, low, high).astype(dtype), None)
        # Divided first: high - low may overflow.
        return cls((high / _LEVELS - low / _LEVELS).astype(dtype), low.astype(dtype))

    def codes(self, xp: Any, values: Array) -> Array:
        """Return the nearest codes of `values`, float32 [G, rows, n], in their place."""
        steps = self._steps(xp, values)
        codes = xp.rint(steps, out=steps)
        if self.zero is None:
            codes += np.float32(8)
        return codes

    def codes_and_residuals(self, xp: Any, values: Array) -> tuple[Array, Array]:
        """Return the nearest codes of `values`, float32 [G, rows, n], and how far above them these lie.

        In steps of the scale, within -1/2..1/2; values beyond the outer codes count as if they were those.
        """
        steps = self._steps(xp, values)
        codes = xp.rint(steps)
        steps -= codes
        if self.zero is None:
            codes += np.float32(8)
        return codes, steps

    def _steps(self, xp: Any, values: Array) -> Array:
        """Return `values` in steps from the zero (or from code 8) in their place, kept within the codes."""
        step = self.scale.astype(np.float32)
        if self.zero is not None:
            # At half their size, since the difference of two large values may overflow.
            values *= np.float32(0.5)
            values -= np.float32(0.5) * self.zero.astype(np.float32)[:, None]
            step *= np.float32(0.5)
        # Dividing by infinity puts every value of a group without scale at the code of its zero.
        step = xp.where(step == 0, np.float32(np.inf), step)
        values /= step[:, None]
        first = 0 if self.zero is not None else -8
        return xp.clip(values, first, first + 15, out=values)


def _symmetric_scale(xp: Any, low: Array, high: Array) -> Array:
    """Scale of groups between `low` and `high` when code 8 is 0."""
    largest = xp.maximum(-low, high)
    # A constant is one step from 0, which is exact; spread over 7.5 steps it would fall between two codes.
    return xp.where(low == high, largest, largest / np.float32(7.5))


def _check_range(xp: Any, w: Array, rows: int, scale: Array, zero: Array | None) -> None:
    """Raise if a scale or zero is not finite, saying whether the weight or `dtype` is to blame."""
    finite = xp.isfinite(scale)
    if zero is not None:
        finite &= xp.isfinite(zero)
    if bool(finite.all()):
        return
    group, column = (int(i) for i in np.argwhere(~to_host(finite))[0])
    values = to_host(w[group * rows : (group + 1) * rows, column]).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        row = group * rows + int(bad[0])
        raise ValueRangeError(f"w must be finite; w[{row}, {column}] is {values[bad[0]]}")
    raise ValueRangeError(
        f"scale or zero of {int((~finite).sum())} groups overflows {scale.dtype}; the first is group {group} "
        f"of column {column}, with values {values.min()} to {values.max()}"
    )
