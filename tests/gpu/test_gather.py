"""gather_columns, which puts activations in the row order of a weight with activation order."""

from __future__ import annotations

import numpy as np
import pytest
from exact import matrix

from marlin_jit import launch
from marlin_jit.device import current_device


@pytest.mark.parametrize(
    ("M", "K", "stride", "shift"),
    [
        (1, 4096, 4096, 0),
        (3, 64, 64, 0),
        (70, 4096 + 256, 4096 + 264, 0),  # rows apart
        (5, 1000, 1000, 0),
        (5, 999, 1000, 0),  # K is no multiple of 8: element by element
        (5, 1000, 1000, 3),  # nor are addresses of 16 bytes
        (5, 1000, 1001, 0),
        (2, 130_000, 130_000, 0),  # more than shared memory holds
        (66_000, 96, 96, 0),  # more rows than a grid has
    ],
)
def test_columns_come_in_order_and_zeros_follow(
    M: int, K: int, stride: int, shift: int, rng: np.random.Generator
) -> None:
    import cupy

    memory = cupy.asarray(rng.standard_normal(shift + M * stride).astype(np.float16))
    x = cupy.lib.stride_tricks.as_strided(memory[shift:], (M, K), (2 * stride, 2))
    order = cupy.asarray(rng.permutation(K).astype(np.int32))
    wide = -(-K // 8) * 8
    out = cupy.full((M + 1, wide), np.nan, np.float16)
    assert M * K < 2**31 and current_device().smem_per_block < 260_000
    launch.gather(matrix(x), order, launch.Matrix(out.data.ptr, wide, M, K))
    assert (out[:M, :K] == x[:, order]).all()
    assert (out[:M, K:] == 0).all()
    assert cupy.isnan(out[M]).all()
