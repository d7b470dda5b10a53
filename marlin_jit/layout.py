"""Where things sit in the Marlin format: one closed form for the codes, one for the scales.

The format is that of IST-DASLab/marlin. A weight [K, N] of 4-bit codes becomes int32 words ``B[K/16, 2N]``:
row ``kt`` holds the 16 weight rows from ``16*kt``, and a word holds the eight codes that one lane of a warp
feeds to one ``mma.m16n8k16``. With the bits of k and n written out,

    k = 16*kt + 8*b3 + 2*t + b0         n = 64*c + 16*j + 8*b + g

(t, j in 0..3; g in 0..7; b3, b0, b in 0..1) the code (k, n) is nibble ``r = 4*b0 + 2*b + b3`` of word ``128*c
+ 16*g + 4*t + j``. So lane ``4*g + t`` reads its four words, one for each 16-column tile j, as one 16-byte
vector.
"""

from __future__ import annotations

from math import lcm

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import Array, namespace

TILE_K = 16
"""Weight rows in one row of B."""
CHUNK_N = 64
"""Weight columns in one permutation block; the columns of a packed weight are a multiple of this."""
CHUNK_K = 64
"""The rows of a packed weight are a multiple of this (and of the group size)."""
GROUP_SIZES = (32, 64, 128, -1)
"""Group sizes a packed weight may have; -1 is one group a column."""


