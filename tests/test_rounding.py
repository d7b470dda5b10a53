"""Cross-iteration rounding: its means against float64, the kernel's text against the array code, the mode."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from typing import Any

import kernel_source
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import marlin_jit as mj
from marlin_jit import rounding
from marlin_jit.errors import DTypeError, MarlinJitError, ShapeError, ValueRangeError

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
CHANNELS = ("frac4", "sign_bit")
MASK = 0xFFFFFFFF

pytestmark = pytest.mark.usefixtures("fresh_dispatch")


def dense(seed: int = 0, K: int = 192, N: int = 70) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((K, N), dtype=np.float32)


def real_codes(w: mj.QuantWeight, W: np.ndarray) -> np.ndarray:
    """``(W - zero)/scale`` in float64, kept within 0..15; where the scale is 0, the code itself."""
    rows = w.K // w.groups
    scale = np.repeat(w.scale.astype(np.float64), rows, axis=0)
    zero = -8 * scale if w.zero is None else np.repeat(w.zero.astype(np.float64), rows, axis=0)
    with np.errstate(all="ignore"):
        v = np.clip((W.astype(np.float64) - zero) / scale, 0, 15)
    return np.where(scale == 0, w.q, v)


def codes(w: mj.QuantWeight, iterations: range, seed: int = 0) -> np.ndarray:
    """Codes of these iterations, [iterations, K, N]."""
    return np.stack([mj.rounded(w, i, seed).q.astype(np.int64) for i in iterations])


# ---- the kernel's text against the array code -----------------------------------------------------------


def lowbias32(x: int) -> int:
    """As its author writes it."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def kernel_mix(x: int) -> int:
    """`mix` of rounding.cuh, statement by statement; C++ and Python spell these the same."""
    body = kernel_source.find("rounding.cuh", r"uint32_t mix\(uint32_t x\) \{(.*?)\}")[1]
    *statements, last = (s.strip() for s in body.split(";") if s.strip())
    space = {"x": int(x) & MASK}
    for statement in statements:
        assert re.fullmatch(r"x (\^= x >> \d+|\*= 0x[0-9a-f]+)", statement), statement
        exec(statement, {}, space)
        space["x"] &= MASK
    assert last == "return x"
    return space["x"]


KERNEL_THRESHOLD = kernel_source.function(
    "rounding.cuh", "threshold(int k, uint32_t column_key, int phase)", {"mix": kernel_mix}
)
KERNEL_CODE = {
    "frac4": kernel_source.function("rounding.cuh", "frac4_code(int q, int frac4, int at)"),
    "sign_bit": kernel_source.function("rounding.cuh", "sign_bit_code(int q, int sign_bit, int at)"),
}
EDGES = [0, 1, 2, 15, 16, 0x7FFFFFFF, 0x80000000, MASK]


def test_the_hash_is_one_on_every_side() -> None:
    xs = [*EDGES, *np.random.default_rng(0).integers(0, 1 << 32, 500).tolist()]
    expected = [lowbias32(x) for x in xs]
    assert [kernel_mix(x) for x in xs] == expected
    array = np.array(xs, np.uint32)
    assert rounding._mix(array).tolist() == expected
    assert array.tolist() == xs  # not in place


@settings(deadline=None, max_examples=40)
@given(st.integers(0, MASK), st.integers(0, 1 << 40), st.integers(0, 10**5))
def test_thresholds_are_those_of_the_kernel(seed: int, index: int, start: int) -> None:
    which = rounding.Iteration(index, seed)
    column_key = kernel_source.find("native.cu", r"column_key = (mix\(column \^ seed_key\));")[1]
    for n, column in enumerate(rounding.thresholds(np, 5, start, start + 3, which).T):
        names = {"mix": kernel_mix, "column": start + n, "seed_key": lowbias32(seed)}
        key = eval(column_key, names)
        phase = sum((index >> bit & 1) << 3 - bit for bit in range(4))
        assert column.tolist() == [KERNEL_THRESHOLD(k, key, phase) for k in range(5)]
        assert column.tolist() == [lowbias32(k ^ key) >> 28 ^ phase for k in range(5)]


