"""The min-max quantizer, against float64 error bounds and against the groups that break such quantizers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.pack import dequantize, pack
from marlin_jit.quantize import quantize

BF16 = ml_dtypes.bfloat16
UNIT = {np.float16: 2.0**-11, BF16: 2.0**-8}
"""Relative error of rounding to a dtype."""
SMALLEST = {np.float16: 2.0**-24, BF16: 2.0**-133}
"""Spacing of its subnormal numbers."""


def grouped(a, rows):
    return a.astype(np.float64).reshape(-1, rows, a.shape[1])


def value(weight, rows):
    """q*scale + zero in float64, [groups, rows, N]."""
    scale = weight.scale.astype(np.float64)[:, None]
    zero = -8 * scale if weight.zero is None else weight.zero.astype(np.float64)[:, None]
    return grouped(weight.q, rows) * scale + zero


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from([(96, 32), (128, 128), (60, 12), (7, 1), (130, -1), (128, 64)]),
    st.integers(1, 150),
    st.integers(0, 2**32),
    st.sampled_from([np.float16, BF16, np.float32]),
    st.sampled_from([np.float16, BF16]),
    st.booleans(),
    st.floats(-6, 6),
)
def test_error_is_half_a_step_and_what_rounding_cuts_off(shape, N, seed, source, dtype, symmetric, offset):
    K, group_size = shape
    rows = K if group_size == -1 else group_size
    rng = np.random.default_rng(seed)
    magnitude = 2.0 ** rng.integers(-12, 8, (K // rows, N)).repeat(rows, axis=0)
    w = ((rng.standard_normal((K, N)) + offset) * magnitude).astype(np.float32).astype(source)
    weight = quantize(w, group_size, symmetric, dtype)
    assert weight.symmetric == symmetric and weight.dtype == dtype
    scale = weight.scale.astype(np.float64)[:, None]
    source_values = grouped(w, rows)
    largest = np.abs(source_values).max(axis=1, keepdims=True)
    # The ends of the range move by the rounding of scale (15 steps of it) and of zero; float32 adds next to
    # nothing.
    cut_off = 15 * (scale * UNIT[dtype] + SMALLEST[dtype]) + largest * (UNIT[dtype] + 2.0**-20)
    assert np.all(np.abs(value(weight, rows) - source_values) <= scale / 2 + cut_off)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_each_code_is_the_nearest_for_the_scale_as_stored(seed, symmetric):
    """A coarse dtype moves scale and zero; codes chosen for the unrounded ones would be off near the ends."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((64, 16)) + rng.uniform(-3, 3, 16)).astype(np.float32)
    weight = quantize(w, 32, symmetric, BF16)
    scale = weight.scale.astype(np.float64)[:, None]
    zero = -8 * scale if symmetric else weight.zero.astype(np.float64)[:, None]
    nearest = np.clip((grouped(w, 32) - zero) / scale, 0, 15)
    assert np.all(np.abs(grouped(weight.q, 32) - nearest) <= 0.5 + 1e-4)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_extremes_of_a_group_get_the_outer_codes(symmetric, dtype):
    w = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    weight = quantize(w, -1, symmetric, dtype)
    # -7.5 steps is half-way between codes 0 and 1: which one it is hangs on the rounding of a symmetric
    # scale.
    assert weight.q[0, 0] <= symmetric and weight.q[-1, 0] == 15
    assert np.all(np.diff(weight.q[:, 0].astype(int)) >= 0)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -0.1, 6e-8, -65504.0, 1e-7, 2.0**-20])
def test_constant_groups_are_exact(constant, symmetric, dtype):
    w = np.random.default_rng(0).standard_normal((96, 8)).astype(np.float32)
    w[32:64, 3] = constant
    weight = quantize(w, 32, symmetric, dtype)
    expected = np.full(32, constant, np.float32).astype(dtype)
    assert_same_bits(dequantize(weight)[32:64, 3], expected, zero_sign=False)
    assert_same_bits(dequantize(pack(weight))[32:64, 3], expected, zero_sign=False)
    if not symmetric:
        assert weight.scale[1, 3] == 0 and np.all(weight.q[32:64, 3] == 0)
    assert np.all(np.isfinite(weight.scale.astype(np.float32)))


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_weight_of_zeros(symmetric):
    weight = quantize(np.zeros((64, 64), np.float16), 32, symmetric)
    assert np.all(weight.scale == 0)
    assert np.all(weight.q == (8 if symmetric else 0))
    assert np.all(dequantize(pack(weight)) == 0)


