"""marlin_wgmma on Hopper: every build, schedule and edge against exact integers, poison, and itself."""

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

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BOUND = {FP16: 4e-4, BF16: 3e-3}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if current_device().capability != (9, 0):
        pytest.skip("wgmma is an instruction of compute capability 9.0")


def on_gpu(array: np.ndarray):
    import cupy

    return cupy.asarray(array)


def limits() -> plan.Limits:
    return launch.limits_of(current_device())


def tiles_of(problem: plan.Problem) -> list[plan.WgmmaTile]:
    return [
        tile
        for tile in plan.wgmma_tile_shapes(problem, limits())
        if plan.wgmma_stages(tile, problem, limits()) is not None
    ]


def schedules(tile: plan.WgmmaTile, problem: plan.Problem) -> list[tuple[int, int, int]]:
    """(grid, split tiles, each): whole tiles in turn and all at once, both kinds of sharing, mixtures."""
    tiles, units = plan.gemm_tiles(tile, problem)
    if tile.pairs:  # a pair a tile, and several, evenly and not
        several = [
            (s, each) for s in (2, 3) for each in (2, units // s) if each > 1 and units - (s - 1) * each > 1
        ]
        return [(tiles * s, tiles, each) for s, each in [(1, units), *several] if units > 1]
    found = [(1, 0, 0), (min(tiles, 132), 0, 0), (max(1, tiles // 2), 0, 0)]
    for grid in (2, 3, 7, 131):
        if grid <= tiles * units:
            found.append((grid, tiles, 0))
            found.append((grid, max(1, tiles // 2), 0))
    for sharers in (2, 3, 5):
        if sharers <= units and tiles * sharers <= 132:
            each = max(1, units // sharers)
            if each * (sharers - 1) < units:
                found.append((tiles * sharers, tiles, each))
    return sorted(set(found))


def wgmma_plans(problem: plan.Problem) -> list[plan.Plan]:
    found = [
        plan.wgmma_plan(tile, *schedule, problem, limits())
        for tile in tiles_of(problem)
        for schedule in schedules(tile, problem)
    ]
    assert found and None not in found
    return [p for p in found if p is not None]


def integers(rng, M, K, N, group, dtype):
    """Activations in {-1, 0, 1}, scales powers of two: every sum is exact. (x, weight, expected output)."""
    qw, values = exact_weight(rng, K, N, group, dtype, exponents=(-3, 3))
    x, a = exact_rows(rng, M, K, dtype)
    exact = a @ values
    assert np.abs(exact).max() < 2**15
    return x, mj.pack(qw), exact.astype(np.float32).astype(dtype)


def check_exact(p, x, w, expected, bias=None):
    out, intact = poisoned(*expected.shape, expected.dtype)
    launch.marlin(p, matrix(x), w, bias, matrix(out))
    assert intact(), p
    wrong = np.argwhere(out.get() != expected)
    assert not len(wrong), f"{len(wrong)} wrong, first {wrong[0]}, last {wrong[-1]}: {p}"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [128, 64, 32, -1])
@pytest.mark.parametrize("M", [9, 48, 130])
def test_one_block_one_tile_first(M, group, dtype, rng):
    """The simplest launches, by themselves: one block for one tile, or for a few, of every build."""
    x, w, expected = integers(rng, M, 256, 64, group, dtype)
    for zeros in (plan.Zeros.POINTS, plan.Zeros.DELTAS):
        problem = replace(launch.problem_of(M, w, asymmetric=True), zeros=zeros)
        for tile in (tile for tile in tiles_of(problem) if not tile.pairs):
            p = plan.wgmma_plan(tile, 1, 0, 0, problem, limits())
            check_exact(p, x, w, expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [128, 64, 32, -1])
@pytest.mark.parametrize("M", [1, 16, 33, 64, 65, 96, 127, 300])
def test_every_build_and_schedule_is_exact_on_integers(M, group, dtype, rng):
    for K, N in ((1024, 704), (2048 + 64, 328), (192, 72), (1152, 1001)):
        if group == 128 and K % 128:
            continue
        x, w, expected = integers(rng, M, K, N, group, dtype)
        for zeros in (plan.Zeros.POINTS, plan.Zeros.DELTAS):
            problem = replace(launch.problem_of(M, w, asymmetric=True), zeros=zeros)
            if group == -1 and zeros == plan.Zeros.DELTAS and not tiles_of(problem):
                assert w.padded_shape[0] % 128  # no whole stages: not planned
                continue
            for p in wgmma_plans(problem):
                check_exact(p, x, w, expected)


@pytest.mark.parametrize("M", [16, 40, 100])
def test_codes_missing_from_a_last_stage_are_harmless_under_large_scales(M, rng):
    """Such a code is 0, which means -8, and 8 scales of 20000 overflow float16."""
    K, N = 192, 200
    codes = rng.integers(7, 10, (K, N), dtype=np.uint8)
    codes[3:] = 8
    scale = np.full((1, N), 20000, np.float16)
    w = mj.pack(
        mj.QuantWeight.from_zero_points(*map(on_gpu, (codes, scale, np.full((1, N), 8, np.uint8))), -1)
    )
    x = np.eye(M, K, dtype=np.float16)
    expected = (x.astype(np.float64) @ ((codes.astype(np.float64) - 8) * 20000)).astype(np.float16)
    for p in wgmma_plans(launch.problem_of(M, w, asymmetric=False)):
        check_exact(p, on_gpu(x), w, expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [128, 64, 32, -1])
def test_symmetric_weights_with_bias_and_strided_rows(group, dtype, rng):
    import cupy

    for M, K, N in ((20, 512, 328), (64, 1000, 1000), (100, 1024, 192)):
        if K % 128 and group != -1:
            continue
        qw = random_weight(rng, K, N, group, symmetric=True, dtype=dtype)
        w = mj.pack(qw)
        wide = random_rows(rng, M, K + 24, dtype)
        x = wide[:, 8 : K + 8]
        bias = random_rows(rng, 1, N, dtype)[0]
        exact = product(x.astype(np.float64), weight64(qw)) + bias.astype(np.float64)
        for p in wgmma_plans(launch.problem_of(M, w, asymmetric=False)):
            out, intact = poisoned(M, N, dtype)
            launch.marlin(p, matrix(x), w, bias, matrix(out))
            assert intact(), p
            assert relative_error(out, exact) <= BOUND[dtype], p
            # Rows that are not aligned, and rows that are, of which not all columns exist.
            for stride, columns in ((N + 3, N), (N + 8, N - 7), (N + 8, N - 63), (N + 8, 1)):
                rows = cupy.full((M, stride), 7, dtype)
                launch.marlin(p, matrix(x), w, bias, matrix(rows[:, :columns]))
                assert bool((rows[:, :columns] == out[:, :columns]).all()), p
                assert bool((rows[:, columns:] == 7).all()), p


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_one_hot_rows_return_the_weight(dtype, rng):
    """A = I gives W itself: an index fault shows its place."""
    import cupy

    for group in (128, 32, -1):
        w = mj.pack(random_weight(rng, 384, 448, group, symmetric=True, dtype=dtype))
        expected = mj.dequantize(w).get()
        x = cupy.eye(384, dtype=np.float32).astype(dtype)
        for p in wgmma_plans(launch.problem_of(384, w, asymmetric=False)):
            check_exact(p, x, w, expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(("M", "N"), [(50, 420), (130, 160)])
def test_gated(M, N, dtype, rng):
    import cupy

    K = 512
    gate, up = (random_weight(rng, K, N, 128, symmetric=True, dtype=dtype) for _ in range(2))
    w = mj.pack_gate_up(gate, up).packed
    x = random_rows(rng, M, K, dtype)
    g, u = (product(x.astype(np.float64), weight64(half)) for half in (gate, up))
    exact = g / (1 + cupy.exp(-g)) * u
    for p in wgmma_plans(launch.problem_of(M, w, asymmetric=False)):
        out, intact = poisoned(M, N, dtype)
        launch.marlin(p, matrix(x), w, None, matrix(out), gated=True)
        assert intact(), p
        assert relative_error(out, exact) <= {FP16: 3e-3, BF16: 2.4e-2}[dtype], p


@pytest.mark.parametrize("M", [12, 64, 200])
def test_same_bits_every_time_and_under_a_graph(M, rng):
    """Many launches in a row, which overlap; then replays of them. Counters are left at zero each time."""
    import cupy

    w = mj.pack(random_weight(rng, 4096, 1024, 128, symmetric=False, dtype=FP16))
    x = random_rows(rng, M, 4096, FP16)
    problem = launch.problem_of(M, w, asymmetric=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        for p in wgmma_plans(problem):
            outs = [poisoned(M, 1024, FP16)[0] for _ in range(20)]
            prepared = launch.marlin(p, matrix(x), w, None, matrix(outs[0]))
            for out in outs:
                prepared(x.data.ptr, 4096, 0, out.data.ptr, 1024)
            first = outs[0].view(np.uint16)
            assert all(bool((out.view(np.uint16) == first).all()) for out in outs), p
            again = [cupy.full((M, 1024), np.nan, FP16) for _ in range(5)]
            stream.begin_capture()
            for out in again:
                prepared(x.data.ptr, 4096, 0, out.data.ptr, 1024)
            graph = stream.end_capture()
            for _ in range(3):
                for out in again:
                    out[...] = np.nan
                graph.launch(stream)
                assert all(bool((out.view(np.uint16) == first).all()) for out in again), p


def test_a_chain_reads_what_the_launch_before_wrote(rng):
    """Activations must not be copied before the grid before has ended."""
    import cupy

    K, M = 1024, 48
    weights = [mj.pack(random_weight(rng, K, K, 128, symmetric=False, dtype=FP16)) for _ in range(3)]
    problem = launch.problem_of(M, weights[0], asymmetric=True)
    x = random_rows(rng, M, K, FP16) / 8
    for p in wgmma_plans(problem):
        ends = []
        for wait in (True, False):
            source = x
            for i in range(6):
                to = cupy.full((M, K), np.nan, FP16)
                launch.marlin(p, matrix(source), weights[i % 3], None, matrix(to))
                if wait:
                    cupy.cuda.runtime.deviceSynchronize()
                source = to
            ends.append(source.view(np.uint16))
        assert bool((ends[0] == ends[1]).all()), p
