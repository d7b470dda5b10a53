"""Runs every kernel once on small shapes: what compute-sanitizer is pointed at (see CONTRIBUTING.md).

compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from exact import matrix

import marlin_jit as mj
from marlin_jit import launch, models, plan
from marlin_jit.device import current_device, unavailable_reason
from marlin_jit.dispatch import matmul


def some_plans(problem: plan.Problem, limits: plan.Limits) -> list[plan.Plan]:
    """All plans, but of those of `marlin_decode`, which differ in where its warps stand, every ninth."""
    found = plan.plans(problem, limits)
    decodes = [p for p in found if p.build.name == "marlin_decode"]
    return [p for p in found if p.build.name != "marlin_decode"] + decodes[::9]


def main() -> None:
    """Each plan, path and helper kernel on problems that fit no tile."""
    reason = unavailable_reason()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)
    import cupy

    rng = np.random.default_rng(0)
    limits = launch.limits_of(current_device())
    count = 0
    for K, N, group in ((1408, 136, 128), (384, 328, 128), (320, 200, 64), (288, 72, 32), (250, 130, -1)):
        groups = 1 if group == -1 else K // group
        q = cupy.asarray(rng.integers(0, 16, (K, N), dtype=np.uint8))
        scale = cupy.asarray((0.01 + 0.01 * rng.random((groups, N))).astype(np.float16))
        points = cupy.asarray(rng.integers(0, 16, (groups, N), dtype=np.uint8))
        w = mj.pack(mj.QuantWeight.from_zero_points(q, scale, points, group))
        exact = None
        for M in (1, 7, 16, 33, 70, 133) if group == 128 else (1, 7, 16, 33, 70):
            x = cupy.asarray(rng.standard_normal((M, K)).astype(np.float16))
            exact = x.astype(np.float64).get() @ mj.dequantize(w).get().astype(np.float64)
            if K % 8 == 0:
                problem = launch.problem_of(M, w, asymmetric=True)
                for zeros in (plan.Zeros.DELTAS, plan.Zeros.POINTS):
                    for p in some_plans(replace(problem, zeros=zeros), limits):
                        out = cupy.full((M, N), np.nan, np.float16)
                        launch.marlin(p, matrix(x), w, None, matrix(out))
                        assert np.abs(out.get() - exact).max() < 0.05, p
                        count += 1
            for path in ("marlin", "native", "batch_invariant"):
                assert np.abs(matmul(x, w, path=path).get() - exact).max() < 0.05, (path, M, K)
                count += 1
            for warps in (1, 2, 4):
                with patch.object(launch, "correction_group_warps", return_value=warps):
                    pair = matmul(x, w, path="marlin_pair").get()
                assert np.abs(pair - exact).max() < 0.05, ("marlin_pair", warps, M, K)
                count += 1
        columns = cupy.full(w.padded_shape[::-1], np.nan, np.float16)
        launch.dense_weights(w, 0, columns)
        assert np.abs(columns[:N, :K].T.get() - mj.dequantize(w).get()).max() < 0.01
        dense = cupy.empty((K, N), np.float16)
        launch.dequantize(w, dense)
        assert bool((dense == mj.dequantize(w)).all())
    order = rng.integers(0, 2, 256).argsort(kind="stable")
    g_idx = np.empty(256, np.int32)
    g_idx[order] = np.arange(256) // 128
    q = cupy.asarray(rng.integers(0, 16, (256, 64), dtype=np.uint8))
    shuffled = mj.QuantWeight(q, cupy.full((2, 64), 0.01, np.float16), None, 128, cupy.asarray(g_idx))
    for M in (1, 8, 9):
        x = cupy.asarray(rng.standard_normal((M, 256)).astype(np.float16))
        difference = matmul(x, mj.pack(shuffled)) - matmul(x, shuffled)
        assert float(abs(difference).max()) < 0.01
        count += 1
    for name, end in (("frac4", 16), ("sign_bit", 2)):
        channel = cupy.asarray(rng.integers(0, end, (256, 64), dtype=np.uint8))
        for weight in (shuffled, replace(shuffled, g_idx=None)):
            rounding = replace(weight, **{name: channel})
            with mj.iteration(3):
                assert bool((matmul(x, rounding) == matmul(x, mj.rounded(rounding, 3))).all())
            count += 1
    gate, up = (
        mj.QuantWeight(
            cupy.asarray(rng.integers(0, 16, (192, 72), dtype=np.uint8)),
            cupy.full((6, 72), 0.02, np.float16),
            cupy.full((6, 72), -0.1, np.float32),
            32,
        )
        for _ in range(2)
    )
    both = mj.pack_gate_up(gate, up)
    for M in (1, 9, 40):
        x = cupy.asarray(rng.standard_normal((M, 192)).astype(np.float16))
        g, u = (
            x.get().astype(np.float64) @ mj.dequantize(w, np.float32).get().astype(np.float64)
            for w in (gate, up)
        )
        exact = g / (1 + np.exp(-g)) * u
        for p in some_plans(launch.problem_of(M, both.packed, asymmetric=True), limits):
            out = cupy.full((M, 72), np.nan, np.float16)
            launch.marlin(p, matrix(x), both.packed, None, matrix(out), gated=True)
            assert np.abs(out.get() - exact).max() < 0.05, p
            count += 1
        assert np.abs(mj.matmul_swiglu(x, both, path="native").get() - exact).max() < 0.05
        count += 1
    config = models.LlamaConfig(
        layers=1, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=50, context=128,
        eps=1e-5, rope_base=1e4, interleaved=False, tied=False,
    )  # fmt: skip
    for tokens, start in ((1, 37), (70, 5)):
        q, k, v = (
            cupy.asarray(rng.standard_normal((1, tokens, n * 16)).astype(np.float16)) for n in (4, 2, 2)
        )
        cache = models.KVCache(config, 80, 1, dtype=np.float16, xp=cupy)
        cache.position[...] = start
        h = cupy.asarray(rng.standard_normal((1, tokens, 64)).astype(np.float16))
        q = models.ops.rotate_and_store(
            q, k, v, cache.tables, cache.position, cache.keys[0], cache.values[0], False
        )
        y = models.ops.attention(q, cache.keys[0], cache.values[0], cache.position)
        models.ops.add_rms_norm(h, y, cupy.ones(64, np.float32), 1e-5)
        assert bool(cupy.isfinite(h).all())
    cupy.cuda.runtime.deviceSynchronize()
    print(f"{count} products right")


if __name__ == "__main__":
    main()
