"""``benchmarks.cliff``: which M are timed, what counts as a cliff, the document, the picture, the passes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import numpy as np
import pytest

from marlin_jit.bench import Problem
from marlin_jit.plan import Build
from marlin_jit.timing import Timing

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks import cliff  # noqa: E402
from benchmarks.report import compact  # noqa: E402

# Which M


@pytest.mark.parametrize(
    ("m", "full"),
    [(1, 8), (8, 8), (9, 16), (25, 32), (33, 48), (65, 80), (113, 128), (128, 128), (129, 256), (8191, 8192)],
)
def test_the_next_m_that_fills_tiles(m: int, full: int) -> None:
    assert cliff.aligned(m) == full


def test_rows_by_hand() -> None:
    assert cliff.rows_to_time(16, 0) == [1, 2, 3, 4, 5, 7, 8, 9, 15, 16]
    # 17 is compared with 24, 33 with 48
    assert cliff.rows_to_time(64, 0)[10:] == [17, 24, 31, 32, 33, 48, 63, 64]


def test_default_rows_are_regular_random_and_aligned_ones() -> None:
    rows = cliff.rows_to_time()
    assert rows == sorted(set(rows)) == cliff.rows_to_time()
    assert (rows[0], rows[-1]) == (1, 8192)
    regular = {m for p in range(14) for m in ((1 << p) - 1, 1 << p, (1 << p) + 1)} - {0, 8193}
    assert regular <= set(rows)
    assert all(cliff.aligned(m) in rows for m in rows)
    without = cliff.rows_to_time(count=0)
    drawn = set(rows) - set(without)
    assert len(drawn) >= 100 - (len(without) - len(regular))
    assert sum(m < 512 for m in drawn) > 25 and sum(m > 512 for m in drawn) > 25  # log-uniform
    assert rows != cliff.rows_to_time(seed=1)


# What counts as a cliff


def test_time_that_falls_is_found_with_the_least_later_time() -> None:
    times = {1: 10.0, 2: 10.0, 64: 30.0, 65: 24.0, 128: 20.0, 256: 25.0}
    assert cliff.falls(times) == [
        {"m": 64, "us": 30.0, "later_m": 128, "later_us": 20.0},
        {"m": 65, "us": 24.0, "later_m": 128, "later_us": 20.0},
    ]


def test_ties_and_noise_are_no_cliffs() -> None:
    assert cliff.falls({1: 10.0, 2: 10.0, 3: 10.0}) == []
    assert cliff.falls({1: 105.0, 2: 100.0}) == []  # exactly the tolerance
    assert cliff.falls({1: 104.0, 2: 100.0}) == []
    assert [c["m"] for c in cliff.falls({1: 106.0, 2: 100.0})] == [1]
    assert [c["m"] for c in cliff.falls({1: 104.0, 2: 100.0}, tolerance=0.03)] == [1]
    assert cliff.falls({}) == cliff.falls({7: 1.0}) == []


def test_of_equal_later_times_the_largest_m_is_named_whatever_the_order() -> None:
    (found,) = cliff.falls({8: 50.0, 64: 20.0, 1: 90.0, 16: 20.0, 4: 20.0, 2: 19.0})[1:]
    assert found == {"m": 8, "us": 50.0, "later_m": 64, "later_us": 20.0}


def test_part_tiles_that_take_longer_than_full_ones_are_found() -> None:
    times = {1: 9.3, 7: 9.1, 8: 8.0, 33: 23.1, 48: 20.0, 129: 40.0, 256: 41.0}
    assert cliff.over_aligned(times) == [
        {"m": 1, "us": 9.3, "aligned_m": 8, "aligned_us": 8.0},
        {"m": 33, "us": 23.1, "aligned_m": 48, "aligned_us": 20.0},
    ]
    assert [c["m"] for c in cliff.over_aligned(times, limit=1.1)] == [1, 7, 33]


def test_an_aligned_m_is_not_compared_and_a_missing_one_is_passed_over() -> None:
    assert cliff.over_aligned({8: 99.0, 16: 1.0, 33: 50.0, 64: 1.0}) == []


# The document


def _point(m: int, us: float, k: int = 4096, n: int = 4096) -> dict[str, Any]:
    return {"k": k, "n": n, "m": m, "us": us, "pass_us": [us, us], "kernel": "marlin_wgmma", "m_tile": 64}


def _document(complete: bool = True, **more: Any) -> dict[str, Any]:
    points = [_point(33, 12.0), _point(48, 10.0), _point(64, 11.0), _point(1, 30.0, 64, 8192)]
    given: dict[str, Any] = {"date": "2026-01-01", "environment": {}, "tolerance": 0.05, "seconds": 12.34}
    return cliff.document(points, complete=complete, **given | more)


def test_a_document_holds_points_and_cliffs_of_each_layer() -> None:
    data = _document()
    assert (data["schema"], data["seconds"], data["complete"]) == ("marlin-jit-cliff/1", 12.3, True)
    layer = {"k": 4096, "n": 4096}
    # M = 1 of the other layer takes longer than all of these, which is no cliff; nor is 11.0 after 10.0
    assert data["falls"] == [layer | {"m": 33, "us": 12.0, "later_m": 48, "later_us": 10.0}]
    assert data["over_aligned"] == [layer | {"m": 33, "us": 12.0, "aligned_m": 48, "aligned_us": 10.0}]
    assert len(data["points"]) == 4
    assert _document(tolerance=0.2)["falls"] == []
    assert data["method"]["replays"] == 5 and data["method"]["passes"] == 2
    assert json.loads(compact(data, "points")) == data


def test_the_summary_names_each_cliff() -> None:
    lines = cliff.summary(_document()).splitlines()
    assert lines[0] == "time falls by more than 5% as M grows: 1"
    assert lines[1].split() == ["K", "x", "N", "M", "us", "later", "M", "us", "ratio"]
    assert lines[2].split() == ["4096", "x", "4096", "33", "12.0", "48", "10.0", "1.20"]
    assert lines[3] == "more than 1.15 times the next M that fills its tiles: 1"
    assert len(lines) == 6
    part = cliff.summary(_document(complete=False, tolerance=0.2)).splitlines()
    assert part[:2] == [
        "incomplete: the time allowed was spent",
        "time falls by more than 20% as M grows: nowhere",
    ]


def test_a_point_is_the_median_of_both_passes_and_says_what_was_launched() -> None:
    passes = [
        Timing(us, samples, 16, 4, "graph") for us, samples in ((5.0, (4.0, 5.0, 6.0)), (7.0, (7.0, 8.0)))
    ]
    build = SimpleNamespace(name="marlin_wgmma", defines={"M_TILE": 32})
    how: Any = SimpleNamespace(path="marlin", plan=SimpleNamespace(build=build))
    assert cliff.point(64, 128, 17, passes, how) == {
        "k": 64, "n": 128, "m": 17, "us": 6.0, "pass_us": [5.0, 7.0], "kernel": "marlin_wgmma", "m_tile": 32,
    }  # fmt: skip
    build.name, build.defines = "marlin_decode", {"M_BLOCKS": 1}
    assert cliff.point(64, 128, 17, passes, how)["m_tile"] is None
    how.path, how.plan = "native", None
    got = cliff.point(64, 128, 17, passes[:1], how)
    assert (got["kernel"], got["m_tile"], got["us"]) == ("native", None, 5.0)


def test_the_picture_has_a_line_a_layer_and_the_same_bytes_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *a, **b: (drawn.append(self), save(self, *a, **b))
    )
    for name in ("a.svg", "b.svg"):
        cliff.draw(_document(), tmp_path / name)
    text = (tmp_path / "a.svg").read_bytes()
    assert text == (tmp_path / "b.svg").read_bytes()
    assert text.startswith(b"<?xml")
    (axes,) = drawn[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.lines}
    assert lines == {"K 4096 x N 4096": [(33, 12), (48, 10), (64, 11)], "K 64 x N 8192": [(1, 30)]}


# The measurement, with launches that are played


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device that is played: notes the M timed, and takes M + 100 us a launch, or 5% more later on."""
    seen = SimpleNamespace(ms=[], left=[], loaded=[], read=[], error=1e-4)

    def time_launches(run: Any, copies: int, timer: Any, **options: Any) -> Timing:
        assert options == {"replays": 5, "warmup_ms": 4.0, "point_ms": 12.0}
        run(copies - 1)
        m = seen.called[1].shape[0]
        seen.ms.append(m)
        us = (100.0 + m) * (1.0 if len(seen.ms) <= 3 else 1.05)
        return Timing(us, (us,), 16, copies, "graph")

    def call(variant: Any, x: Any, weight: Any, out: Any) -> None:
        assert (variant.name, x.shape[0]) == ("symmetric", out.shape[0])
        seen.called = variant, x, weight, out

    def explain(x: Any, weight: Any) -> Any:
        build = Build("marlin.cu", f"kernel{x.shape[0] // 17}", (("M_TILE", 16),))
        return SimpleNamespace(path="marlin", plan=SimpleNamespace(build=build))

    monkeypatch.setattr(cliff, "time_launches", time_launches)
    monkeypatch.setattr(cliff, "call", call)
    monkeypatch.setattr(cliff, "explain", explain)

    def load_all(plans: Any) -> None:
        seen.loaded.extend(plan.build.name for plan in plans)

    monkeypatch.setattr(cliff.launch, "load_all", load_all)
    monkeypatch.setattr(cliff, "Problem", lambda *a, **b: Problem(*a, **b, xp=np, copies=2))
    monkeypatch.setattr(Problem, "error", lambda *_: seen.error)

    def read(fields: Any) -> dict[str, str]:
        seen.read.append(len(seen.ms))
        return {"clocks.sm": "1500 MHz"}

    monkeypatch.setattr(cliff, "read_nvidia_smi", read)
    monkeypatch.setattr(cliff, "_BUSY_US", 1000.0)
    return seen


