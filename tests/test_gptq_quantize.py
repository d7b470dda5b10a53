"""GPTQ, against a literal float64 version of the published algorithm and against min-max quantization."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_jit import gptq_quantize
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.gptq_quantize import gptq, hessian
from marlin_jit.pack import dequantize, pack
from marlin_jit.quantize import quantize
from marlin_jit.weight import QuantWeight

BF16 = ml_dtypes.bfloat16


def correlated(rng: np.random.Generator, T: int, K: int, dtype: Any = np.float32) -> np.ndarray:
    """Inputs [T, K] of a few strong directions, a little noise, and channels of different size."""
    directions = rng.standard_normal((K // 4, K))
    x = rng.standard_normal((T, K // 4)) @ directions / np.sqrt(K / 4) + 0.3 * rng.standard_normal((T, K))
    return (x * np.exp(0.5 * rng.standard_normal(K))).astype(np.float32).astype(dtype)


def output_error(x: np.ndarray, w: np.ndarray, weight: QuantWeight) -> float:
    """||X W - X Q|| in float64."""
    error = dequantize(weight, np.float32).astype(np.float64) - w.astype(np.float64)
    return float(np.linalg.norm(x.astype(np.float64) @ error))


# ---- the published algorithm ------------------------------------------------------------------------------


class Reference:
    """GPTQ one element at a time in float64: the upper Cholesky factor of the inverse, no blocks.

    `margin` [N] is how near a column came to a choice that float32 can make differently: the distance of a
    weight to the middle between two codes, in steps, or of a scale or zero to the middle between two 16-bit
    numbers, as a share of it and a hundred times as large. Columns do not depend on each other.
    """

    def __init__(self, w, H, rows, symmetric, dtype, damp, act_order):
        W, H = w.astype(np.float64), H.astype(np.float64).copy()
        K, N = W.shape
        dead = np.diag(H) == 0
        mean = np.diag(H)[~dead].mean()
        order = np.argsort(-np.diag(H), kind="stable") if act_order else np.arange(K)
        W[dead] = 0
        H[dead, dead] = 1
        H = (H + damp * mean * np.eye(K))[np.ix_(order, order)]
        U = np.linalg.cholesky(np.linalg.inv(H)).T
        self.q = np.zeros((K, N), np.uint8)
        self.scale = np.zeros((K // rows, N), dtype)
        self.zero = np.zeros((K // rows, N), dtype)
        self.margin = np.full(N, np.inf)
        for n in range(N):
            column = W[order, n]
            for k in range(K):
                g = k // rows
                if k % rows == 0:
                    low, high = column[k : k + rows].min(), column[k : k + rows].max()
                    exact = max(-low, high) / 7.5 if symmetric else (high - low) / 15
                    scale = self.rounded(n, exact, dtype)
                    zero = -8 * scale if symmetric else self.rounded(n, low, dtype)
                    self.scale[g, n], self.zero[g, n] = scale, zero
                place = (column[k] - zero) / scale
                code = int(np.clip(np.rint(place), 0, 15))
                if 0 <= place <= 15:
                    self.margin[n] = min(self.margin[n], 0.5 - abs(place - np.rint(place)))
                self.q[order[k], n] = code
                error = (column[k] - (code * scale + zero)) / U[k, k]
                for j in range(k + 1, K):
                    column[j] -= error * U[k, j]
        self.g_idx = np.empty(K, np.int32)
        self.g_idx[order] = np.arange(K) // rows

    def rounded(self, n, exact, dtype):
        near = np.array(exact).astype(dtype)
        for end in (-np.inf, np.inf) if exact else ():
            middle = (float(near) + float(np.nextafter(near, dtype(end)))) / 2
            self.margin[n] = min(self.margin[n], 100 * abs((exact - middle) / exact))
        return float(near)


@pytest.mark.parametrize(
    ("K", "group_size", "block", "symmetric", "act_order", "dtype"),
    [
        (48, 16, 16, False, False, np.float16),
        (48, 8, 32, False, False, np.float16),  # several groups a block, and a last block that is shorter
        (48, 24, 16, False, False, np.float16),  # a group of more than a block, no multiple of it
        (50, -1, 16, False, False, np.float16),  # K no multiple of the block
        (48, 16, 1, True, False, np.float16),
        (40, -1, 128, True, False, BF16),
        (48, 16, 128, False, True, np.float16),
        (48, 12, 20, True, True, BF16),
        (45, -1, 8, False, True, np.float16),
    ],
)
def test_codes_are_those_of_the_published_algorithm(K, group_size, block, symmetric, act_order, dtype, rng):
    N = 40
    w = (0.02 * rng.standard_normal((K, N))).astype(np.float32)
    x = correlated(rng, 2 * K, K)
    x[:, 5] = 0  # a dead input
    H = 2 * x.astype(np.float64).T @ x.astype(np.float64)
    rows = K if group_size == -1 else group_size
    expected = Reference(w, H, rows, symmetric, dtype, 0.01, act_order)
    weight = gptq(w, H, group_size, symmetric, dtype, 0.01, act_order, block)
    clear = expected.margin > 2e-4
    assert clear.mean() >= 0.75
    assert np.array_equal(weight.q[:, clear], expected.q[:, clear])
    assert_same_bits(weight.scale[:, clear], expected.scale[:, clear])
    assert weight.symmetric == symmetric
    if not symmetric:
        assert_same_bits(weight.zero[:, clear], expected.zero[:, clear])
    if act_order and group_size != -1:
        assert np.array_equal(weight.g_idx, expected.g_idx)
    else:
        assert weight.g_idx is None


# ---- what it is for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_much_nearer_than_with_min_max(seed, act_order, symmetric):
    """Also for inputs that it has not seen: a third of the error is gone, or more."""
    rng = np.random.default_rng(seed)
    w = (0.02 * rng.standard_normal((256, 96))).astype(np.float16)
    x = correlated(rng, 1536, 256, np.float16)
    seen, unseen = x[:1024], x[1024:]
    weight = gptq(w, hessian(seen), 64, symmetric, act_order=act_order)
    plain = quantize(w, 64, symmetric)
    assert output_error(seen, w, weight) < 0.6 * output_error(seen, w, plain)
    assert output_error(unseen, w, weight) < 0.67 * output_error(unseen, w, plain)


def test_the_order_of_groups_is_free_but_the_product_is_not(rng):
    """Activation order survives packing: the same dense weight, in the order of the source."""
    w = (0.02 * rng.standard_normal((256, 70))).astype(np.float16)
    x = correlated(rng, 400, 256, np.float16)
    weight = gptq(w, hessian(x), 32, act_order=True)
    assert np.array_equal(np.bincount(weight.g_idx), np.full(8, 32))
    packed = pack(weight)
    assert packed.perm is not None
    assert output_error(x, w, packed) == pytest.approx(output_error(x, w, weight), rel=1e-3)


def test_wide_weights_are_rounded_part_by_part(rng, monkeypatch):
    w = rng.standard_normal((64, 150)).astype(np.float32)
    H = hessian(correlated(rng, 100, 64))
    whole = gptq(w, H, 32)
    monkeypatch.setattr(gptq_quantize, "_HOST_COLUMNS", 64)
    parts = gptq(w, H, 32)
    # Other sizes of a product may sum in another order.
    assert (parts.q == whole.q).mean() > 0.999
    assert (parts.scale == whole.scale).mean() > 0.99


# ---- Hessians of every kind -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(96, 32), (128, 128), (60, 12), (7, 1), (130, -1), (128, 64)]),
    st.integers(1, 80),
    st.integers(0, 2**32),
    st.sampled_from([np.float16, BF16, np.float32]),
    st.sampled_from([np.float16, BF16]),
    st.booleans(),
    st.sampled_from([1, 5, 128]),
)
def test_inputs_that_are_not_correlated_give_the_codes_of_min_max(
    shape, N, seed, source, dtype, symmetric, block
):
    """With a diagonal Hessian no row can make good another's error."""
    K, group_size = shape
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((K, N)) * 2.0 ** rng.integers(-12, 8, N)).astype(np.float32).astype(source)
    for H in (np.eye(K), np.diag(2.0 ** rng.integers(-30, 30, K).astype(np.float64))):
        weight, plain = (
            gptq(w, H, group_size, symmetric, dtype, block=block),
            quantize(w, group_size, symmetric, dtype),
        )
        assert np.array_equal(weight.q, plain.q)
        assert_same_bits(weight.scale, plain.scale)
        assert weight.group_size == plain.group_size
        if not symmetric:
            assert_same_bits(weight.zero, plain.zero)