@pytest.mark.parametrize("kind", CHANNELS)
def test_every_code_is_that_of_the_kernel(kind: str) -> None:
    """All codes, channel values and thresholds, and what they are said to mean."""
    q, value, at = (a.ravel() for a in np.indices((16, 16 if kind == "frac4" else 2, 16)).astype(np.uint8))
    found = (rounding._frac4_codes if kind == "frac4" else rounding._sign_bit_codes)(np, q, value, at)
    assert found.min() == 0 and found.max() == 15
    for *case, code in zip(q.tolist(), value.tolist(), at.tolist(), found.tolist(), strict=True):
        assert KERNEL_CODE[kind](*case) == code
        nearest, side, threshold = case
        if kind == "frac4":
            meant = nearest - (side >= 8) + (threshold < side)
        else:
            meant = nearest + (-1 if side else 1) * (threshold < 4)
        assert code == min(max(meant, 0), 15)


# ---- thresholds -----------------------------------------------------------------------------------------


def test_thresholds_of_a_place_are_spread_evenly_in_time() -> None:
    """Any 16 in a row are 0..15; the 2, 4, 8 from a multiple of as many on are evenly apart."""
    at = np.stack([rounding.thresholds(np, 40, 0, 50, rounding.Iteration(i, 7)) for i in range(48)])
    for first in range(32):
        assert (np.sort(at[first : first + 16], axis=0) == np.arange(16)[:, None, None]).all()
    for run in (2, 4, 8):
        for first in range(0, 48, run):
            in_order = np.sort(at[first : first + run], axis=0).astype(int)
            assert (np.diff(in_order, axis=0) == 16 // run).all()


def test_thresholds_of_different_places_and_seeds_are_independent() -> None:
    def at(index: int, seed: int) -> np.ndarray:
        return rounding.thresholds(np, 512, 0, 512, rounding.Iteration(index, seed)).astype(np.float64)

    for seed in (0, 1, 2, 12345):
        one = at(3, seed)
        counts = np.bincount(one.astype(int).ravel(), minlength=16)
        assert np.abs(counts - 2**14).max() < 5 * 2**7  # five standard deviations
        for other in (np.roll(one, 1, 0), np.roll(one, 1, 1), np.roll(one, 64, 0), one.T, at(3, seed + 3)):
            pairs = np.corrcoef(one.ravel(), other.ravel())[0, 1]
            assert abs(pairs) < 5 / 512


def test_columns_do_not_depend_on_how_they_are_cut() -> None:
    which = rounding.Iteration(5, 9)
    whole = rounding.thresholds(np, 33, 0, 200, which)
    assert np.array_equal(whole[:, 64:131], rounding.thresholds(np, 33, 64, 131, which))


# ---- channels and their means ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(96, 32), (128, 128), (60, 12), (7, 1), (130, -1)]),
    st.integers(1, 90),
    st.integers(0, 2**32),
    st.sampled_from([FP16, BF16]),
    st.booleans(),
    st.sampled_from(CHANNELS),
    st.integers(0, 10**6),
)
def test_the_mean_over_any_sixteen_iterations(
    shape: tuple[int, int], N: int, seed: int, dtype: np.dtype, symmetric: bool, kind: str, first: int
) -> None:
    K, group = shape
    rng = np.random.default_rng(seed)
    W = ((rng.standard_normal((K, N)) + rng.uniform(-2, 2)) * 2.0 ** rng.integers(-6, 6)).astype(np.float32)
    W[rng.random((K, N)) < 0.1] = 0
    w = mj.quantize(W, group, symmetric, dtype, rounding=kind)
    plain = mj.quantize(W, group, symmetric, dtype)
    assert w.rounding == kind and plain.rounding is None
    assert_same_bits(w.q, plain.q)
    assert_same_bits(w.scale, plain.scale)

    seen = codes(w, range(first, first + 16), seed % 2**32)
    assert seen.min() >= 0 and seen.max() <= 15
    mean, q, v = seen.mean(axis=0), w.q.astype(np.float64), real_codes(w, W)
    residual = v - q
    if kind == "frac4":
        assert np.array_equal(mean, q + (w.frac4.astype(int) - 16 * (w.frac4 >= 8)) / 16)
        bound = np.where(residual > 15 / 32 - 1e-4, 1 / 16, 1 / 32)
    else:
        moved = np.where(w.sign_bit == 1, -0.25, 0.25)
        inside = (q + np.sign(moved) >= 0) & (q + np.sign(moved) <= 15)
        assert np.array_equal(mean, q + moved * inside)
        bound = 1 / 4
    assert (np.abs(mean - v) <= bound + 1e-4).all()  # v is rounded to float32 where codes are chosen


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_error_of_the_mean_falls(symmetric: bool) -> None:
    """As 1/I down to the channel's own error; independent draws would fall as the root of 1/I."""
    W = dense(1, 256, 256)
    for kind, floor, most in (("frac4", 1 / 16 / 12**0.5, 1 / 16), ("sign_bit", 1 / 4 / 3**0.5, 1 / 4)):
        w = mj.quantize(W, 64, symmetric, rounding=kind)
        v = real_codes(w, W)
        rms = {}
        for count in (1, 2, 4, 8, 16):
            error = codes(w, range(count), seed=3).mean(axis=0) - v
            rms[count] = float(np.sqrt((error**2).mean()))
            assert np.abs(error).max() < 1 / count + most
        nearest = float(np.sqrt(((w.q - v) ** 2).mean()))
        assert nearest == pytest.approx(1 / 12**0.5, rel=0.03)
        assert rms[4] < 0.6 * nearest
        assert rms[2] < 0.75 * rms[1] and rms[4] < 0.6 * rms[2] and rms[8] <= rms[4] and rms[16] <= rms[8]
        assert rms[16] == pytest.approx(floor, rel=0.1)


