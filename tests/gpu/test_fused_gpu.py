"""SwiGLU in the epilogue, and weights side by side, on a device: exact sums, poison, every plan and path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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

cp = pytest.importorskip("cupy")

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
EXP = 2.0**-20
"""Relative error of silu in float32: the hardware's exponential and division, generously."""
HALF_ULP = {FP16: 2.0**-11, BF16: 2.0**-8}
EXPONENTS = -6, -3

pytestmark = pytest.mark.usefixtures("fresh_dispatch")


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [128, 32, -1])
@pytest.mark.parametrize("M", [1, 8, 13, 30, 100, 300])
def test_every_plan_activates_exact_sums(M: int, group: int, dtype: Any, rng: np.random.Generator) -> None:
    """Sums are exact, so what is left is silu's own error and one rounding. N fits no tile."""
    for K, N in ((1024, 356), (2048, 160)):
        (gate, gate64), (up, up64) = (
            exact_weight(rng, K, N, group, dtype, exponents=EXPONENTS) for _ in range(2)
        )
        w = mj.pack_gate_up(gate, up)
        x, a = exact_rows(rng, M, K, dtype)
        g, u = a @ gate64, a @ up64
        exact = g / (1 + np.exp(-g)) * u
        limits = launch.limits_of(current_device())
        problem = launch.problem_of(M, w.packed, asymmetric=True)
        for zeros in (plan.Zeros.DELTAS, plan.Zeros.POINTS):
            for p in plan.plans(replace(problem, zeros=zeros), limits):
                out, intact = poisoned(M, N, dtype)
                launch.marlin(p, matrix(x), w.packed, None, matrix(out), gated=True)
                assert intact(), p
                error = np.abs(out.get().astype(np.float64) - exact)
                bound = np.abs(exact) * (HALF_ULP[dtype] + EXP) + 1e-7
                assert (error <= bound).all(), (p, float((error / bound).max()))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(("K", "N", "group"), [(576, 1536, 32), (320, 100, 64), (384, 7, -1), (96, 24, 32)])
def test_swiglu_on_every_path(K: int, N: int, group: int, dtype: Any, rng: np.random.Generator) -> None:
    gate, up = (
        random_weight(rng, K, N, group, symmetric=False, dtype=dtype, real_zero=True) for _ in range(2)
    )
    w = mj.pack_gate_up(mj.pack(gate), mj.pack(up))
    wide = random_rows(rng, 70, K + 3, dtype)
    for x in (wide[:1, :K], wide[:5, 1 : K + 1], wide[:17, :K], wide[:, ::-1][:, :K]):
        x64 = cp.ascontiguousarray(x.astype(np.float64))
        g, u = product(x64, weight64(gate)), product(x64, weight64(up))
        exact = g / (1 + cp.exp(-g)) * u
        for path in ("marlin", "marlin_pair", "native"):
            out, intact = poisoned(len(x), N, dtype)
            assert mj.matmul_swiglu(x, w, out=out, path=path) is out
            assert intact(), path
            # Errors of both factors, and of silu between them; few outputs have no average error.
            bound = {FP16: 3e-3, BF16: 2.4e-2}[dtype]
            assert relative_error(out, exact) < bound, (path, x.shape)
        again = mj.matmul_swiglu(x, w)
        assert bool((again == mj.matmul_swiglu(x, w, path="marlin")).all())
    assert set(mj.stats()) == {"marlin", "marlin_pair", "native"}


def test_the_fp16_cache_activates_too(rng: np.random.Generator) -> None:
    from marlin_jit import _cublas

    if not _cublas.available():
        pytest.skip("cuBLAS is not installed")
    gate, up = (random_weight(rng, 256, 100, 64, symmetric=False, dtype=FP16) for _ in range(2))
    w = mj.pack_gate_up(gate, up)
    w.packed.cache_fp16()
    x = random_rows(rng, 20, 256, FP16)
    fused = mj.matmul_swiglu(x, w, path="marlin").astype(np.float64)
    assert relative_error(mj.matmul_swiglu(x, w), fused) < 2e-3
    assert mj.stats() == {"marlin": 1, "fp16_cache": 1}


@pytest.mark.parametrize("M", [1, 16, 65])
def test_columns_side_by_side_are_the_products_side_by_side(M: int, rng: np.random.Generator) -> None:
    """Exact sums do not depend on how the plan splits K."""
    parts = [exact_weight(rng, 576, N, 32, FP16, exponents=EXPONENTS) for N in (576, 192, 192)]
    w = mj.concatenate([mj.pack(qw) for qw, _ in parts])
    x, a = exact_rows(rng, M, 576, FP16)
    expected = np.concatenate([mj.matmul(x, mj.pack(qw)).get() for qw, _ in parts], axis=1)
    assert np.array_equal(mj.matmul(x, w).get(), expected)
    exact = np.concatenate([a @ values for _, values in parts], axis=1)
    assert np.array_equal(expected, exact.astype(np.float16))


@pytest.mark.parametrize("N", [49152, 50257])
def test_a_head_of_any_vocabulary_is_on_the_fast_path(N: int, rng: np.random.Generator) -> None:
    qw = random_weight(rng, 576, N, 32, symmetric=False, dtype=FP16)
    w = mj.pack(qw)
    for M in (1, 9, 64):
        x = random_rows(rng, M, 576, FP16)
        out, intact = poisoned(M, N, FP16)
        mj.matmul(x, w, out=out)
        assert intact()
        assert relative_error(out, product(x.astype(np.float64), weight64(qw))) < 4e-4
    assert mj.stats() == {"marlin": 3}


def test_swiglu_within_a_graph(rng: np.random.Generator) -> None:
    gate, up = (random_weight(rng, 512, 320, 64, symmetric=True, dtype=FP16) for _ in range(2))
    w = mj.pack_gate_up(gate, up)
    x = random_rows(rng, 4, 512, FP16)
    out = cp.empty((4, 320), np.float16)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        expected = [mj.matmul_swiglu(x, w, path=path).get() for path in ("marlin", "native")]
        for path, wanted in zip(("marlin", "native"), expected, strict=True):
            stream.begin_capture()
            mj.matmul_swiglu(x, w, out=out, path=path)
            graph = stream.end_capture()
            for _ in range(3):
                out.fill(np.nan)
                graph.launch(stream)
                assert np.array_equal(out.get(), wanted)
