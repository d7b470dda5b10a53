"""8-bit weights on the 4-bit path: one INT4 GEMM with K doubled, without loss.

An 8-bit code is two 4-bit ones: ``q = 16*hi + lo`` with ``hi = q >> 4`` in -8..7 and ``lo = q & 15`` in
0..15. So a weight ``d*q`` is the sum of two 4-bit weights,

    d*q = (hi + 8 - 8) * 16*d  +  lo * d

the upper one symmetric with scale 16*d, the lower one with zero point 0 and scale d. Stacked along K they are
one 4-bit weight of 2K rows, and

    x @ W = [x, x] @ [W_hi; W_lo]

Scales are multiplied by a power of two, which float16 does exactly, and sums are accumulated in float32 as
always: what an 8-bit kernel would give. It suits output heads, which lose most by 4 bits, and the Q8_0
tensors of GGUF files, whose weights come back as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import marlin_jit as mj

from .ops import module_of

__all__ = ["doubled", "quantize_8bit"]

_CHUNK = 1 << 22  # weights quantized at a time: bounds temporary arrays


def quantize_8bit(dense: Any, group_size: int = 32, dtype: Any = np.float16) -> mj.QuantWeight:
    """Round a dense weight to symmetric 8-bit codes and write them as one 4-bit weight of twice the rows.

    Parameters
    ----------
    dense : float16, bfloat16 or float32 array [K, N]
        NumPy or CuPy. Finite.
    group_size : int
        Rows that share a scale; a divisor of K.
    dtype : float16 or bfloat16
        Of the scales, ``max|w|/127`` of each group.

    Returns
    -------
    QuantWeight
        [2K, N]: the upper nibbles of all rows, then the lower ones. Multiply with `doubled` activations.

    Raises
    ------
    ShapeError
        `dense` has not two dimensions or is empty, or `group_size` does not divide K.
    DTypeError
        Another dtype.
    ValueRangeError
        Values that are not finite, or so large that 16 times the scale overflows `dtype`.

    Notes
    -----
    A weight that Q8_0 (groups of 32, a code of 127 or -127 in each) was dequantized to in float32 gets back
    its codes and scales.
    """
    if not hasattr(dense, "dtype"):
        raise mj.DTypeError(f"a weight is a NumPy or CuPy array, got {type(dense).__name__}")
    if dense.ndim != 2:
        raise mj.ShapeError(f"a weight has two dimensions [K, N], got shape {dense.shape}")
    K, N = dense.shape
    if str(dense.dtype) not in ("float16", "bfloat16", "float32"):
        raise mj.DTypeError(f"a weight is float16, bfloat16 or float32, got {dense.dtype}: convert it")
    if not dense.size:
        raise mj.ShapeError(f"the weight is empty: its shape is {dense.shape}")
    if group_size < 1 or K % group_size:
        raise mj.ShapeError(f"group size {group_size} does not divide K = {K}")
    xp = module_of(dense)
    q = xp.empty((2 * K, N), dtype=np.uint8)
    scale = xp.empty((2 * K // group_size, N), dtype=dtype)
    zero = xp.zeros(scale.shape, dtype=np.float32)
    groups = K // group_size
    step = max(1, _CHUNK // K)
    for start in range(0, N, step):
        columns = slice(start, min(start + step, N))
        # Columns as rows: a head comes as the transpose of an embedding, so this reads memory in order.
        w = xp.ascontiguousarray(dense[:, columns].T).astype(np.float32).reshape(-1, groups, group_size)
        with np.errstate(over="ignore", invalid="ignore"):
            d = (xp.abs(w).max(axis=2) / np.float32(127)).astype(dtype).astype(np.float32)
            if not bool(xp.isfinite((16 * d).astype(dtype).astype(np.float32)).all()):
                raise mj.ValueRangeError(
                    f"weights must be finite, and 16/127 of the largest in a group must fit {np.dtype(dtype)}"
                )
            codes = xp.rint(w / xp.where(d == 0, np.float32(1), d)[:, :, None])
        codes = xp.clip(codes, -128, 127).astype(np.int8).reshape(-1, K).T
        q[:K, columns] = ((codes >> 4) + 8).astype(np.uint8)
        q[K:, columns] = (codes & 15).astype(np.uint8)
        scale[:groups, columns] = (16 * d.T).astype(dtype)
        scale[groups:, columns] = d.T.astype(dtype)
        zero[:groups, columns] = -128 * d.T
    return mj.QuantWeight(q, scale, zero, group_size)


def doubled(x: Any) -> Any:
    """Return ``[x, x]`` along the last axis: [..., K] becomes [..., 2K]."""
    out = module_of(x).empty((*x.shape[:-1], 2, x.shape[-1]), dtype=x.dtype)
    out[...] = x[..., None, :]
    return out.reshape(*x.shape[:-1], 2 * x.shape[-1])