@pytest.mark.parametrize("factor", [2.0**-80, 2.0**80])
def test_only_the_ratios_in_the_hessian_count(factor, rng):
    w = rng.standard_normal((64, 20)).astype(np.float32)
    x = correlated(rng, 100, 64)
    x[:, 7] = 0
    one, other = gptq(w, hessian(x), 32), gptq(w, factor * hessian(x), 32)
    assert_same_bits(one.q, other.q)
    assert_same_bits(one.scale, other.scale)


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_inputs_get_weight_0_and_disturb_nothing(act_order, rng):
    w = rng.standard_normal((64, 20)).astype(np.float32)
    x = correlated(rng, 200, 64)
    dead = [0, 13, 63]
    x[:, dead] = 0
    w_other = w.copy()
    w_other[dead] = 1e6  # would not fit a float16 scale
    weight, other = (gptq(m, hessian(x), 32, act_order=act_order) for m in (w, w_other))
    assert_same_bits(weight.q, other.q)
    assert_same_bits(weight.scale, other.scale)
    rest = dequantize(weight, np.float32)[dead]
    assert np.all(np.abs(rest) <= 0.51 * weight.scale.astype(np.float32).max(axis=0))
    without = np.delete(np.arange(64), dead)
    assert output_error(x[:, without], w[without], gptq(w[without], hessian(x[:, without]), -1)) > 0