def test_a_product_repeated_in_a_loop_comes_closer_to_the_unrounded_weight() -> None:
    W, x = dense(2, 256, 64), dense(3, 8, 256).astype(FP16)
    exact = x.astype(np.float64) @ W.astype(np.float64)

    def error(y: Any) -> float:
        return float(np.linalg.norm(y.astype(np.float64) - exact) / np.linalg.norm(exact))

    nearest = error(x @ mj.quantize(W, 64))
    for kind, gain in (("frac4", 8), ("sign_bit", 1.7)):
        w = mj.quantize(W, 64, rounding=kind)
        total = np.zeros(exact.shape)
        for i in range(16):
            with mj.iteration(i):
                total += x @ w
        assert error(total / 16) < nearest / gain


def test_exact_weights_stay_exact() -> None:
    """On a code, frac4 has nothing to add; at the ends, and in constant groups, neither has sign_bit."""
    W = (np.arange(64) % 16).astype(np.float32)[:, None].repeat(3, axis=1)
    W[:, 2] = 5.5
    for kind in CHANNELS:
        w = mj.quantize(W, 64, rounding=kind)
        seen = codes(w, range(16))
        ends = np.isin(w.q, (0, 15)) if kind == "sign_bit" else np.ones(w.shape, bool)
        assert (seen == w.q)[:, ends].all()
        assert_same_bits(mj.dequantize(mj.rounded(w, 0))[:, 2], np.full(64, 5.5, FP16))


def test_channels_that_lead_out_of_range_are_kept_in() -> None:
    q = np.array([[0, 0, 15, 15]], np.uint8)
    scale = np.ones((1, 4), FP16)
    for made in (
        mj.QuantWeight(q, scale, None, -1, frac4=np.array([[8, 15, 1, 7]], np.uint8)),
        mj.QuantWeight(q, scale, None, -1, sign_bit=np.array([[1, 1, 0, 0]], np.uint8)),
    ):
        assert (codes(made, range(16)) == q).all()


@pytest.mark.parametrize("kind", CHANNELS)
def test_the_same_again_and_another_otherwise(kind: str) -> None:
    w = mj.quantize(dense(), 64, rounding=kind)
    one = mj.rounded(w, 3, seed=5)
    assert one.rounding is None and one.scale is w.scale and one.zero is w.zero
    assert np.array_equal(one.q, mj.rounded(w, 3, seed=5).q)
    assert np.array_equal(one.q, mj.rounded(w, 3 + 16, seed=5).q)
    for other in (mj.rounded(w, 4, seed=5), mj.rounded(w, 3, seed=6), w):
        assert (one.q != other.q).mean() > 0.1


def test_codes_by_hand() -> None:
    """Pinned: files made today must mean the same tomorrow."""
    q = np.full((2, 3), 7, np.uint8)
    w = mj.QuantWeight(q, np.ones((1, 3), FP16), None, -1, frac4=np.full((2, 3), 6, np.uint8))
    for index, seed in ((0, 0), (1, 0), (6, 99)):
        phase = int(f"{index:04b}"[::-1], 2)
        for k in range(2):
            for n in range(3):
                at = lowbias32(k ^ lowbias32(n ^ lowbias32(seed))) >> 28 ^ phase
                assert mj.rounded(w, index, seed).q[k, n] == 7 + (at < 6)


