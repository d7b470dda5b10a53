"""The 4-bit blocks of GGUF files, decoded to codes, scales and zeros of groups of 32.

A row of a tensor is one output column of the weight, cut along the input into blocks:

====  ========  =====  =================================================================================
type  elements  bytes  content
====  ========  =====  =================================================================================
Q4_0  32        18     d float16; 16 bytes of codes. W = d*(q - 8)
Q4_1  32        20     d, m float16; 16 bytes of codes. W = d*q + m
Q4_K  256       144    d, dmin float16; 12 bytes of 6-bit scales sc and minima mn of eight groups of 32;
                       128 bytes of codes. W = d*sc*q - dmin*mn
====  ========  =====  =================================================================================

Codes: byte i of 16 (Q4_0, Q4_1) holds element i in its low nibble and element 16 + i in its high one. In Q4_K
each 32 bytes do so for two groups: byte i holds element i of the first and element i of the second.

6-bit numbers of Q4_K, with b the 12 bytes: for j < 4, sc[j] = b[j] % 64 and mn[j] = b[4 + j] % 64; for the
others the low four bits are the nibbles of b[4 + j] (sc the low one, mn the high one) and the two high bits
are those left over in b[j - 4] and b[j].

What is exact
-------------
Q4_0 becomes a symmetric weight and Q4_1 one with a real zero, both with the numbers of the file: nothing is
rounded. d may be negative, and 0 for a block of zeros; m is no integer multiple of d. A packed weight stores
m + 8*d as float32, which is exact unless one of m and 8*d is over 4096 times the other and their sum is 1 or
more: two float16 have 11 bits each, and all are multiples of 2^-24.

Q4_K has scales that float16 cannot hold: d*sc has up to 17 bits. They are rounded, and the zero is chosen so
that code 8, the middle one, stays where it was:

    s = float16(d*sc)        zero = 8*(d*sc - s) - dmin*mn, to a multiple of g

where g is the last place of M = abs(zero) + 16*abs(s) in float32, so that float32 adds zero and scales
without rounding (unless M is over 2^13*abs(s), where it rounds as usual). A weight moves by
(q - 8)*(s - d*sc) and by what zero was rounded, at most

    8*max(2^-11*abs(d*sc), 2^-25) + 2^-24*M

The first term is 1/256 of a step d*sc; 2^-25 is half the step of float16's subnormal numbers, below 2^-14.

Sources: ``ggml-quants.c`` of ggml (``dequantize_row_q4_0``, ``_q4_1``, ``_q4_K``, ``get_scale_min_k4``) and
``gguf/quants.py`` of gguf-py 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_FORMATS", "GROUP_SIZE", "BlockFormat"]

GROUP_SIZE = 32

Scales = tuple[NDArray[np.float16], NDArray[Any] | None]


@dataclass(frozen=True)
class BlockFormat:
    """How a 4-bit type lays out its blocks.

    Attributes
    ----------
    elements, nbytes : int
        Of a block.
    run : int
        Bytes that hold as many elements in their low nibbles and, after them, as many in their high ones.
    code_start : int
        Where the codes begin in a block.
    read_scales : callable
        From blocks, uint8 [n, blocks of a row, nbytes], to scale and zero, [n, G] each; the zero is None for
        a symmetric type.
    zero_dtype : dtype or None
    """

    elements: int
    nbytes: int
    run: int
    code_start: int
    read_scales: Callable[[NDArray[np.uint8]], Scales]
    zero_dtype: np.dtype[Any] | None

    def blocks(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View rows, uint8 [n, bytes of a row], as blocks, uint8 [n, blocks of a row, nbytes]."""
        return rows.reshape(rows.shape[0], -1, self.nbytes)

    def read_codes(self, rows: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Write the codes of rows, uint8 [n, bytes of a row], to `out`, uint8 [K, n]."""
        n = rows.shape[0]
        codes = self.blocks(rows)[:, :, self.code_start :]
        pairs = codes.reshape(n, codes.shape[1], -1, self.run).transpose(1, 2, 3, 0)
        pairs = np.ascontiguousarray(pairs)  # one strided copy; the two below run along columns
        halves = out.reshape(*pairs.shape[:2], 2, self.run, n)
        np.bitwise_and(pairs, 15, out=halves[:, :, 0])
        np.right_shift(pairs, 4, out=halves[:, :, 1])


def _float16(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float16]:
    """Return the float16 at byte `start` of each block, [n, blocks of a row]."""
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view("<f2")[:, :, 0]


def _scales_q4_0(blocks: NDArray[np.uint8]) -> Scales:
    return _float16(blocks, 0), None


def _scales_q4_1(blocks: NDArray[np.uint8]) -> Scales:
    return _float16(blocks, 0), _float16(blocks, 2)


def _scales_q4_k(blocks: NDArray[np.uint8]) -> Scales:
    # In float64 all of this is exact: at most 17 bits each, between 2^-24 and 2^26.
    d = _float16(blocks, 0).astype(np.float64)[:, :, None]
    dmin = _float16(blocks, 2).astype(np.float64)[:, :, None]
    sc, mn = _six_bits(blocks[:, :, 4:16])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found by the caller
        step = d * sc
        scale = step.astype(np.float16)
        held = scale.astype(np.float64)
        zero = 8 * (step - held) - dmin * mn
        zero = _rounded(zero, np.abs(zero) + 16 * np.abs(held)).astype(np.float32)
    n = blocks.shape[0]
    return scale.reshape(n, -1), zero.reshape(n, -1)


def _rounded(values: NDArray[np.float64], largest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round values to multiples of the last place that `largest`, no smaller, has in float32."""
    _, exponent = np.frexp(largest)
    whole = np.rint(np.ldexp(values, 24 - exponent))
    rounded: NDArray[np.float64] = np.ldexp(whole, exponent - 24)
    return rounded


def _six_bits(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the eight scales and eight minima, uint8 [..., 8], of 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    sc = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    mn = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return sc, mn


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, 16, 2, _scales_q4_0, None),
    "Q4_1": BlockFormat(32, 20, 16, 4, _scales_q4_1, np.dtype(np.float16)),
    "Q4_K": BlockFormat(256, 144, 32, 16, _scales_q4_k, np.dtype(np.float32)),
}
"""The types that become layers, by ggml's name."""