def test_no_input_at_all(rng):
    weight = gptq(rng.standard_normal((32, 4)).astype(np.float32), np.zeros((32, 32)), 32)
    assert np.all(dequantize(weight) == 0)


@pytest.mark.parametrize("T", [1, 10, 63])
def test_fewer_inputs_than_weights_in_a_column(T, rng):
    """H has rank T: only dampening makes it definite."""
    w = rng.standard_normal((64, 20)).astype(np.float32)
    x = correlated(rng, T, 64)
    weight = gptq(w, hessian(x), 32)
    assert output_error(x, w, weight) < 0.6 * output_error(x, w, quantize(w, 32))


def test_what_is_given_stays_as_it_is(rng):
    w = np.asfortranarray(rng.standard_normal((64, 20)).astype(np.float32))
    H = hessian(correlated(rng, 100, 64))
    before = w.copy(), H.copy()
    weight = gptq(w, H, 32)
    assert np.array_equal(w, before[0]) and np.array_equal(H, before[1])
    assert_same_bits(gptq(np.ascontiguousarray(w), H, 32).q, weight.q)
    assert_same_bits(gptq(w, np.asfortranarray(H), 32).q, weight.q)


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 700])
def test_inverse_of_triangles(size, rng):
    t = np.tril(0.1 * rng.standard_normal((size, size)), -1) + np.eye(size)
    inverse = t.copy()
    gptq_quantize._invert_unit_lower(np, inverse)
    assert np.allclose(inverse @ t, np.eye(size), atol=1e-9)


