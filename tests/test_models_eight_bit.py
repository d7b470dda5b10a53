"""8-bit weights as 4-bit ones of twice the rows: exact where 8 bits are, for any shape, also packed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlin_jit as mj
from marlin_jit.models import doubled, quantize_8bit


def folded(w: mj.QuantWeight | mj.MarlinWeight) -> Any:
    """The weight that a stacked one stands for, [K, N] in float32."""
    dense = mj.dequantize(w, np.float32)
    return dense[: w.K // 2] + dense[w.K // 2 :]


def q8_0(rng: np.random.Generator, K: int, N: int) -> tuple[Any, Any]:
    """Codes and scales as Q8_0 has them, a code of 127 or -127 in each group of 32 along K."""
    codes = rng.integers(-127, 128, (K // 32, 32, N)).astype(np.int8)
    np.put_along_axis(
        codes, rng.integers(0, 32, (K // 32, 1, N)), 127 * rng.choice([-1, 1], (K // 32, 1, N)), axis=1
    )
    scales = (2.0 ** rng.uniform(-20, 4, (K // 32, N))).astype(np.float16)
    scales[rng.random(scales.shape) < 0.05] = 0
    return codes.reshape(K, N), scales


def test_q8_0_comes_back_exactly(rng: np.random.Generator) -> None:
    codes, scales = q8_0(rng, 192, 77)
    dense = codes * np.repeat(scales.astype(np.float32), 32, axis=0)
    found = quantize_8bit(dense)
    assert np.array_equal(folded(found), dense)
    packed = mj.pack(found)
    assert np.array_equal(folded(packed), dense)
    nibbles = np.where(np.repeat(scales, 32, axis=0) == 0, 0, codes).astype(int)
    assert np.array_equal((found.q[:192].astype(int) - 8) * 16 + found.q[192:], nibbles)


@pytest.mark.parametrize("N", [1, 8, 63, 1000, 50257])
def test_any_vocabulary(rng: np.random.Generator, N: int) -> None:
    dense = rng.standard_normal((64, N)).astype(np.float32)
    w = mj.pack(quantize_8bit(dense))
    assert w.shape == (128, N)
    step = np.repeat(np.abs(dense).reshape(2, 32, N).max(axis=1) / 127, 32, axis=0)
    # Half a step, and what rounding the scale to 11 bits does to 127 of them.
    assert (np.abs(folded(w) - dense) <= step * (0.5 + 127 * 2.0**-11)).all()


def test_product_is_that_of_8_bits(rng: np.random.Generator) -> None:
    codes, scales = q8_0(rng, 256, 100)
    scales = np.clip(scales, 0, np.float16(0.01))
    dense = codes * np.repeat(scales.astype(np.float32), 32, axis=0)
    x = rng.standard_normal((2, 3, 256)).astype(np.float16)
    y = mj.matmul(doubled(x), mj.pack(quantize_8bit(dense))).astype(np.float64)
    exact = x.astype(np.float64) @ dense
    assert doubled(x).shape == (2, 3, 512)
    # One rounding to float16, and float32 sums.
    assert np.linalg.norm(y - exact) / np.linalg.norm(exact) < 4e-4


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(32, 32), (96, 32), (128, 64), (128, 128)]), st.booleans())
def test_no_weight_moves_further_than_half_a_step(seed: int, sizes: tuple[int, int], bfloat16: bool) -> None:
    K, group = sizes
    rng = np.random.default_rng(seed)
    dense = (rng.standard_normal((K, 5)) * 10.0 ** rng.integers(-3, 3, (1, 5))).astype(np.float32)
    dtype, last_place = (ml_dtypes.bfloat16, 2.0**-8) if bfloat16 else (np.float16, 2.0**-11)
    step = np.repeat(np.abs(dense).reshape(-1, group, 5).max(axis=1) / 127, group, axis=0)
    found = folded(quantize_8bit(dense, group, dtype))
    # Below float16's normal numbers a scale is off by up to half of 2^-24.
    assert (np.abs(found - dense) <= step * (0.5 + 128 * last_place) + 127 * 2.0**-25).all()


def test_memory_order_does_not_matter(rng: np.random.Generator) -> None:
    table = rng.standard_normal((40, 64)).astype(np.float32)
    a, b = quantize_8bit(table.T), quantize_8bit(np.ascontiguousarray(table.T))
    assert np.array_equal(a.q, b.q) and np.array_equal(a.scale, b.scale)


@pytest.mark.parametrize(
    ("dense", "group", "error", "message"),
    [
        (np.zeros((48, 4), np.float32), 32, mj.ShapeError, "group size 32 does not divide K = 48"),
        (np.zeros(64, np.float32), 32, mj.ShapeError, r"two dimensions \[K, N\]"),
        (np.full((32, 1), np.nan, np.float32), 32, mj.ValueRangeError, "must be finite"),
        (np.full((32, 1), np.inf, np.float32), 32, mj.ValueRangeError, "must be finite"),
        (
            np.full((32, 1), 6e5, np.float32),
            32,
            mj.ValueRangeError,
            "16/127 of the largest in a group must fit",
        ),
    ],
)
def test_what_is_refused(dense: Any, group: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_8bit(dense, group)


def test_the_largest_that_fits() -> None:
    dense = np.full((32, 1), 127 * 4092.0, np.float32)
    assert np.array_equal(folded(mj.pack(quantize_8bit(dense))), dense)
