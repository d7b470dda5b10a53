"""Every GEMM path and every kernel build against float64, exact integers, poison and itself."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exact import (
    exact_rows,
    exact_weight,
    matrix,
    poisoned,
    product,
    random_rows,
    random_weight,
    relative_error,
    weight64,
)

import marlin_jit as mj
from marlin_jit import launch, plan
from marlin_jit.device import current_device
from marlin_jit.dispatch import matmul

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BOUND = {FP16: 4e-4, BF16: 3e-3}
ROWS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
PATHS = ("marlin", "marlin_pair", "native")


def check(y, intact, exact, dtype) -> None:
    assert intact(), "wrote outside the output"
    error = relative_error(y, exact)
    assert error <= BOUND[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("K", "N", "group"),
    [
        (256, 256, 128),
        (576, 192, 64),
        (320, 1000, 32),
        (384, 72, -1),
        (96, 100, 32),
        (1000, 130, -1),
        (4096, 512, 128),
    ],
)
def test_all_rows_all_paths(K, N, group, symmetric, dtype, rng):
    qw = random_weight(rng, K, N, group, symmetric=symmetric, dtype=dtype)
    w, w64 = mj.pack(qw), weight64(qw)
    bias = random_rows(rng, 1, N, dtype)[0]
    x = random_rows(rng, max(ROWS), K, dtype)
    exact = product(x.astype(np.float64), w64)
    for M in ROWS:
        for path in PATHS:
            if path == "marlin_pair" and symmetric:
                continue
            out, intact = poisoned(M, N, dtype)
            matmul(x[:M], w, out=out, path=path)
            check(out, intact, exact[:M], dtype)
        out, intact = poisoned(M, N, dtype)
        matmul(x[:M], w, bias=bias, out=out)
        check(out, intact, exact[:M] + bias.astype(np.float64), dtype)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("M", [0, 1, 2, 7, 8, 16, 17, 33, 64, 129, 1000, 4097])
def test_large_shapes(M, dtype, rng):
    for K, N, group in ((4096, 4096, 128), (7392, 1216, 32), (10944, 2048, 64)):
        qw = random_weight(rng, K, N, group, symmetric=False, dtype=dtype, real_zero=True)
        w = mj.pack(qw)
        x = random_rows(rng, M, K, dtype)
        out, intact = poisoned(M, N, dtype)
        assert matmul(x, w, out=out) is out
        if M:
            check(out, intact, product(x.astype(np.float64), weight64(qw)), dtype)


def every_plan(problem: plan.Problem) -> list[plan.Plan]:
    """Each build the device has, under each schedule the planner would try."""
    limits = launch.limits_of(current_device())
    found = plan.plans(problem, limits)
    assert {p.build.name for p in found} >= {"marlin_gemm"}
    return found


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [128, 64, 32, -1])
@pytest.mark.parametrize("M", [5, 13, 30, 100, 300])
def test_every_plan_is_exact_on_integers(M, group, dtype, rng):
    """A in {-1, 0, 1}, scales and deltas powers of two: float32 sums are exact, so is the rounded result."""
    for K, N in ((1024, 704), (2048 + 64, 320)):
        if group == 128 and K % 128:
            continue
        qw, values = exact_weight(rng, K, N, group, dtype, exponents=(-3, 3))
        x, a = exact_rows(rng, M, K, dtype)
        exact = a @ values
        expected = exact.astype(np.float32).astype(dtype)
        assert np.abs(exact).max() < 2**16
        w = mj.pack(qw)
        problem = launch.problem_of(M, w, asymmetric=True)
        assert problem.zeros == plan.Zeros.POINTS
        for p in [*every_plan(problem), *every_plan(replace(problem, zeros=plan.Zeros.DELTAS))]:
            out, intact = poisoned(M, N, dtype)
            launch.marlin(p, matrix(x), w, None, matrix(out))
            assert intact(), p
            wrong = np.argwhere(out.get() != expected)
            assert not len(wrong), f"{len(wrong)} wrong, first {wrong[0]}: {p}"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_one_hot_rows_return_the_weight(dtype, rng):
    """A = I gives W itself: an index fault shows its place."""
    import cupy

    for group in (128, 32, -1):
        qw = random_weight(rng, 384, 448, group, symmetric=True, dtype=dtype)
        w = mj.pack(qw)
        expected = mj.dequantize(w).get()
        eye = cupy.eye(384, dtype=np.float32).astype(dtype)
        for path in ("marlin", "native"):
            for rows in (slice(0, 8), slice(8, 24), slice(0, 384)):
                y = matmul(eye[rows], w, path=path).get()
                assert np.array_equal(y, expected[rows]), (group, path)


@pytest.mark.parametrize("M", [1, 5, 16, 33, 64, 200])
def test_same_bits_every_time(M, rng):
    import cupy

    qw = random_weight(rng, 4096, 1024, 128, symmetric=False, dtype=FP16)
    w = mj.pack(qw)
    x = random_rows(rng, M, 4096, FP16)
    for path in ("marlin", "marlin_pair"):
        first = matmul(x, w, path=path).view(np.uint16)
        for _ in range(50):
            assert bool(cupy.array_equal(matmul(x, w, path=path).view(np.uint16), first))


def test_graph_replays_follow_their_input(rng):
    import cupy

    weights = [mj.pack(random_weight(rng, 512, 512, 128, symmetric=False, dtype=FP16)) for _ in range(3)]
    x = random_rows(rng, 24, 512, FP16) / 8
    outs = [cupy.empty((24, 512), FP16) for _ in weights]

    def chain():
        y = x
        for w, out in zip(weights, outs, strict=True):
            y = matmul(y, w, out=out)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        chain()
        stream.begin_capture()
        chain()
        graph = stream.end_capture()
        for _ in range(20):
            x[...] = random_rows(rng, 24, 512, FP16) / 8
            graph.launch(stream)
            replayed = outs[-1].copy()
            chain()
            assert bool((outs[-1] == replayed).all())


def test_two_streams_share_a_weight(rng):
    import cupy

    w = mj.pack(random_weight(rng, 8192, 256, 128, symmetric=False, dtype=FP16))
    xs = [random_rows(rng, M, 8192, FP16) for M in (3, 40)]
    expected = [matmul(x, w) for x in xs]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in xs]
    outs = [cupy.empty_like(y) for y in expected]
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(500):
        for stream, x, out in zip(streams, xs, outs, strict=True):
            with stream:
                matmul(x, w, out=out)
    cupy.cuda.runtime.deviceSynchronize()
    for y, out in zip(expected, outs, strict=True):
        assert bool((y == out).all())


def test_sums_that_overflow_half_precision_stay_finite():
    import cupy

    K, N = 4096, 256
    q = np.full((K, N), 15, np.uint8)
    q[K // 2 :] = 1
    w = mj.pack(mj.QuantWeight(cupy.asarray(q), cupy.ones((K // 128, N), FP16), None, 128))
    for M in (1, 16, 64, 200):
        x = cupy.full((M, K), 600, FP16)
        for path in ("marlin", "native"):
            assert bool((matmul(x, w, path=path) == 0).all())
