"""``marlin-jit bench --host``: what is timed and how it is averaged, on a made-up clock."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from cli_runner import run

from marlin_jit import host_cost
from marlin_jit.bench import Problem
from marlin_jit.host_cost import HostCost, forget, measure_host, time_calls
from marlin_jit.plan import Limits, Zeros, choose
from marlin_jit.plan import Problem as PlanProblem


class Host:
    """A clock that calls move: each takes what `cost` says for its number."""

    def __init__(self, cost: Any) -> None:
        self.now, self.log, self._cost, self._count = 100.0, [], cost, 0  # type: float, list[str], Any, int

    def call(self) -> None:
        self.now += 1e-6 * self._cost(self._count)
        self._count += 1
        self.log.append("call")

    def synchronize(self) -> None:
        self.now += 1.0  # a second of waiting that must not be counted
        self.log.append("wait")

    def prepare(self) -> None:
        self.now += 2.0
        self.log.append("prepare")


def timed(host: Host, calls: int, batches: int) -> HostCost:
    return time_calls(
        host.call,
        calls=calls,
        batches=batches,
        synchronize=host.synchronize,
        prepare=host.prepare,
        clock=lambda: host.now,
    )


def test_samples_are_microseconds_a_call_without_waiting() -> None:
    host = Host(lambda i: 500.0 if i < 4 else 5.0 + i // 4)
    cost = timed(host, calls=4, batches=3)
    assert cost.samples == pytest.approx((6.0, 7.0, 8.0))  # the first batch, which is slow, does not count
    assert (cost.best, cost.median, cost.calls) == (pytest.approx(6.0), pytest.approx(7.0), 4)
    assert host.log == ["prepare", *["call"] * 4, "wait"] * 4


def test_a_batch_leaves_the_queue_of_launches_far_from_full() -> None:
    assert host_cost.CALLS <= 256


class Product:
    """`matmul` that computes, takes known times on the clock, and notes how it was called."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, []  # type: float, list[tuple[int, int, bool, bool]]
        self._shapes: set[int] = set()

    def __call__(self, x: Any, w: Any, out: Any = None) -> Any:
        m = x.shape[0]
        known = m in w.repeats
        w.repeats[m] = "prepared"
        self.now += 1e-6 * ((7.0 if out is not None else 9.0) if known else 150.0 + m)
        self.calls.append((m, x.ctypes.data, out is not None, known))
        if out is None or (m, out.ctypes.data) in self._shapes:
            return out
        self._shapes.add((m, out.ctypes.data))  # computed once: what is timed need not be
        out[...] = (x.astype(np.float32) @ _dense(w)).astype(x.dtype)
        return out


def _dense(w: Any) -> Any:
    from marlin_jit.pack import dequantize

    return dequantize(w).astype(np.float32)


def test_three_kinds_of_call_at_each_m() -> None:
    problem = Problem(256, 192, [1, 16], xp=np, copies=1)
    product = Product()
    records = measure_host(
        problem, [1, 16], matmul=product, synchronize=lambda: None, clock=lambda: product.now
    )
    assert [(r["m"], r["call"]) for r in records] == [
        (m, c) for m in (1, 16) for c in ("out", "new", "first")
    ]
    assert [r["median_us"] for r in records] == [7.0, 9.0, 151.0, 7.0, 9.0, 166.0]
    assert [r["best_us"] for r in records] == [r["median_us"] for r in records]
    assert [r["calls"] for r in records] == [200, 200, 1] * 2
    assert all(r["path"] == "reference" and r["reason"] is None for r in records)
    assert all(statistics.median(r["samples"]) == r["median_us"] for r in records)
    # First calls: of activations that lie elsewhere each time, with memory for the result.
    first = [(m, x, out) for m, x, out, known in product.calls if not known]
    assert len({x for m, x, _ in first if m == 16}) == host_cost.FIRST_CALLS + 2
    assert all(out for _, _, out in first)


def test_a_wrong_product_is_not_timed() -> None:
    problem = Problem(256, 192, [1], xp=np, copies=1)
    problem._reference[True] *= 1.01
    product = Product()
    records = measure_host(problem, [1], matmul=product, synchronize=lambda: None, clock=lambda: product.now)
    assert len(product.calls) == 1
    assert all(r["best_us"] is None and r["reason"].startswith("wrong result: error 9") for r in records)


def test_forgetting_plans_and_prepares_anew() -> None:
    problem = Problem(256, 192, [1], xp=np, copies=1)
    weight = problem.weights(True)[0]
    weight.repeats["kind"] = "prepared"
    choose(PlanProblem(1, 256, 192, 128, Zeros.NONE, False), Limits(132, 232448, 233472, 9))
    assert choose.cache_info().currsize
    forget(weight)
    assert not weight.repeats
    assert choose.cache_info().currsize == 0


def test_table_has_a_row_a_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from marlin_jit.cli import bench

    asked: dict[str, Any] = {}

    def problem(k: int, n: int, ms: Any, **more: Any) -> str:
        asked.update(k=k, n=n, ms=ms, **more)
        return "problem"

    def measured(problem: str, ms: Any, progress: Any) -> list[dict[str, Any]]:
        progress("M = 1")
        times = {"out": (7.5, 7.75), "new": (9.0, 9.5), "first": (150.0, 160.5)}
        base = {"m": 1, "path": "marlin", "calls": 200, "samples": [], "reason": None}
        return [base | {"call": c, "best_us": b, "median_us": m} for c, (b, m) in times.items()]

    monkeypatch.setattr(bench, "device_facts", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(bench, "Problem", problem)
    monkeypatch.setattr(bench, "measure_host", measured)
    done = run("bench", "--host")
    assert done.code == 0
    assert asked == {
        "k": 1024, "n": 1024, "ms": (1, 16), "group_size": 128, "dtype": "float16", "copies": 1,
    }  # fmt: skip
    lines = done.out.splitlines()
    assert lines[0] == "a GPU, K 1024 x N 1024, group size 128, float16; the host's microseconds a call"
    assert lines[1].split() == ["M", "call", "best", "median", "path"]
    assert lines[2].split() == ["1", "matmul(x,", "w,", "out=out)", "7.50", "7.75", "marlin"]
    assert len(lines) == 5
    found = run("bench", "--host", "--json", "--k", "2048", "--m", "3").json
    assert found["layer"] == {"k": 2048, "n": 1024, "group_size": 128, "dtype": "float16"}
    assert [r["median_us"] for r in found["records"]] == [7.75, 9.5, 160.5]
    assert asked["ms"] == (3,)
