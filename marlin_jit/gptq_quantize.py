"""GPTQ: rounding row by row, each row's error made good by the rows that are still to be rounded.

Min-max quantization keeps every weight near its value; what counts is that ``x @ W`` stays near. With
``H = 2 X^T X`` of some inputs X [T, K] to the layer, errors e [K] of a column of W change its outputs by
``e^T H e / 2`` in all (squared). GPTQ rounds the rows of W [K, N] in order. After row k was rounded with an
error e, the best that a row j > k can do is to move:

    W[j] -= e * U[k, j] / U[k, k]        U upper triangular, U^T U = H^-1

Only the quotient counts, not U: with ``H = T D T^T``, T unit upper triangular and D diagonal (the Cholesky
decomposition of H in reverse order), ``U[k, j] / U[k, k]`` is element (j, k) of the inverse of ``T^T``. It is
called `spread` here: row j takes ``spread[j, k]`` of the error of row k.

- *Dampening*: a share of the mean of H's diagonal is added to the diagonal.
- *Dead inputs*, those that are 0 in all of X, get weight 0 before anything is rounded.
- *Lazy blocks*: within a block of rows errors are gathered; they reach the rows after it in one product.
- *Groups*: scale and zero of a group are those of min-max, for weights as the errors before it left them.
- *Activation order*: rows are rounded by falling diagonal of H, and groups are made in that order.

H is decomposed in float64; weights are updated in float32.

Source: E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", arXiv 2210.17323. Dead inputs, activation order and the moment at which
a group's scale is taken are as in its authors' code (IST-DASLab/gptq), with two differences. The mean of the
diagonal leaves dead inputs out, so that any multiple of H gives the same codes. And groups smaller than a
block see all errors before them, so that the size of a block does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from marlin_jit._array import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    as_integer,
    is_device_array,
    namespace,
    on_device,
    to_host,
)
from marlin_jit.errors import DeviceError, DTypeError, ShapeError, ValueRangeError
from marlin_jit.quantize import Grid, checked_arguments
from marlin_jit.weight import QuantWeight

__all__ = ["gptq", "hessian"]

FLOAT64 = np.dtype(np.float64)

# Columns are independent of each other. On the host the weights of so many at a time stay near the core.
_HOST_COLUMNS, _DEVICE_COLUMNS = 2048, 1 << 16
# How far H may be from symmetric, as a share of its largest diagonal element: sums of many float32 products.
_ASYMMETRY = 1e-4
# Triangles up to this size are inverted by LAPACK, larger ones mostly by matrix products, which are faster.
_SMALL_TRIANGLE = 256
# Bytes of activations, as float32 or float64, that are multiplied at a time.
_CHUNK_BYTES = 64 << 20
_NEARLY_SINGULAR = "errors grow beyond float32: hessian is nearly singular after damping; raise damp"


def gptq(
    w: Array,
    hessian: Array,
    group_size: int = 128,
    symmetric: bool = False,
    dtype: Any = np.float16,
    damp: float = 0.01,
    act_order: bool = False,
    block: int = 128,
) -> QuantWeight:
    """Round a dense weight to 4-bit codes so that its products with typical inputs change least.

    Parameters
    ----------
    w : float16, bfloat16 or float32 array [K, N]
        Finite.
    hessian : float32 or float64 array [K, K]
        ``2 X^T X`` of inputs X [T, K]: see :func:`hessian`. Any positive multiple gives the same codes.
    group_size, symmetric, dtype
        As for :func:`marlin_jit.quantize.quantize`, which also says how scale and zero follow from the range
        of a group.
    damp : float
        Share of the mean diagonal element of `hessian` that is added to its diagonal.
    act_order : bool
        Round the inputs with the largest diagonal elements first. The groups are then made of rows that are
        not neighbours, and the weight has a `g_idx`.
    block : int
        Rows whose errors reach the rows after them together. Changes the speed and the rounding of float32
        sums, nothing else.

    Returns
    -------
    QuantWeight
        On the device of `w`.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        An argument of the wrong kind or size; on a GPU also if cuBLAS or cuSOLVER is not installed.
    ValueRangeError
        NaN or infinite values; a Hessian that is not symmetric, or not positive definite after damping; a
        group whose scale or zero overflows `dtype`.

    Notes
    -----
    Time grows as ``K^3 + K^2 N``; memory, beside the arguments and the result, is about 24 K^2 bytes. With a
    diagonal Hessian the result is that of :func:`marlin_jit.quantize.quantize`.
    """
    if hessian is None:
        raise DTypeError("expected a NumPy or CuPy array, got NoneType")
    xp, dtype, rows = checked_arguments(w, group_size, dtype)
    namespace(w, hessian)
    block = _checked_block(block)
    damp = _checked_damp(damp)
    K, N = w.shape
    with on_device(w), _linear_algebra(w), np.errstate(all="ignore"):
        _check_finite(xp, "w", w)
        diagonal = _checked_diagonal(xp, hessian, K)
        dead = diagonal == 0
        order = _falling(xp, diagonal) if act_order else xp.arange(K)
        spread = _spread(xp, hessian, dead, order, damp)
        q = xp.empty((K, N), dtype=np.uint8)
        scale = xp.empty((K // rows, N), dtype=dtype)
        zero = None if symmetric else xp.empty((K // rows, N), dtype=dtype)
        width = _DEVICE_COLUMNS if is_device_array(w) else _HOST_COLUMNS
        for start in range(0, N, width):
            columns = slice(start, start + width)
            part = w[:, columns].astype(np.float32)
            part[dead] = 0
            part = xp.ascontiguousarray(part[order])
            codes, grids = _round(xp, part, spread, rows, block, symmetric, dtype)
            q[order, columns] = codes
            for g, grid in enumerate(grids):
                scale[g, columns] = grid.scale[0]
                if zero is not None and grid.zero is not None:
                    zero[g, columns] = grid.zero[0]
        g_idx = None
        if act_order:
            g_idx = xp.empty(K, dtype=np.int32)
            g_idx[order] = xp.arange(K, dtype=np.int32) // np.int32(rows)
    return QuantWeight(q, scale, zero, rows, g_idx)


def hessian(x: Array, add_to: Array | None = None) -> Array:
    """Return ``2 X^T X``, which says how much each input, and each pair of inputs, counts.

    Parameters
    ----------
    x : float16, bfloat16, float32 or float64 array [T, K]
        Inputs of a layer, one a row.
    add_to : float64 array [K, K], optional
        What earlier inputs gave. It is changed and returned.

    Returns
    -------
    float64 array [K, K]
        Products are made in float32 (of float64 inputs in float64), some rows at a time, and summed in
        float64.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        An argument of the wrong kind or size; on a GPU also if cuBLAS is not installed.
    ValueRangeError
        NaN or infinite inputs, or a sum that overflows.
    """
    if x is None:
        raise DTypeError("expected a NumPy or CuPy array, got NoneType")
    xp = namespace(x, add_to)
    if x.dtype not in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64):
        raise DTypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.ndim != 2 or 0 in x.shape:
        raise ShapeError(f"x must be a non-empty matrix [T, K], got shape {x.shape}")
    T, K = x.shape
    if add_to is not None and add_to.dtype != FLOAT64:
        raise DTypeError(f"add_to must be float64, got {add_to.dtype}")
    if add_to is not None and add_to.shape != (K, K):
        raise ShapeError(f"add_to must have shape {(K, K)} for x {x.shape}, got {add_to.shape}")
    with on_device(x), _linear_algebra(x), np.errstate(all="ignore"):
        _check_finite(xp, "x", x)
        total = xp.zeros((K, K), dtype=np.float64) if add_to is None else add_to
        kind = FLOAT64 if x.dtype == FLOAT64 else FLOAT32
        step = max(1, _CHUNK_BYTES // (kind.itemsize * K))
        for start in range(0, T, step):
            part = x[start : start + step].astype(kind)
            total += 2 * (part.T @ part)
        if not bool(xp.isfinite(total).all()):
            raise ValueRangeError(f"2 X^T X overflows {kind}; scale the inputs down")
    return total


def _round(
    xp: Any, w: Array, spread: Array, rows: int, block: int, symmetric: bool, dtype: np.dtype[Any]
) -> tuple[Array, list[Grid]]:
    """Round the rows of `w`, float32 [K, n], in their order; `w` is used up.

    Returns
    -------
    codes : uint8 array [K, n]
    grids : list of Grid
        One a group.
    """
    codes = xp.empty(w.shape, dtype=np.uint8)
    grids: list[Grid] = []
    for start, stop in _blocks(len(w), rows, block):
        errors = xp.empty((stop - start, w.shape[1]), dtype=np.float32)
        for k in range(start, stop):
            first = max(start, k - k % rows)  # the errors of rows before it have reached row k
            if k % rows == 0:
                group = w[k : k + rows]
                _reach(group, spread[k : k + rows, start:k], errors[: k - start])
                grids.append(_grid(xp, group, symmetric, dtype))
            value = w[k]
            _reach(value, spread[k, first:k], errors[first - start : k - start])
            codes[k], rounded = _nearest(xp, grids[-1], value)
            errors[k - start] = value - rounded
        _reach(w[stop:], spread[stop:, start:stop], errors)
        if not bool(xp.isfinite(errors).all()):
            raise ValueRangeError(_NEARLY_SINGULAR)
    return codes, grids


def _reach(w: Array, spread: Array, errors: Array) -> None:
    """Let the errors of some rows reach the weights of others."""
    if w.size and len(errors):
        w -= spread @ errors


def _blocks(K: int, rows: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut K rows into blocks of at most `block`; a group that begins within one also ends within it."""
    whole = rows * max(1, block // rows)
    for first in range(0, K, whole):
        last = min(first + whole, K)
        for start in range(first, last, block):
            yield start, min(start + block, last)


def _grid(xp: Any, group: Array, symmetric: bool, dtype: np.dtype[Any]) -> Grid:
    """Return the grid of one group, float32 [rows, n], of weights as they are now."""
    low, high = group.min(axis=0)[None], group.max(axis=0)[None]
    grid = Grid.spanning(xp, low, high, symmetric, dtype)
    finite = xp.isfinite(grid.scale)
    if grid.zero is not None:
        finite &= xp.isfinite(grid.zero)
    if not bool(finite.all()):
        column = int(to_host(finite)[0].argmin())
        start, end = float(low[0, column]), float(high[0, column])
        if not (math.isfinite(start) and math.isfinite(end)):
            raise ValueRangeError(_NEARLY_SINGULAR)
        raise ValueRangeError(
            f"scale or zero of a group overflows {dtype}: with the errors of the rows before it, its values "
            f"are {start:g} to {end:g}"
        )
    return grid


def _nearest(xp: Any, grid: Grid, value: Array) -> tuple[Array, Array]:
    """Return the codes nearest to `value`, float32 [n], and what they stand for."""
    code = grid.codes(xp, value[None, None].copy())[0, 0]
    step = grid.scale[0].astype(np.float32)
    if grid.zero is None:
        return code, (code - np.float32(8)) * step
    return code, code * step + grid.zero[0].astype(np.float32)


# ---- the Hessian ------------------------------------------------------------------------------------------


def _falling(xp: Any, diagonal: Array) -> Array:
    """Return the order in which the diagonal falls; equal elements stay in order."""
    return xp.asarray(np.argsort(-to_host(diagonal), kind="stable"))


def _spread(xp: Any, hessian: Array, dead: Array, order: Array, damp: float) -> Array:
    """Return `spread`, float32 [K, K], for rows in the given order (see the module's text)."""
    reverse = order[::-1]
    # Rows and columns in reverse: the lower Cholesky factor of this is the upper one of H.
    turned = hessian[reverse][:, reverse].astype(np.float64, order="C")
    turned += turned.T.copy()
    turned *= 0.5
    diagonal = turned.diagonal().copy()
    mean = diagonal[diagonal > 0].mean() if bool((diagonal > 0).any()) else xp.ones(())
    # A dead input is coupled to no other: any positive element will do.
    turned.reshape(-1)[:: len(turned) + 1] = xp.where(dead[reverse], mean, diagonal) + damp * mean
    try:
        factor = xp.linalg.cholesky(turned)
    except np.linalg.LinAlgError:
        raise ValueRangeError(
            f"hessian is not positive definite after damping by {damp:g} of its mean diagonal; raise damp"
        ) from None
    del turned
    spread = factor[::-1, ::-1].T / factor.diagonal()[::-1][:, None]
    del factor
    _invert_unit_lower(xp, spread)
    return spread.astype(np.float32, order="C")


def _invert_unit_lower(xp: Any, t: Array) -> None:
    """Invert a lower triangular matrix with ones on its diagonal, in its place."""
    if len(t) <= _SMALL_TRIANGLE:
        t[...] = xp.linalg.inv(t)
        return
    half = len(t) // 2
    _invert_unit_lower(xp, t[:half, :half])
    _invert_unit_lower(xp, t[half:, half:])
    t[half:, :half] = -(t[half:, half:] @ t[half:, :half]) @ t[:half, :half]


# ---- checks -----------------------------------------------------------------------------------------------


def _checked_block(block: int) -> int:
    rows = as_integer("block", block)
    if rows < 1:
        raise ValueRangeError(f"block must be at least 1, got {rows}")
    return rows


def _checked_damp(damp: float) -> float:
    try:
        share = float(damp)
    except (TypeError, ValueError):
        raise DTypeError(f"damp must be a number, got {type(damp).__name__}") from None
    if not (math.isfinite(share) and share >= 0):
        raise ValueRangeError(f"damp must be finite and not negative, got {share}")
    return share


def _checked_diagonal(xp: Any, hessian: Array, K: int) -> Array:
    """Return the diagonal of `hessian`, float64 [K], or raise if that cannot be the Hessian of K inputs."""
    if hessian.dtype not in (FLOAT32, FLOAT64):
        raise DTypeError(f"hessian must be float32 or float64, got {hessian.dtype}")
    if hessian.shape != (K, K):
        raise ShapeError(f"hessian must have shape {(K, K)} for w with K = {K} rows, got {hessian.shape}")
    _check_finite(xp, "hessian", hessian)
    diagonal = hessian.diagonal().astype(np.float64)
    if bool((diagonal < 0).any()):
        i = int(diagonal.argmin())
        raise ValueRangeError(f"hessian has a negative diagonal: [{i}, {i}] is {float(diagonal[i]):g}")
    off = xp.abs(hessian - hessian.T)
    if bool(off.max() > _ASYMMETRY * diagonal.max()):
        i, j = divmod(int(off.argmax()), K)
        values = f"{float(hessian[i, j]):g} and {float(hessian[j, i]):g}"
        raise ValueRangeError(f"hessian is not symmetric: [{i}, {j}] and [{j}, {i}] are {values}")
    coupled = (diagonal == 0) & (hessian != 0).any(axis=1)
    if bool(coupled.any()):
        i = int(coupled.argmax())
        raise ValueRangeError(f"hessian is not positive semi-definite: [{i}, {i}] is 0, but row {i} is not")
    return diagonal


def _check_finite(xp: Any, name: str, array: Array) -> None:
    finite = xp.isfinite(array)
    if not bool(finite.all()):
        i, j = divmod(int(finite.argmin()), array.shape[1])
        raise ValueRangeError(f"{name} must be finite; {name}[{i}, {j}] is {float(to_host(array[i, j]))}")


@contextmanager
def _linear_algebra(array: Array) -> Iterator[None]:
    """On a GPU: failures of cuSOLVER raise, and missing libraries raise as what they are."""
    if not is_device_array(array):
        yield
        return
    import cupyx

    try:
        with cupyx.errstate(linalg="raise"):
            yield
    except ImportError as error:
        raise DeviceError(
            f"GPTQ on a GPU needs cuBLAS and cuSOLVER ({error}): "
            'pip install "cuda-toolkit[cublas,cusolver]==12.*" (or 13.*)'
        ) from error