# ---- hessian() --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float16, 1e-6), (BF16, 1e-6), (np.float32, 1e-6), (np.float64, 1e-14)]
)
def test_hessian_is_twice_the_sum_of_outer_products(dtype, bound, rng, monkeypatch):
    monkeypatch.setattr(gptq_quantize, "_CHUNK_BYTES", 7 * 40 * 4)  # 7 rows of float32, 3 of float64
    x = correlated(rng, 100, 40, dtype)
    expected = 2 * sum(np.outer(row, row) for row in x.astype(np.float64))
    found = hessian(x)
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
    first = hessian(x[:33])
    assert hessian(x[33:], add_to=first) is first
    assert np.abs(first - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize(
    ("x", "add_to", "error", "message"),
    [
        (None, None, DTypeError, "expected a NumPy or CuPy array, got NoneType"),
        (np.ones((2, 3), np.int8), None, DTypeError, "x must be float16, .* got int8"),
        (np.ones(3, np.float32), None, ShapeError, r"non-empty matrix \[T, K\], got shape \(3,\)"),
        (np.ones((0, 3), np.float32), None, ShapeError, "non-empty matrix"),
        (np.array([[1, np.nan]], np.float16), None, ValueRangeError, r"x must be finite; x\[0, 1\] is nan"),
        (np.full((1, 2), 1e30, np.float32), None, ValueRangeError, r"2 X\^T X overflows float32"),
        (np.ones((2, 3), np.float32), np.ones((3, 3), np.float32), DTypeError, "add_to must be float64"),
        (np.ones((2, 3), np.float32), np.ones((2, 2)), ShapeError, r"add_to must have shape \(3, 3\)"),
    ],
)
def test_hessian_refuses(x, add_to, error, message):
    with pytest.raises(error, match=message):
        hessian(x, add_to)


# ---- what gptq() refuses ----------------------------------------------------------------------------------


def changed(value: float, *places: tuple[int, int]) -> np.ndarray:
    H = 2 * np.eye(32) + 0.5
    for place in places:
        H[place] = value
    return H


GOOD = changed(0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"w": None}, DTypeError, "expected a NumPy or CuPy array, got NoneType"),
        ({"w": np.ones((32, 4))}, DTypeError, "w must be float16, bfloat16 or float32, got float64"),
        ({"w": np.ones(32, np.float16)}, ShapeError, r"w must be a non-empty matrix \[K, N\]"),
        ({"group_size": 24}, ShapeError, "group size 24 does not divide K = 32"),
        ({"dtype": np.float32}, DTypeError, "dtype must be float16 or bfloat16, got float32"),
        ({"hessian": None}, DTypeError, "expected a NumPy or CuPy array, got NoneType"),
        ({"hessian": [[1.0]]}, DTypeError, "expected a NumPy or CuPy array, got list"),
        ({"hessian": GOOD.astype(np.float16)}, DTypeError, "hessian must be float32 or float64, got float16"),
        ({"hessian": GOOD[:31]}, ShapeError, r"hessian must have shape \(32, 32\) .* got \(31, 32\)"),
        ({"hessian": np.eye(31)}, ShapeError, r"hessian must have shape \(32, 32\) .* got \(31, 31\)"),
        ({"hessian": changed(np.nan, (3, 4))}, ValueRangeError, r"hessian\[3, 4\] is nan"),
        ({"hessian": changed(-1, (3, 3))}, ValueRangeError, r"negative diagonal: \[3, 3\] is -1"),
        (
            {"hessian": changed(0.7, (5, 9))},
            ValueRangeError,
            r"not symmetric: \[5, 9\] and \[9, 5\] are 0.7 and 0.5",
        ),
        ({"hessian": changed(0, (3, 3))}, ValueRangeError, r"semi-definite: \[3, 3\] is 0, but row 3 is not"),
        (
            {"hessian": changed(9, (5, 9), (9, 5))},
            ValueRangeError,
            "not positive definite after damping by 0.01",
        ),
        (
            {"hessian": np.ones((32, 32)), "damp": 0},
            ValueRangeError,
            "not positive definite after damping by 0 ",
        ),
        ({"damp": -0.1}, ValueRangeError, "damp must be finite and not negative, got -0.1"),
        ({"damp": np.nan}, ValueRangeError, "damp must be finite"),
        ({"damp": "much"}, DTypeError, "damp must be a number, got str"),
        ({"block": 0}, ValueRangeError, "block must be at least 1, got 0"),
        ({"block": 1.5}, DTypeError, "block must be an integer, got float"),
        (
            {"w": np.full((32, 4), 1e6, np.float32)},
            ValueRangeError,
            "overflows float16: .* its values are 1e",
        ),
    ],
)
def test_refused(arguments, error, message):
    given = {"w": np.ones((32, 4), np.float32), "hessian": GOOD, "group_size": 32} | arguments
    with pytest.raises(error, match=message):
        gptq(**given)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_weights_that_are_not_finite(bad, dtype):
    w = np.ones((32, 5), dtype)
    w[17, 2] = bad
    with pytest.raises(ValueRangeError, match=r"w must be finite; w\[17, 2\] is (nan|inf|-inf)"):
        gptq(w, GOOD, 32)


def test_a_hessian_that_is_almost_singular_is_refused_or_gives_finite_weights(rng):
    """Without dampening errors may be passed on many times as large."""
    w = rng.standard_normal((32, 4)).astype(np.float32)
    x = rng.standard_normal((200, 32)) @ np.diag(10.0 ** -np.arange(32)) @ rng.standard_normal((32, 32))
    for scale in (1e-300, 1e-30, 1, 1e30):
        try:
            weight = gptq(w, scale * hessian(x), 32, damp=0)
        except ValueRangeError as error:
            assert "singular" in str(error) or "definite" in str(error) or "overflows" in str(error)
        else:
            assert np.all(np.isfinite(dequantize(weight, np.float32)))
