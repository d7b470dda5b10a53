"""``benchmarks.sweep``: what is recorded of a plan, and how the planner's choices are judged."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks import sweep  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402
from marlin_jit import autotune, launch, plan  # noqa: E402

H200 = plan.Limits(132, *launch.ARCH_LIMITS["90a"])


def record(m: int, us: float) -> sweep.Record:
    return {"k": 64, "n": 128, "m": m, "us": us, "predicted": 1.0, "plan": "p"}


def test_more_than_300_problems() -> None:
    layers = {*SHAPES, *sweep.OTHER_SHAPES}
    assert len(layers) * len(set(sweep.MS)) >= 300
    assert (min(sweep.MS), max(sweep.MS)) == (16, 8192)
    assert any(m % 8 for m in sweep.MS)  # rows that fill no tile


def test_the_first_plan_of_a_problem_is_judged_by_the_best() -> None:
    records = [record(16, 10.0), record(16, 8.0), record(16, 9.0), record(32, 20.0), record(32, 20.5)]
    first, second = sweep.losses(records)
    assert (first["m"], first["us"], first["best"], round(first["loss"], 6)) == (16, 10.0, 8.0, 0.25)
    assert (second["m"], second["us"], second["best"], second["loss"]) == (32, 20.0, 20.0, 0.0)
    head, *table = sweep.summary(records).splitlines()
    assert head.startswith("5 plans of 2 problems timed") and "at 50.0% of them, 12.50% over" in head
    assert "25.0%" in table[-2] and "0.0%" in table[-1]  # the farthest first


def test_plans_of_a_problem_have_names_of_their_own() -> None:
    for m in (16, 64, 513, 8192):
        found = plan.plans(plan.Problem(m, 4096, 4096, 128, plan.Zeros.POINTS, False), H200)
        assert len({sweep.name_of(p) for p in found}) == len(found)
        worth = autotune.worth_trying(found)
        records = sweep.records_of(4096, 4096, m, worth, range(1, len(worth) + 1))
        assert [r["us"] for r in records] == list(range(1, len(worth) + 1))
        assert records[0]["predicted"] == round(found[0].microseconds, 2)
        assert sweep.losses(records)[0]["loss"] == 0
