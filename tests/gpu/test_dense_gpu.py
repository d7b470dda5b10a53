"""The path ``dense``: weights made dense a number of columns at a time, multiplied by cuBLAS."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from exact import exact_rows, exact_weight, random_weight

import marlin_jit as mj
from marlin_jit import _cublas, launch

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [128, 64, 32, -1])
@pytest.mark.parametrize("kind", ["symmetric", "points", "real"])
def test_columns_are_those_of_the_weight(kind, group, dtype, rng) -> None:
    import cupy

    K, N = 384, 200
    if kind == "points":
        w = mj.pack(exact_weight(rng, K, N, group, dtype, exponents=(-3, 3))[0])
    else:
        how = {"symmetric": kind == "symmetric", "real_zero": kind == "real"}
        w = mj.pack(random_weight(rng, K, N, group, dtype=dtype, **how))
    expected = mj.dequantize(w).T.astype(np.float32)
    for first, columns in ((0, 256), (0, 64), (64, 128), (192, 64)):
        out = cupy.full((columns, w.padded_shape[0]), np.nan, dtype)
        launch.dense_weights(w, first, out)
        there = min(columns, N - first)
        error = abs(out[:there, :K].astype(np.float32) - expected[first : first + there])
        # Real zeros are rounded to the activation type before they are added, and the sum once more.
        bound = {FP16: 2**-10, BF16: 2**-7}[dtype] if kind == "real" else 0.0
        assert float((error - bound * abs(expected[first : first + there]).max()).max()) <= 0.0
        assert not bool(cupy.isnan(out.astype(np.float32)).any())


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(("K", "N", "group"), [(1024, 704, 128), (288, 72, 32), (250, 330, -1)])
def test_products_are_exact_on_integers(K, N, group, dtype, rng, monkeypatch) -> None:
    if not _cublas.available():
        pytest.skip("cuBLAS is not installed")
    qw, values = exact_weight(rng, K, N, group, dtype, exponents=(-3, 3))
    w = mj.pack(qw)
    for limit in (64 << 20, 2 * w.padded_shape[0] * 128):
        monkeypatch.setattr(launch, "_DENSE_BYTES", limit)
        for M in (1, 40, 129):
            x, a = exact_rows(rng, M, K, dtype)
            expected = (a @ values).astype(np.float32).astype(dtype)
            assert np.array_equal(mj.matmul(x, w, path="dense").get(), expected)
            bias, b = exact_rows(rng, 1, N, dtype)
            expected = (expected.astype(np.float32) + b).astype(dtype)
            assert np.array_equal(mj.matmul(x, w, bias[0], path="dense").get(), expected)