def padded_shape(K: int, N: int, group_size: int) -> tuple[int, int]:
    """Return the shape (Kp, Np) that a logical [K, N] weight is padded to.

    Kp is a multiple of 64 and of the group size, Np a multiple of 64.
    """
    step = CHUNK_K if group_size == -1 else lcm(CHUNK_K, group_size)
    return -(-K // step) * step, -(-N // CHUNK_N) * CHUNK_N


def group_count(K: int, group_size: int) -> int:
    """Return the number of scale rows of a weight with K rows (K a multiple of the group size)."""
    return 1 if group_size == -1 else K // group_size


def code_position(k: Array | int, n: Array | int) -> tuple[Array, Array, Array]:
    """Return where code (k, n) sits: row and column of its word in B, and the shift of its nibble there.

    Plain integers or integer arrays. Packing itself moves whole arrays (:func:`word_order`); this is the same
    rule, one code at a time.
    """
    lane = 4 * (n & 7) + ((k & 7) >> 1)
    word = 128 * (n >> 6) + 4 * lane + ((n >> 4) & 3)
    nibble = 4 * (k & 1) + 2 * ((n >> 3) & 1) + ((k >> 3) & 1)
    return k >> 4, word, 4 * nibble


def word_bytes(B: Array) -> Array:
    """View B, contiguous int32 [T, 2N], as bytes: uint8 [T, N/64 (c), 8 (g), 4 (t), 4 (j), 2 (b0), 2 (b)].

    Words are little-endian, so byte ``2*b0 + b`` of a word holds nibbles ``4*b0 + 2*b`` (b3 = 0) and the next
    (b3 = 1).
    """
    rows, words = B.shape
    return B.view(np.uint8).reshape(rows, words // 128, 8, 4, 4, 2, 2)


def word_order(pairs: Array) -> Array:
    """View nibble pairs, uint8 [T, 8, N], in the axis order of :func:`word_bytes`.

    ``pairs[kt, i, n]`` is code (16*kt + i, n) in its low nibble and code (16*kt + 8 + i, n) in its high one.
    """
    rows, _, columns = pairs.shape
    t_b0_c_j_b_g = pairs.reshape(rows, 4, 2, columns // CHUNK_N, 4, 2, 8)
    return t_b0_c_j_b_g.transpose(0, 3, 6, 1, 4, 2, 5)


def copy_in_word_order(B: NDArray[np.int32], pairs: NDArray[np.uint8]) -> None:
    """Do ``word_bytes(B)[...] = word_order(pairs)`` on the host, in a quarter of the time.

    NumPy copies bytes that are neither neighbours here nor there one by one. But of the axes (b0, b, g) of
    nibble pairs g comes last, eight bytes at a time, and becomes the first of the axes (g, b0, b) of words:
    four numbers of 64 bits, one for each (b0, b), become eight of 32 bits by exchanging bytes, then pairs of
    bytes.
    """
    rows, _, columns = pairs.shape
    octets = pairs.view(np.uint64).reshape(rows, 4, 2, columns // CHUNK_N, 4, 2)  # [T, t, b0, c, j, b] of g
    words = B.view(np.uint32).reshape(rows, columns // CHUNK_N, 8, 4, 4)  # [T, c, g, t, j]
    even_0, odd_0 = _interleaved(octets[:, :, 0, ..., 0], octets[:, :, 0, ..., 1], 8)
    even_1, odd_1 = _interleaved(octets[:, :, 1, ..., 0], octets[:, :, 1, ..., 1], 8)
    for first, (low, high) in ((0, _interleaved(even_0, even_1, 16)), (1, _interleaved(odd_0, odd_1, 16))):
        for g, both in ((first, low), (first + 2, high)):
            halves = both.view(np.uint32).reshape(rows, 4, columns // CHUNK_N, 4, 2)
            words[:, :, g] = halves[..., 0].transpose(0, 2, 1, 3)
            words[:, :, g + 4] = halves[..., 1].transpose(0, 2, 1, 3)


def _interleaved(
    a: NDArray[np.uint64], b: NDArray[np.uint64], bits: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return a's and b's even pieces of `bits` in turn, a's first (lowest), and their odd ones."""
    shift = np.uint64(bits)
    even = np.uint64(0x00FF00FF00FF00FF if bits == 8 else 0x0000FFFF0000FFFF)
    low, of_b = a & even, b & even
    of_b <<= shift
    low |= of_b
    high = a >> shift
    high &= even
    high |= b & ~even
    return low, high


def permute_scales(scales: Array) -> Array:
    """Reorder scales [G, N] between plain column order and the order of the format (N a multiple of 64).

    With several groups, position p of each 64 columns holds column ``8*(p % 8) + p//8``; with a single group,
    position ``8*i + r`` of each 32 holds column ``2*i + 8*(r >> 1) + (r & 1)``. Both swap two axes, so both
    undo themselves.

    Returns
    -------
    array [G, N]
        A new contiguous array of the same dtype.
    """
    groups, columns = scales.shape
    if groups > 1:
        return swap_columns(scales)
    return scales.reshape(columns // 32, 4, 4, 2).transpose(0, 2, 1, 3).reshape(groups, columns)


def swap_columns(rows: Array) -> Array:
    """Reorder rows [R, N] as `permute_scales` does with several groups, whatever R is."""
    count, columns = rows.shape
    return rows.reshape(count, columns // 64, 8, 8).transpose(0, 1, 3, 2).reshape(count, columns)


GATE_UP = 8
"""Columns of gate, then as many of up, in turn: so the lane of an mma that holds columns g and g + 8 of a
16-column tile holds both factors of one output."""


def interleave_gate_up(gate: Array, up: Array) -> Array:
    """Join arrays [R, F], F a multiple of 8, to [R, 2F]: columns ``16*T + r`` and ``16*T + 8 + r`` of the
    result are columns ``8*T + r`` of `gate` and of `up`.
    """
    xp = namespace(gate)
    rows, features = gate.shape
    blocks = [a.reshape(rows, features // GATE_UP, 1, GATE_UP) for a in (gate, up)]
    joined: Array = xp.concatenate(blocks, axis=2).reshape(rows, 2 * features)
    return joined


def split_gate_up(both: Array) -> tuple[Array, Array]:
    """Undo :func:`interleave_gate_up` along the last axis."""
    blocks = both.reshape(*both.shape[:-1], -1, 2, GATE_UP)
    shape = (*both.shape[:-1], both.shape[-1] // 2)
    return blocks[..., 0, :].reshape(shape), blocks[..., 1, :].reshape(shape)