# ---- weights that carry a channel -----------------------------------------------------------------------


def carrying(kind: str, **changes: Any) -> mj.QuantWeight:
    return replace(mj.quantize(dense(), 64, rounding=kind), **changes)


@pytest.mark.parametrize("kind", CHANNELS)
def test_a_weight_knows_its_channel(kind: str) -> None:
    w = carrying(kind)
    plain = w.without_rounding()
    assert plain.rounding is None and plain.without_rounding() is plain
    assert w.nbytes == plain.nbytes + w.K * w.N
    assert w.to_host() is w
    assert repr(w).endswith(f"bytes, {kind})") and kind not in repr(plain)
    strided = replace(w, **{kind: np.asfortranarray(getattr(w, kind))})
    assert getattr(strided, kind).flags.c_contiguous
    assert np.array_equal(mj.rounded(strided, 1).q, mj.rounded(w, 1).q)


def test_a_sign_bit_may_be_boolean() -> None:
    w = carrying("sign_bit")
    boolean = replace(w, sign_bit=w.sign_bit.astype(bool))
    assert np.array_equal(mj.rounded(boolean, 2).q, mj.rounded(w, 2).q)


SHAPE = (192, 70)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"frac4": np.zeros(SHAPE, np.int8)}, DTypeError, "frac4 must be uint8, got int8"),
        ({"frac4": np.zeros(SHAPE, bool)}, DTypeError, "frac4 must be uint8, got bool"),
        ({"sign_bit": np.zeros(SHAPE, np.int32)}, DTypeError, "sign_bit must be uint8 or bool, got int32"),
        (
            {"frac4": np.zeros((192, 35), np.uint8)},
            ShapeError,
            r"frac4 must have shape \(192, 70\), the shape",
        ),
        ({"sign_bit": np.zeros((70, 192), bool)}, ShapeError, r"sign_bit must have shape \(192, 70\)"),
        ({"frac4": np.zeros(192, np.uint8)}, ShapeError, "frac4 must have 2 dimensions"),
        (
            {"frac4": np.full(SHAPE, 16, np.uint8)},
            ValueRangeError,
            r"frac4: 13440 of 13440 values outside 0\.\.15",
        ),
        ({"sign_bit": np.full(SHAPE, 2, np.uint8)}, ValueRangeError, "sign_bit: .* neither 0 nor 1"),
        (
            {"frac4": np.zeros(SHAPE, np.uint8), "sign_bit": np.zeros(SHAPE, bool)},
            ValueRangeError,
            "one rounding channel, frac4 or sign_bit, not both",
        ),
        ({"frac4": [[0]]}, DTypeError, "expected a NumPy or CuPy array, got list"),
    ],
)
def test_channels_refused(changes: dict[str, Any], error: type[MarlinJitError], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(mj.quantize(dense(), 64), **changes)


def test_other_refusals() -> None:
    w = carrying("frac4")
    with pytest.raises(
        ValueRangeError, match='rounding must be None, "frac4" or "sign_bit", got \'stochastic\''
    ):
        mj.quantize(dense(), 64, rounding="stochastic")  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match=r"no place for frac4.*w\.without_rounding\(\)"):
        mj.pack(w)
    with pytest.raises(DTypeError, match=r"expected a QuantWeight .*got MarlinWeight"):
        mj.rounded(mj.pack(w.without_rounding()), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match="the weight carries no rounding channel"):
        mj.rounded(w.without_rounding(), 0)
    for arguments, error, message in (
        ((-1,), ValueRangeError, "iteration must be 0 or more, got -1"),
        ((0, -1), ValueRangeError, r"seed must be 0\.\.4294967295, got -1"),
        ((0, 1 << 32), ValueRangeError, "seed must be"),
        ((1.0,), DTypeError, "iteration must be an integer, got float"),
        ((0, "1"), DTypeError, "seed must be an integer, got str"),
    ):
        with pytest.raises(error, match=message):
            mj.rounded(w, *arguments)  # type: ignore[arg-type]
        with pytest.raises(error, match=message), mj.iteration(*arguments):  # type: ignore[arg-type]
            pass
    assert np.array_equal(mj.rounded(w, np.int64(3), np.uint8(2)).q, mj.rounded(w, 3, 2).q)


