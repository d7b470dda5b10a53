"""Packing into the Marlin format, its inverse, and dequantization: one code for NumPy and CuPy.

Nothing is looked up in index tables and no word is built by a loop: two codes are joined to a byte, and one
transposing copy puts the bytes in their places (:mod:`marlin_jit.layout`). Codes are never recomputed from
weights, so packing is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from marlin_jit import layout
from marlin_jit._array import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    as_dtype,
    column_chunks,
    is_device_array,
    namespace,
    on_device,
    to_host,
)
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.weight import MarlinWeight, QuantWeight

_PAD_PAIR = 0x88  # two codes 8, which stand for weight 0
_HOST_PAIRS = 1 << 18  # bytes of joined codes at a time


def pack(weight: QuantWeight) -> MarlinWeight:
    """Pack codes into the Marlin format.

    Parameters
    ----------
    weight : QuantWeight
        Any K and N (they are padded); group size 32, 64, 128 or -1. With `g_idx`, rows are sorted by group
        and the order is kept in ``perm``; every group must then have the same number of rows.

    Returns
    -------
    MarlinWeight
        On the same device, with scales of the same dtype. For symmetric weights B and scales are those the
        original packer writes.

    Raises
    ------
    DTypeError
        No QuantWeight.
    ShapeError
        A group size that the format cannot hold, or groups of unequal size.
    ValueRangeError
        A delta that overflows the dtype of the scales, or a weight with a rounding channel, for which the
        format has no place.

    Notes
    -----
    Works on a part at a time: temporary arrays are at most as large as the codes.
    """
    if not isinstance(weight, QuantWeight):
        raise DTypeError(f"expected a QuantWeight, got {type(weight).__name__}")
    size = weight.group_size
    if size not in layout.GROUP_SIZES:
        raise ShapeError(
            f"the Marlin format holds group sizes {layout.GROUP_SIZES}, not {size}; "
            "use the QuantWeight itself, or quantize again with one of these"
        )
    if weight.rounding is not None:
        raise ValueRangeError(
            f"the Marlin format has no place for {weight.rounding}: use the QuantWeight itself, or pack "
            "w.without_rounding() or marlin_jit.rounded(w, iteration)"
        )
    xp = namespace(weight.q)
    K, N = weight.shape
    Kp, Np = layout.padded_shape(K, N, size)
    with on_device(weight.q):
        perm = _sorting_permutation(weight)
        B = xp.empty((Kp // layout.TILE_K, 2 * Np), dtype=np.int32)
        (_fill_on_device if is_device_array(B) else _fill_on_host)(B, weight.q, perm)
        groups = layout.group_count(Kp, size)
        scales = layout.permute_scales(pad_groups(xp, weight.scale, groups, Np))
        delta = None
        if weight.delta is not None:
            delta = layout.permute_scales(pad_groups(xp, weight.delta, groups, Np))
    return MarlinWeight(B, scales, delta, (K, N), size, perm)


def _fill_on_device(B: Array, q: Array, perm: Array | None) -> None:
    """Write codes, their rows in the order `perm`, to B: some columns at a time, each in one strided copy."""
    xp = namespace(B)
    Kp, Np = B.shape[0] * layout.TILE_K, B.shape[1] // 2
    words = layout.word_bytes(B)
    for start, stop in column_chunks(Kp, Np, True, scratch=2):
        codes = q[:, start : min(stop, q.shape[1])]
        if perm is not None:
            codes = codes[perm]
        pairs = _pair_codes(xp, codes, Kp, stop - start)
        words[:, start // layout.CHUNK_N : stop // layout.CHUNK_N] = layout.word_order(pairs)


def _fill_on_host(B: Array, q: Array, perm: Array | None) -> None:
    """Do the same a range of rows at a time, which lie together in memory and stay near the core."""
    tiles, Np = B.shape[0], B.shape[1] // 2
    step = max(1, _HOST_PAIRS // (8 * Np))
    for start in range(0, tiles, step):
        stop = min(start + step, tiles)
        rows = slice(start * layout.TILE_K, stop * layout.TILE_K)
        codes = q[rows] if perm is None else q[perm[rows]]
        layout.copy_in_word_order(B[start:stop], _pair_codes(np, codes, (stop - start) * layout.TILE_K, Np))


def unpack(weight: MarlinWeight) -> QuantWeight:
    """Undo :func:`pack`.

    Returns
    -------
    QuantWeight
        The codes and scales that were packed, rows in source order. ``zero`` is float32, ``delta - 8*scale``,
        which is exactly the packed one wherever ``delta`` was exact (always, for integer zero points).

    Raises
    ------
    DTypeError
        No MarlinWeight.
    """
    if not isinstance(weight, MarlinWeight):
        raise DTypeError(f"expected a MarlinWeight, got {type(weight).__name__}")
    xp = namespace(weight.B)
    K, N = weight.shape
    size = weight.group_size
    groups = layout.group_count(K, size)
    with on_device(weight.B):
        q = xp.empty((K, N), dtype=np.uint8)
        rows = _source_rows(weight)
        for start, stop in column_chunks(*weight.padded_shape, is_device_array(q), scratch=4):
            codes = _split_pairs(weight, start, stop)[rows]
            q[:, start:stop] = codes[:, : min(stop, N) - start]
        scale = xp.ascontiguousarray(layout.permute_scales(weight.scales)[:groups, :N])
        zero = None
        if weight.delta is not None:
            delta = layout.permute_scales(weight.delta)[:groups, :N]
            zero = delta - np.float32(8) * scale.astype(np.float32)
        g_idx = None
        if weight.perm is not None and groups > 1:
            g_idx = xp.empty(K, dtype=np.int32)
            g_idx[weight.perm] = xp.arange(K, dtype=np.int32) // np.int32(size)
    return QuantWeight(q, scale, zero, size, g_idx)


def dequantize(weight: QuantWeight | MarlinWeight, dtype: Any = None) -> Array:
    """Return the weight as a dense array.

    Parameters
    ----------
    weight : QuantWeight or MarlinWeight
    dtype : float16, bfloat16 or float32, optional
        Default: the dtype of the scales.

    Returns
    -------
    array [K, N]
        Rows in source order. Computed in float32, as ``q*scale + zero`` or ``(q - 8)*scale + delta``, and
        rounded once. A rounding channel plays no part, within :func:`marlin_jit.iteration` neither.
    """
    if not isinstance(weight, (QuantWeight, MarlinWeight)):
        raise DTypeError(f"expected a QuantWeight or MarlinWeight, got {type(weight).__name__}")
    dtype = as_dtype(weight.dtype if dtype is None else dtype)
    if dtype not in (FLOAT16, BFLOAT16, FLOAT32):
        raise DTypeError(f"a weight is dequantized to float16, bfloat16 or float32, not {dtype}")
    columns: Callable[[int, int], Array]
    if isinstance(weight, MarlinWeight):
        array, rows, columns = weight.B, weight.padded_shape[0], partial(_marlin_columns, weight)
    else:
        array, rows, columns = weight.q, weight.K, partial(_plain_columns, weight)
    xp = namespace(array)
    with on_device(array), np.errstate(over="ignore"):  # beyond the range of dtype: infinite, as IEEE says
        out = xp.empty(weight.shape, dtype=dtype)
        for start, stop in column_chunks(rows, weight.N, is_device_array(array), scratch=16):
            out[:, start:stop] = columns(start, stop)
    return out


def _plain_columns(weight: QuantWeight, start: int, stop: int) -> Array:
    """Columns `start` to `stop` of a QuantWeight in float32."""
    codes = weight.q[:, start:stop].astype(np.float32)
    scale = weight.scale[:, start:stop].astype(np.float32)
    zero = None if weight.zero is None else weight.zero[:, start:stop].astype(np.float32)
    if weight.g_idx is None:
        value = codes.reshape(weight.groups, -1, stop - start)
        scale = scale[:, None]
        zero = None if zero is None else zero[:, None]
    else:
        value = codes
        scale = scale[weight.g_idx]
        zero = None if zero is None else zero[weight.g_idx]
    if zero is None:
        value -= np.float32(8)
    value *= scale
    if zero is not None:
        value += zero
    return value.reshape(weight.K, stop - start)


def _marlin_columns(weight: MarlinWeight, start: int, stop: int) -> Array:
    """Columns `start` to `stop` of a MarlinWeight in float32, rows in source order."""
    padded_stop = -(-stop // layout.CHUNK_N) * layout.CHUNK_N
    codes = _split_pairs(weight, start, padded_stop)
    value = codes.reshape(weight.groups, -1, padded_stop - start).astype(np.float32)
    value -= np.float32(8)
    value *= layout.permute_scales(weight.scales[:, start:padded_stop]).astype(np.float32)[:, None]
    if weight.delta is not None:
        value += layout.permute_scales(weight.delta[:, start:padded_stop])[:, None]
    return value.reshape(codes.shape)[_source_rows(weight), : stop - start]


def _pair_codes(xp: Any, codes: Array, Kp: int, width: int) -> Array:
    """Join code (16*kt + i, n) and code (16*kt + 8 + i, n) into one byte, padding [K, N] with code 8.

    Returns
    -------
    uint8 array [Kp/16, 8, width]
        The code of the earlier row in the low nibble.
    """
    K, N = codes.shape
    whole = K // layout.TILE_K
    shape = (Kp // layout.TILE_K, 8, width)
    if Kp == K and width == N:
        pairs = xp.empty(shape, dtype=np.uint8)
    else:
        pairs = xp.full(shape, _PAD_PAIR, dtype=np.uint8)
    if whole:
        halves = codes[: whole * layout.TILE_K].reshape(whole, 2, 8, N)
        joined = pairs[:whole, :, :N]
        xp.left_shift(halves[:, 1], np.uint8(4), out=joined)
        xp.bitwise_or(joined, halves[:, 0], out=joined)
    if K % layout.TILE_K:
        last = xp.full((2, 8, N), 8, dtype=np.uint8)
        last.reshape(layout.TILE_K, N)[: K % layout.TILE_K] = codes[whole * layout.TILE_K :]
        pairs[whole, :, :N] = xp.left_shift(last[1], np.uint8(4)) | last[0]
    return pairs


def _split_pairs(weight: MarlinWeight, start: int, stop: int) -> Array:
    """Codes of padded columns `start` to `stop` (multiples of 64): uint8 [Kp, stop - start], packed rows."""
    xp = namespace(weight.B)
    tiles = weight.B.shape[0]
    pairs = xp.empty((tiles, 8, stop - start), dtype=np.uint8)
    chunks = slice(start // layout.CHUNK_N, stop // layout.CHUNK_N)
    layout.word_order(pairs)[...] = layout.word_bytes(weight.B)[:, chunks]
    codes = xp.empty((tiles, 2, 8, stop - start), dtype=np.uint8)
    xp.bitwise_and(pairs, np.uint8(15), out=codes[:, 0])
    xp.right_shift(pairs, np.uint8(4), out=codes[:, 1])
    return codes.reshape(tiles * layout.TILE_K, stop - start)


def _source_rows(weight: MarlinWeight) -> Any:
    """Index that takes packed rows to the K source rows: a slice, or the inverse permutation."""
    if weight.perm is None:
        return slice(0, weight.K)
    xp = namespace(weight.perm)
    inverse = xp.empty_like(weight.perm)
    inverse[weight.perm] = xp.arange(weight.K, dtype=np.int32)
    return inverse


def pad_groups(xp: Any, array: Array, rows: int, columns: int) -> Array:
    """Return `array` [G, N] with zeros appended up to [rows, columns]."""
    if array.shape == (rows, columns):
        return array
    padded = xp.zeros((rows, columns), dtype=array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array
    return padded


def _sorting_permutation(weight: QuantWeight) -> Array | None:
    """Row order that sorts the groups, int32 [K], or None where they are in order already."""
    if weight.g_idx is None:
        return None
    groups = to_host(weight.g_idx)
    rows = np.bincount(groups, minlength=weight.groups)
    uneven = np.flatnonzero(rows != weight.group_size)
    if uneven.size:
        g = int(uneven[0])
        raise ShapeError(
            f"g_idx puts {int(rows[g])} rows in group {g}; the Marlin format needs {weight.group_size} "
            "(the group size) in every group"
        )
    perm = np.argsort(groups, kind="stable").astype(np.int32)
    if np.array_equal(perm, np.arange(weight.K)):
        return None
    return namespace(weight.g_idx).asarray(perm)
