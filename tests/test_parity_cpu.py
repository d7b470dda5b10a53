"""Levels 1 and 2 of the parity chain with NumPy: the packer, and the correction as array arithmetic.

`tests/gpu/test_parity.py` has all five levels on a device.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import symmetric_codes

import marlin_jit as mj
from marlin_jit import layout

FP16 = np.dtype(np.float16)


class TestPacker:
    """Level 1: a symmetric weight, packed, is the float16 weight that its codes stand for."""

    @pytest.mark.parametrize(("K", "N", "group_size"), [(256, 256, 128), (2048, 512, -1), (1024, 192, 64)])
    def test_packed_weight_is_the_reference(
        self, K: int, N: int, group_size: int, rng: np.random.Generator
    ) -> None:
        q, scale, reference = symmetric_codes(rng, K, N, group_size)
        w = mj.pack(mj.QuantWeight(q, scale, None, group_size))
        assert np.array_equal(mj.dequantize(w), reference.astype(np.float32).astype(FP16))
        x = rng.standard_normal((16, K)).astype(FP16)
        exact = x.astype(np.float64) @ reference
        error = mj.matmul(x, w).astype(np.float64) - exact
        assert np.linalg.norm(error) <= 4e-4 * np.linalg.norm(exact)


class TestCorrectionReference:
    """Level 2: x @ W = x @ W_symmetric + (sums of x over each group) @ delta."""

    @pytest.mark.parametrize(
        ("M", "K", "N", "group_size"),
        [(1, 256, 128, 128), (16, 512, 320, 32), (33, 1024, 64, 64), (8, 640, 72, -1)],
    )
    def test_correction_completes_the_symmetric_product(
        self, M: int, K: int, N: int, group_size: int, rng: np.random.Generator
    ) -> None:
        q, scale, centered = symmetric_codes(rng, K, N, group_size)
        groups = len(scale)
        zero = (-0.1 + 0.1 * rng.standard_normal((groups, N))).astype(FP16)
        w = mj.pack(mj.QuantWeight(q, scale, zero, group_size))
        assert w.delta is not None
        delta = layout.permute_scales(w.delta)[:groups, :N].astype(np.float64)
        per_row = np.repeat(np.arange(groups), K // groups)
        wide_scale, wide_zero = scale.astype(np.float64), zero.astype(np.float64)
        assert np.abs(delta - (wide_zero + 8 * wide_scale)).max() <= 2.0**-24

        x = rng.standard_normal((M, K)).astype(np.float64)
        symmetric = x @ centered
        sums = x.reshape(M, groups, -1).sum(axis=2)
        exact = x @ (q * wide_scale[per_row] + wide_zero[per_row])
        np.testing.assert_allclose(symmetric + sums @ delta, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