def test_each_iteration_can_be_packed() -> None:
    w, x = carrying("frac4"), dense(4, 3, 192).astype(FP16)
    for i in range(3):
        packed = mj.pack(mj.rounded(w, i))
        with mj.iteration(i):
            assert_same_bits(mj.dequantize(packed), mj.dequantize(mj.rounded(w, i)))
            np.testing.assert_allclose(
                (x @ packed).astype(float), (x @ w).astype(float), rtol=2e-3, atol=2e-3
            )


# ---- the mode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_products_on_numpy(kind: str, dtype: np.dtype) -> None:
    w = mj.quantize(dense(), 64, dtype=dtype, rounding=kind)
    x, bias = dense(5, 4, 192).astype(dtype), dense(6, 1, 70)[0].astype(dtype)
    off = mj.matmul(x, w.without_rounding(), bias)
    assert_same_bits(mj.matmul(x, w, bias), off)
    with mj.iteration(2, seed=8):
        on = mj.matmul(x, w, bias)
        assert mj.explain(x, w).path == "reference"
        assert "[x] cross-iteration rounding is on" in str(mj.explain(x, w))
        assert_same_bits(mj.matmul(x, w.without_rounding(), bias), off)
    assert_same_bits(on, mj.matmul(x, mj.rounded(w, 2, 8), bias))
    assert (on != off).any()
    assert_same_bits(mj.matmul(x, w, bias), off)
    assert mj.stats() == {"reference": 6}


def test_activation_order() -> None:
    g_idx = np.random.default_rng(1).permutation(np.arange(192) // 64).astype(np.int32)
    w, x = carrying("frac4", g_idx=g_idx), dense(5, 4, 192).astype(FP16)
    with mj.iteration(1):
        on = x @ w
    assert_same_bits(on, x @ mj.rounded(w, 1))
    assert np.array_equal(mj.rounded(w, 1).g_idx, g_idx)


def where_on() -> tuple[int, int] | None:
    """(iteration, seed) that a product here rounds for."""
    now = rounding.current()
    return None if now is None else (now.index, now.seed)


def test_blocks_nest_and_end() -> None:
    assert where_on() is None
    with mj.iteration(3):
        assert where_on() == (3, 0)
        with pytest.raises(KeyError), mj.iteration(4, seed=9):
            assert where_on() == (4, 9)
            raise KeyError
        assert where_on() == (3, 0)
    assert where_on() is None


@pytest.mark.parametrize(
    ("value", "outside", "inside"), [(None, None, (2, 5)), ("1", (0, 0), (2, 5)), ("0", None, None)]
)
def test_environment_variable(
    value: str | None, outside: Any, inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("MARLIN_JIT_CROSS_ITER_ROUND", value)
    w, x = carrying("frac4"), dense(5, 4, 192).astype(FP16)
    for expected, block in ((outside, None), (inside, mj.iteration(2, seed=5))):
        with block or mj.dispatch(True):
            assert where_on() == expected
            y = x @ w
        plain = w.without_rounding() if expected is None else mj.rounded(w, *expected)
        assert_same_bits(y, x @ plain)


@pytest.mark.parametrize("value", ["", "yes", "2", " 1"])
def test_environment_variable_with_another_value(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_JIT_CROSS_ITER_ROUND", value)
    w, x = carrying("frac4"), dense(5, 4, 192).astype(FP16)
    with pytest.raises(ValueRangeError, match=f"MARLIN_JIT_CROSS_ITER_ROUND must be 0 or 1, got {value!r}"):
        mj.matmul(x, w)
    mj.matmul(x, w.without_rounding())  # not its matter


def test_a_block_is_of_its_thread_alone() -> None:
    inside, checked = threading.Event(), threading.Event()
    seen: dict[str, Any] = {}

    def loop() -> None:
        with mj.iteration(7):
            inside.set()
            checked.wait(10)
            seen["thread"] = where_on()

    thread = threading.Thread(target=loop)
    thread.start()
    assert inside.wait(10)
    seen["main"] = where_on()
    checked.set()
    thread.join()
    assert seen == {"thread": (7, 0), "main": None}


def test_a_block_is_of_its_task_alone() -> None:
    seen: dict[int, list[Any]] = {}

    async def loop(task: int) -> None:
        for i in range(3):
            with mj.iteration(i, seed=task):
                await asyncio.sleep(0)
                seen.setdefault(task, []).append(where_on())

    async def both() -> None:
        await asyncio.gather(loop(1), loop(2))
        assert where_on() is None

    asyncio.run(both())
    assert seen == {task: [(i, task) for i in range(3)] for task in (1, 2)}