def _timer() -> Any:
    return SimpleNamespace(run=lambda body: body(), synchronize=lambda: None)


def test_two_passes_go_in_opposite_orders_and_the_gpu_is_read_between(played: SimpleNamespace) -> None:
    budget: Any = SimpleNamespace(left=100.0)
    points, reading, complete = cliff.measure_layer(256, 192, [1, 17, 33], _timer(), budget)
    assert complete
    assert played.ms == [1, 17, 33, 33, 17, 1]
    assert [p["m"] for p in points] == [1, 17, 33]
    assert points[0]["pass_us"] == [101.0, 106.05]
    assert points[0]["us"] == pytest.approx(103.525)
    assert [p["kernel"] for p in points] == ["kernel0", "kernel1", "kernel1"]
    assert points[1]["m_tile"] == 16
    assert sorted(played.loaded) == ["kernel0", "kernel1"]  # each build once
    assert played.read == [3]
    assert reading == {"k": 256, "n": 192, "m": 33, "clocks.sm": "1500 MHz"}
    for passes, order in ((1, [1, 17, 33]), (3, [1, 17, 33, 33, 17, 1, 1, 17, 33])):
        played.ms.clear()
        points, _, complete = cliff.measure_layer(256, 192, [1, 17, 33], _timer(), budget, passes)
        assert complete and played.ms == order
        assert all(len(p["pass_us"]) == passes for p in points)


