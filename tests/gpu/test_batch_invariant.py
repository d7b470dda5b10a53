"""A row's bits do not depend on the other rows: `path="batch_invariant"` on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from exact import poisoned, product, random_rows, random_weight, relative_error, weight64

import marlin_jit as mj

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BOUND = {FP16: 4e-4, BF16: 3e-3}
ROWS = (1, 2, 7, 8, 9, 16, 17, 24, 25, 48, 49, 100)


def bits(array) -> np.ndarray:
    return np.asarray(array.get()).view(np.uint16)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [128, 64, 32, -1])
@pytest.mark.parametrize(("K", "N"), [(2048, 704), (4096, 8448)])
def test_the_same_bits_in_every_batch(K, N, group, symmetric, dtype, rng):
    qw = random_weight(rng, K, N, group, symmetric=symmetric, dtype=dtype)
    w, x = mj.pack(qw), random_rows(rng, max(ROWS), K, dtype)
    out, intact = poisoned(max(ROWS), N, dtype)
    mj.matmul(x, w, out=out, path="batch_invariant")
    assert intact()
    assert relative_error(out, product(x.astype(np.float64), weight64(qw))) <= BOUND[dtype]
    together = bits(out)
    for rows in ROWS:
        for first in {0, max(ROWS) - rows}:
            part, intact = poisoned(rows, N, dtype)
            mj.matmul(x[first : first + rows], w, out=part, path="batch_invariant")
            assert intact()
            assert np.array_equal(bits(part), together[first : first + rows]), (rows, first)


def test_swiglu_of_the_whole_process(rng):
    gate, up = (random_weight(rng, 1024, 200, 128, symmetric=False, dtype=FP16) for _ in range(2))
    w, x = mj.pack_gate_up(gate, up), random_rows(rng, 40, 1024, FP16)
    mj.set_batch_invariant(True)
    try:
        together = bits(mj.matmul_swiglu(x, w))
        for rows in (1, 8, 9, 24, 25):
            assert np.array_equal(bits(mj.matmul_swiglu(x[:rows], w)), together[:rows])
    finally:
        mj.set_batch_invariant(False)
