"""Weights joined to one: columns of each against the weights they were, SwiGLU against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import marlin_jit as mj
from marlin_jit import layout
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def weight(
    rng: np.random.Generator, K: int, N: int, group: int, *, symmetric: bool, dtype: Any = FP16
) -> mj.QuantWeight:
    groups = 1 if group == -1 else K // group
    q = rng.integers(0, 16, (K, N), dtype=np.uint8)
    scale = (0.005 + 0.01 * rng.random((groups, N))).astype(np.float32).astype(dtype)
    zero = None if symmetric else (-0.1 * rng.random((groups, N))).astype(np.float32)
    return mj.QuantWeight(q, scale, zero, group)


@settings(max_examples=40, deadline=None)
@given(
    columns=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    group=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.lists(st.booleans(), min_size=4, max_size=4),
    packed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_columns_side_by_side(
    columns: list[int], group: int, symmetric: list[bool], packed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [weight(rng, 128, N, group, symmetric=s) for N, s in zip(columns, symmetric, strict=False)]
    if packed:
        parts = [mj.pack(w) for w in parts]
    whole = mj.concatenate(parts)
    assert isinstance(whole, mj.MarlinWeight if packed else mj.QuantWeight)
    assert whole.shape == (128, sum(columns))
    assert whole.symmetric == all(w.symmetric for w in parts)
    dense = [mj.dequantize(w, np.float32) for w in parts]
    if packed or whole.symmetric:
        np.testing.assert_array_equal(mj.dequantize(whole, np.float32), np.concatenate(dense, axis=1))
    else:  # a symmetric part's (q - 8)*scale becomes q*scale - 8*scale
        np.testing.assert_allclose(
            mj.dequantize(whole, np.float32), np.concatenate(dense, axis=1), rtol=0, atol=2.0**-24
        )


def test_integer_zero_points_stay_integer(rng: np.random.Generator) -> None:
    """A symmetric part is one whose zero points are 8."""
    points = mj.QuantWeight.from_zero_points(
        rng.integers(0, 16, (128, 40), dtype=np.uint8),
        (0.01 * rng.random((2, 40))).astype(np.float16),
        rng.integers(0, 16, (2, 40)),
        64,
    )
    whole = mj.concatenate([mj.pack(weight(rng, 128, 30, 64, symmetric=True)), mj.pack(points)])
    assert whole.points16 is not None


@pytest.mark.parametrize("features", [1, 7, 8, 20, 32, 100, 1536])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_gate_and_up_alternate_by_eights(features: int, dtype: np.dtype, rng: np.random.Generator) -> None:
    gate, up = (weight(rng, 64, features, 32, symmetric=False, dtype=dtype) for _ in range(2))
    w = mj.pack_gate_up(gate, up)
    assert (w.K, w.N, w.dtype) == (64, features, dtype)
    dense = mj.dequantize(w.packed, np.float32)
    columns = np.arange(features) // 8 * 16 + np.arange(features) % 8
    assert_same_bits(w.packed.B, mj.pack_gate_up(mj.pack(gate), mj.pack(up)).packed.B)
    for half, source, apart in zip((0, 8), (gate, up), w.dequantize(np.float32), strict=True):
        np.testing.assert_array_equal(dense[:, columns + half], mj.dequantize(mj.pack(source), np.float32))
        np.testing.assert_array_equal(apart, dense[:, columns + half])
    real = {16 * (f // 8) + f % 8 + half for f in range(features) for half in (0, 8)}
    assert not dense[:, sorted(set(range(dense.shape[1])) - real)].any()


def test_splitting_undoes_interleaving(rng: np.random.Generator) -> None:
    gate, up = rng.random((2, 3, 40))
    both = layout.interleave_gate_up(gate, up)
    for half, expected in zip(layout.split_gate_up(both), (gate, up), strict=True):
        np.testing.assert_array_equal(half, expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_swiglu_of_the_reference_path(packed: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    gate, up = (weight(rng, 192, 70, 64, symmetric=False, dtype=dtype) for _ in range(2))
    w = mj.pack_gate_up(mj.pack(gate), mj.pack(up)) if packed else mj.pack_gate_up(gate, up)
    x = rng.standard_normal((2, 3, 192)).astype(np.float32).astype(dtype)
    wide = x.astype(np.float64)
    g, u = (wide @ mj.dequantize(v, np.float32).astype(np.float64) for v in (gate, up))
    exact = g / (1 + np.exp(-g)) * u
    y = mj.matmul_swiglu(x, w)
    assert y.shape == (2, 3, 70)
    assert y.dtype == dtype
    half_ulp = 2.0**-11 if dtype == FP16 else 2.0**-8
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=1.01 * half_ulp, atol=1e-5)
    out = np.empty_like(y)
    assert mj.matmul_swiglu(x, w, out=out) is out
    assert_same_bits(out, y)
    assert "reference" in str(mj.explain(x, w))


def test_far_from_zero_silu_is_a_ramp(rng: np.random.Generator) -> None:
    """exp overflows on the left, where silu is 0."""
    ones = np.full((32, 8), 9, np.uint8)
    gate = mj.QuantWeight(ones, np.full((1, 8), 100, np.float16), None, 32)
    up = mj.QuantWeight(ones, np.full((1, 8), 1 / 32, np.float16), None, 32)
    w = mj.pack_gate_up(gate, up)
    x = np.stack([np.full(32, v, np.float16) for v in (-1, 1)])
    np.testing.assert_array_equal(mj.matmul_swiglu(x, w), np.repeat([[0.0], [3200.0]], 8, axis=1))


def test_weights_that_differ(rng: np.random.Generator) -> None:
    a = weight(rng, 128, 40, 64, symmetric=True)
    others = [
        (weight(rng, 256, 40, 64, symmetric=True), ShapeError, "has K 128, weight 1 256"),
        (weight(rng, 128, 40, 32, symmetric=True), ShapeError, "has group_size 64, weight 1 32"),
        (weight(rng, 128, 40, 64, symmetric=True, dtype=BF16), DTypeError, "float16, weight 1 bfloat16"),
        (mj.pack(a), DTypeError, "expected all MarlinWeight or all QuantWeight"),
        (np.zeros((128, 40)), DTypeError, "got QuantWeight, ndarray"),
        (
            replace(a, g_idx=(np.arange(128, dtype=np.int32) % 2)),
            ShapeError,
            "in different activation orders",
        ),
        (
            replace(a, sign_bit=np.zeros(a.shape, np.uint8)),
            ValueRangeError,
            "weight 1 carries sign_bit",
        ),
    ]
    for other, error, message in others:
        with pytest.raises(error, match=message):
            mj.concatenate([a, other])
        with pytest.raises(error, match=message):
            mj.pack_gate_up(a, other)
    with pytest.raises(ShapeError, match="no weights"):
        mj.concatenate([])
    with pytest.raises(ShapeError, match="gate has N = 40 and up N = 41"):
        mj.pack_gate_up(a, weight(rng, 128, 41, 64, symmetric=True))
    with pytest.raises(ShapeError, match="have 80 columns in all, not 48"):
        mj.GateUpWeight(mj.pack(weight(rng, 128, 48, 64, symmetric=True)), 40)
    for bad, message in ((mj.pack(a), "got MarlinWeight"), (5, "got int")):
        with pytest.raises(DTypeError, match=f"sequence of weights, {message}"):
            mj.concatenate(bad)  # type: ignore[arg-type]
    joined = mj.pack_gate_up(a, a)
    for bad_n in (40.0, None, "a"):
        with pytest.raises(DTypeError, match="N must be an integer"):
            mj.GateUpWeight(joined.packed, bad_n)  # type: ignore[arg-type]
    x = np.zeros((1, 128), np.float16)
    with pytest.raises(DTypeError, match=r"call marlin_jit.matmul_swiglu"):
        x @ joined
    with pytest.raises(DTypeError, match="without a bias"):
        mj.explain(x, joined, np.zeros(80, np.float16))
    with pytest.raises(DTypeError, match="pack_gate_up"):
        mj.matmul_swiglu(np.zeros((1, 128), np.float16), mj.pack(a))


def test_an_activation_order_in_common_is_kept(rng: np.random.Generator) -> None:
    order = rng.permutation(np.arange(128, dtype=np.int32) // 64)
    parts = [replace(weight(rng, 128, 24, 64, symmetric=True), g_idx=order) for _ in range(2)]
    dense = np.concatenate([mj.dequantize(w) for w in parts], axis=1)
    for whole in (mj.concatenate(parts), mj.concatenate([mj.pack(w) for w in parts])):
        np.testing.assert_array_equal(mj.dequantize(whole), dense)
    w = mj.pack_gate_up(*parts)
    gate, up = layout.split_gate_up(mj.dequantize(w.packed))
    np.testing.assert_array_equal(np.concatenate([gate, up], axis=1), dense)
