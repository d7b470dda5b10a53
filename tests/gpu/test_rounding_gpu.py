"""Cross-iteration rounding on a device: its kernel against plain products with the same iteration's codes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exact import poisoned, product, random_rows, random_weight, relative_error, weight64
from helpers import assert_same_bits

import marlin_jit as mj
from marlin_jit import rounding

cp = pytest.importorskip("cupy")

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BOUND = {FP16: 8e-4, BF16: 6e-3}
CHANNELS = ("frac4", "sign_bit")
K, N = 256, 192

pytestmark = pytest.mark.usefixtures("fresh_dispatch")


def with_channel(w: mj.QuantWeight, kind: str, rng: np.random.Generator) -> mj.QuantWeight:
    """The weight with any values in a channel, those that lead out of 0..15 among them."""
    values = rng.integers(0, 16 if kind == "frac4" else 2, w.shape, dtype=np.uint8)
    return replace(w, **{kind: cp.asarray(values)})


def carrying(kind: str, rng: np.random.Generator, dtype: Any = FP16) -> mj.QuantWeight:
    return with_channel(random_weight(rng, K, N, 64, symmetric=False, dtype=dtype), kind, rng)


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(np.uint16) == b.view(np.uint16)).all())


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("zeros", ["symmetric", "zero points", "real zeros"])
@pytest.mark.parametrize(("k", "n", "group"), [(256, 192, 64), (96, 1, 48), (250, 130, -1), (33, 257, 1)])
def test_the_product_of_the_codes_of_an_iteration(
    k: int, n: int, group: int, zeros: str, dtype: np.dtype, kind: str, rng: np.random.Generator
) -> None:
    plain = random_weight(
        rng, k, n, group, symmetric=zeros == "symmetric", dtype=dtype, real_zero=zeros == "real zeros"
    )
    w = with_channel(plain, kind, rng)
    bias = random_rows(rng, 1, n, dtype)[0]
    for M, index, seed in ((1, 0, 0), (5, 6, 1), (70, 1000003, 2**32 - 1)):
        x = random_rows(rng, M, k, dtype)
        expected = mj.rounded(w, index, seed)
        with mj.iteration(index, seed):
            assert mj.explain(x, w).path == "cross_iteration"
            for b in (None, bias):
                out, intact = poisoned(M, n, dtype)
                mj.matmul(x, w, b, out)
                assert same(out, mj.matmul(x, expected, b, path="native"))
                assert intact(), "wrote outside the output"
        exact = product(x.astype(np.float64), weight64(expected)) + bias.astype(np.float64)
        assert relative_error(out, exact) <= 2 * BOUND[dtype]


@pytest.mark.parametrize("kind", CHANNELS)
def test_codes_are_those_of_the_host(kind: str, rng: np.random.Generator) -> None:
    w = carrying(kind, rng)
    host = w.to_host()
    assert isinstance(getattr(host, kind), np.ndarray) and host.nbytes == w.nbytes
    assert isinstance(getattr(host.to_device(), kind), cp.ndarray)
    for index, seed in ((0, 0), (3, 0), (17, 5), (2**40 + 6, 2**32 - 1)):
        on_device = mj.rounded(w, index, seed)
        assert isinstance(on_device.q, cp.ndarray) and on_device.rounding is None
        assert_same_bits(on_device.q.get(), mj.rounded(host, index, seed).q)


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_channels_are_those_of_the_host(symmetric: bool, kind: str, rng: np.random.Generator) -> None:
    dense = rng.standard_normal((256, 300)).astype(np.float32)
    host = mj.quantize(dense, 64, symmetric, rounding=kind)
    device = mj.quantize(cp.asarray(dense), 64, symmetric, rounding=kind)
    for name in ("q", "scale", kind):
        assert_same_bits(getattr(device, name).get(), getattr(host, name))


@pytest.mark.parametrize("kind", CHANNELS)
def test_strides(kind: str, rng: np.random.Generator) -> None:
    w = carrying(kind, rng)
    expected = mj.rounded(w, 9)
    wide = random_rows(rng, 20, 2 * K + 64, FP16)
    with mj.iteration(9):
        for x in (
            wide[:, 1 : 1 + K],
            wide[::-1, :K],
            wide[::3, : 2 * K : 2],
            random_rows(rng, K, 20, FP16).T,
            wide[3, :K],
            random_rows(rng, 30, K, FP16).reshape(2, 15, K).transpose(1, 0, 2),
        ):
            assert same(mj.matmul(x, w), mj.matmul(x, expected))
        x = wide[:, :K]
        parent = cp.full((20, 2 * N + 5), 777, FP16)
        for place in (np.s_[:, 3 : 3 + N], np.s_[:, 1 : 2 * N : 2], np.s_[::-1, :N]):
            out = parent[place]
            assert mj.matmul(x, w, out=out) is out
            assert same(cp.ascontiguousarray(out), mj.matmul(x, expected))
            out[...] = 777
            assert bool((parent == 777).all()), "wrote outside the output"
        assert mj.matmul(cp.empty((0, K), FP16), w).shape == (0, N)


@pytest.mark.parametrize("kind", CHANNELS)
def test_activation_order(kind: str, rng: np.random.Generator) -> None:
    for g_idx in (rng.permutation(np.arange(K) // 64), rng.integers(0, 4, K)):
        w = replace(carrying(kind, rng), g_idx=cp.asarray(g_idx.astype(np.int32)))
        x = random_rows(rng, 7, K, FP16)
        with mj.iteration(2):
            assert same(x @ w, x @ mj.rounded(w, 2))


def test_one_hot_rows_return_the_weight(rng: np.random.Generator) -> None:
    w = carrying("frac4", rng)
    x = cp.eye(K, dtype=FP16)
    for index in range(16):
        with mj.iteration(index):
            got = x @ w
        assert relative_error(got, weight64(mj.rounded(w, index))) <= BOUND[FP16]


def test_off_unless_asked_for(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = carrying("frac4", rng), random_rows(rng, 5, K, FP16)
    plain = x @ w.without_rounding()
    assert mj.explain(x, w).path == "native"
    assert same(x @ w, plain)
    with mj.iteration(4):
        moved = x @ w
        assert same(mj.matmul(x, w, path="cross_iteration"), moved)
        assert same(mj.matmul(x, w, path="native"), plain)
        monkeypatch.setenv(rounding.SWITCH, "0")
        assert same(x @ w, plain)
    monkeypatch.setenv(rounding.SWITCH, "1")
    assert same(x @ w, x @ mj.rounded(w, 0))
    assert not same(moved, plain)
    assert mj.stats() == {"native": 5, "cross_iteration": 3}


@pytest.mark.parametrize("kind", CHANNELS)
def test_the_same_bits_fifty_times(kind: str, rng: np.random.Generator) -> None:
    w, x = carrying(kind, rng, BF16), random_rows(rng, 33, K, BF16)
    with mj.iteration(3, seed=1):
        first = x @ w
        assert all(same(x @ w, first) for _ in range(50))


def test_a_loop_comes_closer_to_the_unrounded_weight(rng: np.random.Generator) -> None:
    dense = cp.asarray(rng.standard_normal((512, 128)).astype(np.float32))
    x = random_rows(rng, 20, 512, FP16)
    exact = product(x.astype(np.float64), dense.astype(np.float64))
    nearest = relative_error(x @ mj.quantize(dense, 64), exact)
    for kind, gain in (("frac4", 8), ("sign_bit", 1.7)):
        w = mj.quantize(dense, 64, rounding=kind)
        total = cp.zeros(exact.shape)
        for i in range(16):
            with mj.iteration(i):
                total += (x @ w).astype(np.float64)
        assert relative_error(total / 16, exact) < nearest / gain


def test_threads_in_iterations_of_their_own(rng: np.random.Generator) -> None:
    w, x = carrying("frac4", rng), random_rows(rng, 20, K, FP16)
    expected = [x @ mj.rounded(w, i) for i in range(8)]
    cp.cuda.runtime.deviceSynchronize()

    def work(i: int) -> bool:
        stream = cp.cuda.Stream(non_blocking=True)
        with stream, mj.iteration(i):
            ys = [x @ w for _ in range(20)]
        stream.synchronize()
        return all(same(y, expected[i]) for y in ys)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_graph_keeps_its_iteration(rng: np.random.Generator) -> None:
    w, x = carrying("sign_bit", rng), random_rows(rng, 20, K, FP16)
    expected = x @ mj.rounded(w, 5)
    out = cp.empty((20, N), FP16)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        with mj.iteration(0):
            mj.matmul(x, w, out=out)
        stream.begin_capture()
        with mj.iteration(5):
            mj.matmul(x, w, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            out[...] = np.nan
            with mj.iteration(7):
                graph.launch(stream)
            assert same(out, expected)
    stream.synchronize()
