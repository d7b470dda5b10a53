"""Products to compare kernels with, from plain codes and in float64, independent of the package's kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from marlin_jit import QuantWeight
from marlin_jit.launch import Matrix

_SOURCE = r"""
extern "C" __global__ void product(const double* x, const double* w, double* c, int m, int n, int k) {
    int column = blockIdx.x * 128 + threadIdx.x;
    if (column >= n) return;
    for (int row = blockIdx.y; row < m; row += gridDim.y) {
        double sum = 0;
        for (int i = 0; i < k; i++) sum += x[(long long)row * k + i] * w[(long long)i * n + column];
        c[(long long)row * n + column] = sum;
    }
}
"""


@cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(_SOURCE, "product")


def product(x: Any, w: Any) -> Any:
    """``x @ w`` in float64, one thread an output (no cuBLAS needed)."""
    import cupy

    m, k = x.shape
    n = w.shape[1]
    c = cupy.empty((m, n))
    args = (cupy.ascontiguousarray(x), cupy.ascontiguousarray(w), c, np.int32(m), np.int32(n), np.int32(k))
    _kernel()((-(-n // 128), min(m, 65535)), (128,), args)
    return c


def weight64(qw: QuantWeight) -> Any:
    """``q*scale + zero`` in float64 [K, N]."""
    import cupy

    groups = qw.groups
    size = qw.K if qw.group_size == -1 else qw.group_size
    of = cupy.arange(qw.K) // size if qw.g_idx is None else qw.g_idx
    assert int(of.max()) < groups
    scale = qw.scale.astype(np.float64)
    zero = -8 * scale if qw.zero is None else qw.zero.astype(np.float64)
    return qw.q.astype(np.float64) * scale[of] + zero[of]


def relative_error(y: Any, exact: Any) -> float:
    """Frobenius norm of the difference over that of the exact product; infinite if anything is not finite."""
    import cupy

    y = y.astype(np.float64)
    if not bool(cupy.isfinite(y).all()):
        return float("inf")
    return float(cupy.sqrt(((y - exact) ** 2).sum() / (exact**2).sum()))


def random_weight(
    rng: np.random.Generator,
    K: int,
    N: int,
    group_size: int,
    *,
    symmetric: bool,
    dtype: Any,
    real_zero: bool = False,
) -> QuantWeight:
    """Random codes with scales near 0.01 on the GPU; zero points 0..15, or real zeros."""
    import cupy

    groups = 1 if group_size == -1 else K // group_size
    q = cupy.asarray(rng.integers(0, 16, (K, N), dtype=np.uint8))
    scale = cupy.asarray((0.005 + 0.01 * rng.random((groups, N))).astype(np.float32).astype(dtype))
    if symmetric:
        return QuantWeight(q, scale, None, group_size)
    if real_zero:
        zero = cupy.asarray((-0.1 + 0.05 * rng.standard_normal((groups, N))).astype(np.float32).astype(dtype))
        return QuantWeight(q, scale, zero, group_size)
    points = cupy.asarray(rng.integers(0, 16, (groups, N), dtype=np.uint8))
    return QuantWeight.from_zero_points(q, scale, points, group_size)


def exact_weight(
    rng: np.random.Generator, K: int, N: int, group_size: int, dtype: Any, *, exponents: tuple[int, int]
) -> tuple[QuantWeight, Any]:
    """A weight with integer zero points on the GPU, and its values in float64 (NumPy).

    Scales are powers of two, of exponents from the first to below the second: products with `exact_rows` are
    sums without rounding.
    """
    import cupy

    groups = 1 if group_size == -1 else K // group_size
    q = rng.integers(0, 16, (K, N), dtype=np.uint8)
    scale = (2.0 ** rng.integers(*exponents, (groups, N))).astype(np.float32)
    points = rng.integers(0, 16, (groups, N), dtype=np.uint8)
    wide_scale, wide_points = (np.repeat(v.astype(np.float64), K // groups, axis=0) for v in (scale, points))
    given = (cupy.asarray(v) for v in (q, scale.astype(dtype), points))
    return QuantWeight.from_zero_points(*given, group_size), (q - wide_points) * wide_scale


def exact_rows(rng: np.random.Generator, M: int, K: int, dtype: Any) -> tuple[Any, Any]:
    """Activations in {-1, 0, 1} on the GPU, and the same in float64 (NumPy)."""
    import cupy

    a = rng.integers(-1, 2, (M, K)).astype(np.float64)
    return cupy.asarray(a.astype(np.float32).astype(dtype)), a


def matrix(array: Any) -> Matrix:
    """An array of rows as launchers take it."""
    return Matrix(array.data.ptr, array.strides[0] // 2, *array.shape)


def random_rows(rng: np.random.Generator, M: int, K: int, dtype: Any) -> Any:
    import cupy

    return cupy.asarray(rng.standard_normal((M, K)).astype(np.float32).astype(dtype))


def poisoned(M: int, N: int, dtype: Any) -> tuple[Any, Any]:
    """An output of NaN within a buffer of a canary value: (output, check that the canary is intact)."""
    import cupy

    guard = 64
    buffer = cupy.full((M * N + 2 * guard,), 12345.0, dtype=np.float32).astype(dtype)
    canary = buffer[:guard].copy()
    out = buffer[guard : guard + M * N].reshape(M, N)
    out[...] = np.nan

    def intact() -> bool:
        return bool((buffer[:guard] == canary).all() and (buffer[guard + M * N :] == canary).all())

    return out, intact
