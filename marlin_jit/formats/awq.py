"""AWQ checkpoints in the GEMM layout of AutoAWQ (``version: gemm``).

=========  ==============  ==============================================================
tensor     shape           content
=========  ==============  ==============================================================
qweight    int32 [K, N/8]  eight columns in a word, nibble i holds column 0,2,4,6,1,3,5,7
qzeros     int32 [G, N/8]  in the same order; the zero point itself, 0 and 15 both occur
scales     [G, N]          float16 or bfloat16
=========  ==============  ==============================================================

W[k, n] = (q - zero point) * scale. Source: AutoAWQ 0.2.9 ``modules/linear/gemm.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlin_jit.formats.layer import Parameters, SourceLayer
from marlin_jit.weight import QuantWeight

__all__ = ["AWQLayer"]

# Column 2j sits in nibble j, column 2j + 1 in nibble 4 + j: so byte b = nibbles 2b, 2b + 1 holds columns
# 4b, 4b + 2 for b < 2 and columns 4(b - 2) + 1, 4(b - 2) + 3 for the others.
_COLUMNS_OF_BYTE = ((0, 2), (4, 6), (1, 3), (5, 7))


@dataclass(frozen=True)
class AWQLayer(SourceLayer):
    group_size: int

    @property
    def format(self) -> str:
        return "awq"

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.present("qweight", "qzeros", "scales")

    @property
    def scale_name(self) -> str:
        return f"{self.name}.scales"

    def parameters(self) -> Parameters:
        qweight = self.require("qweight", ("I32",))
        qzeros = self.require("qzeros", ("I32",))
        scales = self.require("scales", ("F16", "BF16"))
        K, words = self.files.info(qweight).shape
        N = 8 * words
        groups = self.groups(K, self.group_size)
        self.expect_shape(scales, (groups, N), f"for K = {K}, N = {N} and group size {self.group_size}")
        self.expect_shape(qzeros, (groups, words), f"one word for 8 of {N} columns, {groups} groups")
        zero_point = unpack_columns(self.files.read(qzeros))
        symmetric = bool((zero_point == 8).all())
        return Parameters(
            K=K,
            N=N,
            group_size=self.group_size,
            scale=self.files.read(scales),
            zero_point=None if symmetric else zero_point,
            g_idx=None,
            symmetric=symmetric,
        )

    def read(self) -> QuantWeight:
        found = self.checked_parameters()
        q = unpack_columns(self.files.read(f"{self.name}.qweight"))
        zero_point = np.full(found.scale.shape, 8, np.uint8) if found.zero_point is None else found.zero_point
        return QuantWeight.from_zero_points(q, found.scale, zero_point, found.group_size)


def unpack_columns(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the values, uint8 [R, N], of int32 [R, N/8] in AWQ's interleaved order."""
    rows, count = words.shape
    pairs = np.ascontiguousarray(words).view(np.uint8).reshape(rows, count, 4)
    out = np.empty((rows, count, 8), np.uint8)
    for b, (low, high) in enumerate(_COLUMNS_OF_BYTE):
        np.bitwise_and(pairs[:, :, b], 15, out=out[:, :, low])
        np.right_shift(pairs[:, :, b], 4, out=out[:, :, high])
    return out.reshape(rows, 8 * count)