def test_the_gpu_is_busy_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    log: list[Any] = []
    timer: Any = SimpleNamespace(run=lambda body: body(), synchronize=lambda: log.append("waited"))

    def read(fields: Any) -> dict[str, str]:
        log.append(len(launched))
        return {"power.draw": "700 W"}

    monkeypatch.setattr(cliff, "read_nvidia_smi", read)
    assert cliff.read_busy(launched.append, 3, 1e5, timer) == {"power.draw": "700 W"}
    assert launched == [0, 1, 2, 0, 1]
    assert log == [5, "waited"]


@pytest.mark.parametrize(("points", "timed"), [(2, [1, 17]), (4, [1, 17, 33, 33])])
def test_a_run_stops_when_time_is_spent(played: SimpleNamespace, points: int, timed: list[int]) -> None:
    class Spent:
        @property
        def left(self) -> float:
            return 10.0 if len(played.ms) < points else 0.9

    spent: Any = Spent()
    found, reading, complete = cliff.measure_layer(256, 192, [1, 17, 33], _timer(), spent)
    assert not complete
    assert played.ms == timed
    assert [p["m"] for p in found] == sorted(set(timed))  # what was timed once counts too
    assert ("clocks.sm" in reading) == (points > 3)


def test_nothing_wrong_is_timed(played: SimpleNamespace) -> None:
    played.error = 0.01
    budget: Any = SimpleNamespace(left=100.0)
    with pytest.raises(ValueError, match=r"256 x 192 at M = 17: error 1\.00e-02"):
        cliff.measure_layer(256, 192, [1, 17], _timer(), budget)
    assert played.ms == []


# The command


def test_the_command_writes_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: SimpleNamespace
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cliff, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cliff, "CupyTimer", _timer)
    monkeypatch.setattr(cliff, "rows_to_time", lambda: [1, 17, 33])
    monkeypatch.setattr(cliff, "read_nvidia_smi", lambda *_: {"clocks.sm": "1 MHz"})
    out, picture = tmp_path / "new/cliff.json", tmp_path / "cliff.svg"
    given = ["-o", str(out), "--plot", str(picture), "--shape", "256x192", "--shape", "512x64"]
    done = click.testing.CliRunner().invoke(cliff.main, given, catch_exceptions=False)
    assert done.exit_code == 0
    assert "time falls by more than 5% as M grows: nowhere" in done.output
    data = json.loads(out.read_text())
    assert [(p["k"], p["n"], p["m"]) for p in data["points"]][2:4] == [(256, 192, 33), (512, 64, 1)]
    assert data["complete"] is True
    during = data["environment"]["nvidia_smi_during"]
    assert [(r["k"], r["n"], r["m"]) for r in during] == [(256, 192, 33), (512, 64, 33)]
    assert all(r["clocks.sm"] == "1 MHz" for r in during)
    assert picture.read_text().startswith("<?xml")


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, played: SimpleNamespace
) -> None:
    monkeypatch.setattr(cliff, "unavailable_reason", lambda: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it then fails
    done = click.testing.CliRunner().invoke(cliff.main, ["--plot", str(tmp_path / "x.svg")])
    assert done.exit_code == 2
    assert "error: matplotlib cannot be imported" in done.output
    assert played.ms == []