def test_values_far_below_the_smallest_scale():
    """The range of the group underflows to scale 0; its values are then all the zero, not 0/0."""
    w = np.full((32, 1), 1e-9, np.float32)
    w[::2] = -1e-9
    for symmetric in (False, True):
        weight = quantize(w, 32, symmetric)
        assert np.all(np.abs(dequantize(weight, np.float32)) <= 2.0**-24)


def test_large_values_that_the_rounded_zero_leaves_behind():
    """20001 as float16 is 20000: with scale 0, the rest must not turn into a code."""
    weight = quantize(np.full((32, 2), 20001, np.float32), 32)
    assert np.all(weight.q == 0) and np.all(weight.scale == 0) and np.all(weight.zero == 20000)


def test_the_full_range_of_float16():
    w = np.array([[-65504], [65504], [0], [1000]], np.float16)
    weight = quantize(w, -1)
    assert np.abs(value(weight, 4)[0] - w.astype(np.float64)).max() <= 65504 / 15 + 16 * 15


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_that_are_not_finite(bad, symmetric):
    w = np.ones((64, 5), np.float16)
    w[37, 2] = bad
    with pytest.raises(ValueRangeError, match=r"w must be finite; w\[37, 2\] is (nan|inf|-inf)"):
        quantize(w, 32, symmetric)


@pytest.mark.parametrize(("low", "high", "symmetric"), [(7e4, 8e4, False), (0, 1e6, False), (0, 6e5, True)])
def test_ranges_that_overflow_float16(low, high, symmetric):
    w = np.ones((64, 5), np.float32)
    w[32:, 3] = low
    w[40, 3] = high
    message = "scale or zero of 1 groups overflows float16; the first is group 1 of column 3, with values"
    with pytest.raises(ValueRangeError, match=message):
        quantize(w, 32, symmetric)
    assert quantize(w, 32, symmetric, BF16).dtype == BF16


def test_ranges_beyond_float32_itself():
    """max - min overflows float32 here; bfloat16 can hold the scale."""
    w = np.array([[-3e38], [3e38]], np.float32)
    weight = quantize(w, -1, dtype=BF16)
    assert np.all(np.abs(value(weight, 2)[0] - w) <= 3e38 * 2.0**-5)


def test_strided_weights_give_the_same_codes(rng):
    w = rng.standard_normal((64, 96)).astype(np.float32)
    plain, transposed = quantize(w, 32), quantize(np.ascontiguousarray(w.T).T, 32)
    assert_same_bits(transposed.q, plain.q)
    assert_same_bits(transposed.scale, plain.scale)


@pytest.mark.parametrize(
    ("w", "arguments", "error", "message"),
    [
        (np.ones((32, 4)), {}, DTypeError, "w must be float16, bfloat16 or float32, got float64"),
        (np.ones((32, 4), np.int8), {}, DTypeError, "got int8"),
        ([[1.0]], {}, DTypeError, "expected a NumPy or CuPy array, got list"),
        (np.ones(32, np.float16), {}, ShapeError, r"non-empty matrix \[K, N\], got shape \(32,\)"),
        (np.ones((0, 4), np.float16), {}, ShapeError, "non-empty matrix"),
        (
            np.ones((48, 4), np.float16),
            {"group_size": 32},
            ShapeError,
            "group size 32 does not divide K = 48",
        ),
        (np.ones((48, 4), np.float16), {"group_size": 0}, ShapeError, "group size 0 does not divide K = 48"),
        (np.ones((48, 4), np.float16), {"group_size": 48, "dtype": np.float32}, DTypeError, "got float32"),
    ],
)
def test_refused(w, arguments, error, message):
    with pytest.raises(error, match=message):
        quantize(w, **arguments)


def test_a_range_that_overflows_float32_keeps_its_codes() -> None:
    w = np.array([[-3e38], [3e38], [1e38], [0]], np.float32)
    assert quantize(w, 4, dtype=ml_dtypes.bfloat16).q.ravel().tolist() in ([0, 15, 10, 8], [0, 15, 10, 7])
