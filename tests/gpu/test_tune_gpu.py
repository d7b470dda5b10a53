"""Tuning on a GPU: within its time, right results, and products that take what was found."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from exact import exact_rows, exact_weight

import marlin_jit as mj
from marlin_jit import _tensor_map, launch, plan, tuned
from marlin_jit.cli.main import main
from marlin_jit.device import current_device

FP16 = np.dtype(np.float16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Plans go to a directory of the test's; kernels come from the usual cache."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "plans.json"))
    tuned._known.cache_clear()
    tuned._checked.cache_clear()
    yield tmp_path / "plans.json"
    monkeypatch.undo()
    tuned._known.cache_clear()
    tuned._checked.cache_clear()


def test_tune_keeps_plans_that_products_then_take(own_cache, rng, monkeypatch) -> None:
    qw, values = exact_weight(rng, 1024, 704, 128, FP16, exponents=(-3, 3))
    w = mj.pack(qw)
    ms = (1, 40, 300)
    mj.tune(w, ms, seconds=0.1)  # compiles
    start = time.monotonic()
    found = mj.tune(w, ms, seconds=1.0)
    assert time.monotonic() - start < 6.0
    assert [one.problem.m for one in found] == list(ms)
    assert all(0 < one.us <= one.planned_us and one.tried > 1 for one in found)
    # Noise decides what is kept here; so that something is, the slowest plan is recorded by hand.
    limits = launch.limits_of(current_device())
    slowest = [plan.plans(one.problem, limits)[-1] for one in found]
    tuned.record(
        [tuned.Tuning(one.problem, p, 1.0, 2.0, 2) for one, p in zip(found, slowest, strict=True)],
        current_device().name,
    )
    for m, p in zip(ms, slowest, strict=True):
        x, a = exact_rows(rng, m, 1024, FP16)
        assert mj.explain(x, w).plan == p
        assert np.array_equal((x @ w).get(), (a @ values).astype(np.float32).astype(FP16))
    assert len(json.loads(own_cache.read_text())["tuned"]) == len(ms)


def test_the_command_tunes_a_packed_file(own_cache, tmp_path, rng) -> None:
    dense = rng.standard_normal((256, 192), dtype=np.float32)
    packed = {name: mj.pack(mj.quantize(dense)) for name in ("a", "b")}
    mj.save(tmp_path / "model.safetensors", packed)
    args = [
        "tune",
        str(tmp_path / "model.safetensors"),
        "--m",
        "1",
        "--m",
        "20",
        "--seconds",
        "0.2",
        "--json",
    ]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [one["m"] for one in told["tuned"]] == [1, 20]  # layers a and b are of one kind
    assert told["file"] == str(own_cache) and own_cache.exists()
    result = CliRunner().invoke(
        main, ["tune", "--k", "256", "--n", "128", "--m", "8", "--zeros", "integer", "--seconds", "0.1"]
    )
    assert result.exit_code == 0 and "planned us" in result.output, result.output


def test_without_tensor_maps_products_are_the_same(rng, monkeypatch) -> None:
    qw, values = exact_weight(rng, 1024, 328, 128, FP16, exponents=(-3, 3))
    w = mj.pack(qw)
    x, a = exact_rows(rng, 100, 1024, FP16)
    monkeypatch.setattr(_tensor_map, "available", lambda: False)
    assert mj.explain(x, w).plan.build.name == "marlin_gemm"
    assert np.array_equal((x @ w).get(), (a @ values).astype(np.float32).astype(FP16))
